"""Ray for a run, without Ray: bundles, environments and errors by value."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from tests.support.configs import ROOT
from tests.support.devices import SPREAD, gpus
from torchrl_grpo.host import startup
from torchrl_grpo.runtime import cluster as cluster_module
from torchrl_grpo.runtime.cluster import (
    ActorAllocation,
    allocations,
    by_machine,
    require_ray,
    start,
)
from torchrl_grpo.runtime.placement import DevicePlan


def test_any_number_of_cpu_processes_fits_on_two_cores() -> None:
    bundles, shares = allocations(SPREAD, [2.0])
    assert bundles == [{"CPU": 0.25}] * 6
    assert shares["reference"] == [
        ActorAllocation(4, (torch.device("cpu"),), 0.25, 0),
        ActorAllocation(5, (torch.device("cpu"),), 0.25, 0),
    ]
    assert allocations(SPREAD, [64.0])[0] == [{"CPU": 1.0}] * 6
    assert allocations(SPREAD, [1.0, 1.0, 1.0, 1.0])[0] == [{"CPU": 0.5}] * 6


def test_a_tensor_parallel_replica_is_one_bundle() -> None:
    plan = DevicePlan(gpus(0, 1), (gpus(2, 3), gpus(4, 5)), gpus(6), colocated=False)
    bundles, shares = allocations(plan, [16.0])
    one, two = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 2.0}
    assert bundles == [one, one, two, two, one]
    assert shares["inference"] == [
        ActorAllocation(2, gpus(2, 3), 2.0, 2),
        ActorAllocation(3, gpus(4, 5), 2.0, 2),
    ]


def test_processes_that_share_a_gpu_share_a_bundle() -> None:
    bundles, shares = allocations(DevicePlan(gpus(0), (gpus(1),), gpus(0), colocated=False), [8.0])
    assert bundles == [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    assert shares["train"] == shares["reference"] == [ActorAllocation(0, gpus(0), 1.0, 0.5)]
    bundles, shares = allocations(DevicePlan(gpus(0), (gpus(0),), gpus(0), colocated=True), [8.0])
    assert bundles == [{"CPU": 3.0, "GPU": 1.0}]
    assert shares["inference"][0].num_gpus == 0.3333


def test_roles_that_take_turns_on_several_gpus_share_a_bundle_for_each() -> None:
    bundles, shares = allocations(
        DevicePlan(gpus(0, 1), (gpus(0), gpus(1)), gpus(0), colocated=True), [8.0]
    )
    assert bundles == [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert (
        shares["train"]
        == shares["inference"]
        == [ActorAllocation(0, gpus(0), 1.0, 0.3333), ActorAllocation(1, gpus(1), 1.0, 0.5)]
    )
    bundles, shares = allocations(
        DevicePlan(gpus(0, 1, 2, 3), (gpus(0, 2), gpus(3, 1)), (), colocated=True), [8.0]
    )
    assert bundles == [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}]
    assert [allocation.bundle for allocation in shares["train"]] == [0, 1, 0, 1]
    assert shares["inference"] == [
        ActorAllocation(0, gpus(0, 2), 2.0, 1),
        ActorAllocation(1, gpus(3, 1), 2.0, 1),
    ]
    bundles, shares = allocations(
        DevicePlan(gpus(0, 1, 2), (gpus(0, 2),), gpus(1, 2), colocated=True), [8.0]
    )
    assert bundles == [
        {"CPU": 5.0, "GPU": 2.0},
        {"CPU": 2.0, "GPU": 1.0},
    ]  # joined through an engine
    assert [allocation.bundle for allocation in shares["train"]] == [0, 1, 0]
    assert [allocation.num_gpus for allocation in shares["inference"]] == [0.6666]


def test_what_works_on_servers_takes_no_gpu_and_shares_no_bundle() -> None:
    cpu = torch.device("cpu")
    bundles, shares = allocations(
        DevicePlan(gpus(0), ((cpu,), (cpu,)), (), colocated=False, teacher=(cpu,)), [8.0]
    )
    assert bundles == [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 1.0}]
    assert shares["inference"] == [
        ActorAllocation(1, (cpu,), 1.0, 0),
        ActorAllocation(2, (cpu,), 1.0, 0),
    ]
    assert shares["teacher"] == [ActorAllocation(3, (cpu,), 1.0, 0)]


def test_a_process_is_pinned_to_the_plans_devices_among_the_visible_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(startup, "_skips_imports", False)
    allocation = ActorAllocation(0, gpus(1, 3), 2.0, 2)
    assert cluster_module.process_environment(allocation, 3, pinned=True) == {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "CUDA_VISIBLE_DEVICES": "5,7",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "OMP_NUM_THREADS": "6",
    }
    unpinned = cluster_module.process_environment(allocation, 3, pinned=False)
    assert unpinned == {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "6"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert (
        cluster_module.process_environment(allocation, 3, pinned=True)["CUDA_VISIBLE_DEVICES"]
        == "1,3"
    )
    assert "OMP_NUM_THREADS" not in cluster_module.process_environment(allocation, 3, pinned=True)


def test_memory_of_training_ranks_on_cuda_grows_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    allocation = ActorAllocation(0, gpus(1), 1.0, 1)
    assert cluster_module.allocator_environment(allocation) == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True"
    }
    assert (
        cluster_module.allocator_environment(ActorAllocation(0, (torch.device("cpu"),), 1.0, 0))
        == {}
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert cluster_module.allocator_environment(allocation) == {}


def test_a_missing_or_old_ray_is_refused_with_the_line_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_module.importlib.metadata, "version", lambda _: "2.51.1")
    with pytest.raises(ValueError, match=r"2\.59 .* 2\.51\.1: pip install --upgrade"):
        require_ray()

    def missing(name: str) -> str:
        raise cluster_module.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cluster_module.importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=r'ray .*: pip install "torchrl_grpo\[ray\]"'):
        start()
    monkeypatch.setattr(cluster_module.importlib.metadata, "version", lambda _: "3.0.0rc1")
    require_ray()


def test_what_a_cluster_lacks_is_said_with_numbers() -> None:
    nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0}]
    everything = {"CPU": 16.0, "GPU": 4.0}
    lacks = cluster_module.missing_resources([{"CPU": 1.0, "GPU": 1.0}] * 6, nodes, everything)
    assert lacks == "6 GPU are needed, but only 4 of 4 are free"
    lacks = cluster_module.missing_resources([{"CPU": 4.0, "GPU": 4.0}], nodes, everything)
    assert lacks == "one process needs 4 GPU, but no machine has more than 2"


def test_nothing_switches_on_vllms_insecure_serialization() -> None:
    assert [
        path
        for path in (ROOT / "torchrl_grpo").rglob("*.py")
        if "INSECURE_SERIALIZATION" in path.read_text()
    ] == []


def test_only_our_folders_of_killed_runs_are_removed_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        killed = Path(cluster_module.short_folder().name).parent  # its lock is released here
        pipe, link, results, others = (
            folder / f"grpo-ray-{name}" for name in ("pipe", "link", "results", "others")
        )
        for path in (pipe, results, others, folder / "ray-results"):
            path.mkdir()
        link.symlink_to(results)
        os.mkfifo(pipe / "lock")
        (results / "lock").touch()
        (folder / "ray-results" / "lock").write_bytes(b"")
        shutil.copyfile(killed / "lock", folder / "mark")
        (others / "lock").symlink_to(folder / "mark")
        left = sorted(path for path in folder.iterdir() if path != killed)
        first = cluster_module.short_folder()
        second = cluster_module.short_folder()  # of another run at the same time
        assert sorted(folder.iterdir()) == sorted(
            [*left, *(Path(lock.name).parent for lock in (first, second))]
        )
        for lock in (first, second):
            cluster_module.remove_folder(lock)
        assert sorted(folder.iterdir()) == left
        assert (results / "lock").exists()
    finally:
        shutil.rmtree(folder)


def test_ranks_that_compute_layers_together_are_one_bundle() -> None:
    plan = DevicePlan(gpus(0, 1, 2, 3), (gpus(4),), gpus(0), colocated=False)
    bundles, shares = allocations(plan, [16.0], tensor_parallel_size=2)
    assert bundles == [{"CPU": 3.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}]
    assert [allocation.bundle for allocation in shares["train"]] == [0, 0, 1, 1]
    assert [allocation.num_gpus for allocation in shares["train"]] == [0.5, 1, 1, 1]
    assert shares["reference"] == [ActorAllocation(0, gpus(0), 1.0, 0.5)]
    cpu = torch.device("cpu")
    bundles, shares = allocations(
        DevicePlan((cpu,) * 4, ((cpu,),), (), colocated=False), [8.0], tensor_parallel_size=2
    )
    assert bundles == [{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 1.0}]
    assert [allocation.bundle for allocation in shares["train"]] == [0, 0, 1, 1]


def test_the_ranks_of_a_machine_follow_each_other() -> None:
    plan = DevicePlan(gpus(0, 1, 2, 3, 4, 5), (gpus(6),), (), colocated=False)
    _, shares = allocations(plan, [16.0])
    got = by_machine(shares["train"], ["b", "a", "c", "b", "a", "c", "a"])
    assert [allocation.bundle for allocation in got] == [0, 3, 1, 4, 2, 5]
    _, shares = allocations(plan, [16.0], tensor_parallel_size=2)
    assert [
        allocation.bundle for allocation in by_machine(shares["train"], ["b", "a", "b", "a"])
    ] == [0, 0, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("memory", "shared", "store", "warned"),
    [
        (1000, 900, 500, False),  # half of the memory, where Ray takes 30%
        (1000, 400, 380, False),
        (1000, 100, 95, False),
        (100, 0.064, 10, True),  # a container without --ipc host: Ray's minimum, in files
    ],
)
def test_the_object_store_takes_what_the_memory_and_dev_shm_allow(
    memory: float, shared: float, store: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = pytest.importorskip("ray._private.utils")
    messages: list[str] = []
    monkeypatch.setattr(utils, "estimate_available_memory", lambda: int(memory * 1e9))
    monkeypatch.setattr(utils, "get_shared_memory_bytes", lambda: int(shared * 1e9))
    monkeypatch.setattr(cluster_module.torchrl_logger, "warning", messages.append)
    assert cluster_module.object_store_memory() == pytest.approx(store * 1e9)
    assert bool(messages) == warned

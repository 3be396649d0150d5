"""A real Ray cluster for a run, which must be gone without a trace afterwards."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import forks
from tests.support.clusters import facts
from tests.support.configs import ROOT, compose_config
from tests.support.devices import SPREAD, TWO, gpus
from tests.support.processes import alive, below, command_line, listening
from torchrl_grpo.assembly.run import build
from torchrl_grpo.config import ConfigError
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.runtime.cluster import start
from torchrl_grpo.runtime.placement import DevicePlan

ray = pytest.importorskip("ray")


def ended() -> None:
    """A signal handler that Ray must leave in place."""


def test_a_cluster_has_a_place_for_each_process_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # a cluster that was already there
    monkeypatch.delenv(forks.ADDRESS, raising=False)
    before = set(below())
    previous = signal.signal(signal.SIGTERM, lambda *_: ended())
    handler = signal.getsignal(signal.SIGTERM)
    cluster = start()
    try:
        assert signal.getsignal(signal.SIGTERM) is handler
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert not ray._private.worker._global_node.webui_url  # no dashboard
        with pytest.raises(
            ValueError,
            match=r"2 GPU .* 0 of 0",
        ):
            cluster.place(DevicePlan(gpus(0), (gpus(1),), (), colocated=False), timeout_s=0.5)
        got = facts(cluster.place(SPREAD))
        assert {role: len(some) for role, some in got.items() if some} == {
            "train": 2,
            "inference": 2,
            "reference": 2,
        }
        threads = max(1, int(ray.cluster_resources()["CPU"]) // 6)
        for fact in itertools.chain(*got.values()):
            assert fact["environ"]["OMP_NUM_THREADS"] == str(threads)
            assert fact["environ"]["RAY_AUTH_MODE"] == "token"
            assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in fact["environ"]
        started = set(below()) - before
        assert {fact["child"] for fact in got["train"]} <= started
        children = psutil.Process().children(recursive=True)
        lines = [command_line(child) for child in children if child.pid in started]
        assert "ray::IDLE" not in " ".join(lines)  # a process that no actor uses
        assert listening(started) == {"127.0.0.1"}
        folder = Path(cluster._folder_lock.name).parent
        assert folder is not None and folder.is_dir()
    finally:
        cluster.shutdown()
        cluster.shutdown()
        signal.signal(signal.SIGTERM, previous)
    assert alive(started) == []
    assert not folder.exists()


@pytest.mark.nightly
def test_two_runs_have_a_cluster_each_also_where_ray_starts_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = set()
    init = ray.init
    tries = []

    def slow_once(**options: Any) -> Any:
        tries.append(options)
        if (
            len(tries) == 1
        ):  # Ray's own message when a busy machine takes longer than its limit of 30 s
            raise Exception("The current node timed out during startup. This could happen because")
        return init(**options)

    monkeypatch.setattr(ray, "init", slow_once)
    for number in (2, 3):
        cluster = start()
        assert len(tries) == number
        try:
            addresses.add(ray.get_runtime_context().gcs_address)
            assert len(facts(cluster.place(TWO))["train"]) == 1
        finally:
            cluster.shutdown()
    assert len(addresses) == 2


HOST = """
import sys, ray
from tests.support import forks
forks.use_in_ray()
context = ray.init(address="local", num_cpus=2, num_gpus=6, include_dashboard=False, logging_level="error")
print(context.address_info["gcs_address"], flush=True)
for _ in sys.stdin:
    free = ray.available_resources()
    print(free.get("CPU"), free.get("GPU"), flush=True)
"""

JOINER = """
import json, sys
from torchrl_grpo.runtime.cluster import start
from torchrl_grpo.runtime.placement import DevicePlan
from tests.support.clusters import facts
from tests.support.devices import gpus

cluster = start(sys.argv[1])
try:
    there = len(cluster.accelerators())
    plan = DevicePlan(gpus(0, 1), (gpus(2, 3),), gpus(0), colocated=False)
    print(json.dumps([there, facts(cluster.place(plan))]))
finally:
    cluster.shutdown()
"""


@dataclass
class Host:
    """A process with a cluster of 2 CPUs and 6 simulated GPUs."""

    process: subprocess.Popen[str]
    address: str

    def join(self, *command: str) -> str:
        """Return the output of a process that joins the cluster, all of whose resources it must
        return.

        The cluster's token is only in ``~/.ray``; the process isn't told about it.
        """
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": self.address}
        environment.pop("RAY_AUTH_MODE", None)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with forks.Popen([sys.executable, *command], env=environment, **pipes) as joining:
            out, error = joining.communicate(timeout=600)
        assert joining.returncode == 0, out + error
        assert "InvalidAuthToken" not in out + error
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().split() == ["2.0", "6.0"]
        return out


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    process = forks.Popen(  # the cluster's workers get this environment too
        [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout
        yield Host(process, process.stdout.readline().strip())
    finally:
        process.communicate(timeout=300)


def test_a_joined_cluster_gives_its_gpus_and_gets_them_back(host: Host) -> None:
    there, got = json.loads(host.join("-c", JOINER, host.address))
    assert there == 6
    ids = {role: [fact["gpus"] for fact in some] for role, some in got.items()}
    assert len({*ids["train"][0], *ids["train"][1], *ids["inference"][0]}) == 4
    assert len(ids["inference"][0]) == 2
    assert ids["reference"][0] == ids["train"][0]
    assert got["inference"][0]["environ"]["CUDA_VISIBLE_DEVICES"] == ",".join(ids["inference"][0])
    assert alive(fact["child"] for some in got.values() for fact in some) == []


@pytest.mark.nightly
def test_the_synchronous_script_runs_on_the_clusters_accelerators(
    host: Host, tmp_path: Path
) -> None:
    small = [
        "env.num_envs=16",
        "env.repeats=4",
        "train.total_dialog_turns=32",
        "evaluation.num_prompts=0",
    ]
    where = ["ray.address=auto", f"hydra.run.dir={tmp_path}", "logging.tensorboard=false"]
    printed = host.join(
        str(ROOT / "sota/grpo/grpo.py"), "--config-name", "grpo_arithmetic", *small, *where
    )
    for role, device in (("train", "cuda:0"), ("inference", "cuda:1"), ("reference", "cuda:2")):
        assert re.search(rf"{role}\b.* {device}\b", printed), printed
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (tmp_path / "checkpoints" / "model" / "model.safetensors").exists()


def test_a_malformed_address_ends_a_run_before_anything_starts(tmp_path: Path) -> None:
    message = r"^ray\.address=somewhere must be auto or host:port: use ray\.address=auto\.$"
    with pytest.raises(ConfigError, match=message):
        build(compose_config("ray.address=somewhere"), tmp_path / "run")
    assert not ray.is_initialized()
    assert list((tmp_path / "run").iterdir()) == []


DRIVER = """
import time
import ray
from torchrl_grpo.config import orderly_exit
from torchrl_grpo.runtime.cluster import start
from tests.support.clusters import facts
from tests.support.devices import TWO

with orderly_exit():
    cluster = start()
    try:
        facts(cluster.place(TWO))
        never = ray.remote(num_cpus=0)(lambda: time.sleep(600)).remote()
        print("ready", flush=True)
        ray.get(never)
    finally:
        cluster.shutdown()
"""


def test_a_terminated_run_leaves_no_process_and_no_folder() -> None:
    """The signal goes to the script alone. ``test_async_script`` tests Ctrl-C, which all processes
    receive.
    """
    folder = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))  # Ray's sockets need a short path
    driver = forks.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        start_new_session=True,
    )
    try:
        assert driver.stdout and "ready" in driver.stdout.readline()
        pids = below(driver.pid)
        assert [path.name[:9] for path in folder.glob("*ray*")] == ["grpo-ray-"]
        # Two workers with a process each, and Ray's own processes, of which Python 3.13 has fewer.
        lines = [
            command_line(child) for child in psutil.Process(driver.pid).children(recursive=True)
        ]
        assert len([line for line in lines if line not in ("", forks.SERVER)]) >= 6
        driver.terminate()
        assert driver.wait(300) == 143
        assert alive(pids) == []
        assert list(folder.glob("ray*")) == []
    finally:
        driver.kill()
        shutil.rmtree(folder)


WATCHED = """
import time
from torchrl_grpo.config import orderly_exit
from torchrl_grpo.runtime.cluster import start

with orderly_exit():
    cluster = start()
    cluster.watch(lambda: "go on with care")
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.nightly
def test_a_killed_object_store_ends_a_watched_script_with_a_message() -> None:
    """test_async_script.py kills the run itself and the raylet."""
    with forks.Popen(
        [sys.executable, "-c", WATCHED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as script:  # fmt: skip
        assert script.stdout and "ready" in script.stdout.readline()
        family = psutil.Process(script.pid).children(recursive=True)
        [store] = [child.pid for child in family if "gcs/gcs_server" in command_line(child)]
        os.kill(store, signal.SIGKILL)
        _, error = script.communicate(timeout=300)
        script.kill()
    assert script.returncode == 1
    assert (
        f"\nerror: Ray's gcs_server (process {store}) has ended, and the run with it: go on with care.\n"
        in error
    )
    assert "Traceback" not in error
    assert alive(family) == []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"must be .* that can be joined \(.*refused.*\): start one"),
        ("127.0.0.1:70000", "must be auto or host:port"),
        ("somewhere", r"must be auto or host:port: use ray\.address=auto"),
        ("ray://127.0.0.1:10001", "must be auto or host:port"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"ray\.address={re.escape(address)} {message}"):
        start(address)

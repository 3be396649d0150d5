"""Each kind of weight transfer from two sharded ranks to two engines, on a real Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.support.configs import compose_config
from tests.support.models import make_tiny_model
from torchrl_grpo.config import ConfigError
from torchrl_grpo.generation import SamplingParams, TransformersEngine
from torchrl_grpo.models.sharding import shard_model
from torchrl_grpo.placement import ROLES, DevicePlan, RoleRequest, plan_devices
from torchrl_grpo.run import build
from torchrl_grpo.weights import (
    BroadcastSender,
    FileSender,
    ObjectSender,
    Sender,
    SharedSender,
    WeightHandle,
    named_weights,
)

pytest.importorskip("ray")

from torchrl_grpo.build_distributed import choose_transfer
from torchrl_grpo.distributed.trainer import RayTrainer

from torchrl_grpo.distributed import cluster
from torchrl_grpo.distributed.actors import Rank, Replica, RolloutActor, own_address


class Growing:
    """Stands for a trainer: each time that its weights are taken they double, and so version v is 2 ** (v + 1)."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.version, self.optim_steps = model, 0, 0

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for weight in self.model.parameters():
            weight.mul_(2)
        self.version += 1
        return named_weights(self.model)


def expected(version: int) -> dict[str, Tensor]:
    return {name: weight * 2 ** (version + 1) for name, weight in named_weights(make_tiny_model())}


class Several(Sender):
    """One kind after the other."""

    def __init__(self, *senders: Sender) -> None:
        self._senders, self._by_version = senders, dict[int, Sender]()

    def pack(self, weights: Any, version: int) -> WeightHandle:
        self._by_version[version] = self._senders[version % len(self._senders)]
        return self._by_version[version].pack(weights, version)

    def release(self, version: int) -> None:
        self._by_version[version].release(version)


class ShownActor(RolloutActor):
    """Shows its engine's weights."""

    def weights(self) -> dict[str, Tensor]:
        engine: Any = self._replica.engine
        return dict(engine._model.named_parameters())


def make_rank(folder: Path, mesh: DeviceMesh | None) -> Rank:
    assert mesh is not None
    model = shard_model(make_tiny_model(), mesh)
    senders = (
        ObjectSender(torch.float32),
        SharedSender(torch.float32),
        BroadcastSender(torch.float32, "gloo", own_address()),
        FileSender(folder, torch.float32),
    )
    return Rank(Growing(model), [], Several(*senders))  # type: ignore[arg-type]


def make_replica() -> Replica:
    return Replica(TransformersEngine(make_tiny_model(1)), [], None, SamplingParams(1), [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def roles(folder: Path) -> Iterator[tuple[RayTrainer, list[Any]]]:
    import ray

    started = cluster.start()
    options: dict[str, Any] = {"num_cpus": 0}
    try:
        trainer = RayTrainer(partial(make_rank, folder), options=[options] * 2)
        engines = [ray.remote(ShownActor).options(**options).remote(make_replica) for _ in range(2)]
        ready = [engine.setup.remote(0, None) for engine in engines]
        trainer.start()
        ray.get(ready)
        yield trainer, engines
    finally:
        started.shutdown()


def test_two_engines_get_the_weights_of_two_ranks_at_their_own_pace(
    roles: tuple[RayTrainer, list[Any]], folder: Path
) -> None:
    import ray

    trainer, (fast, slow) = roles
    previous = trainer.weights()
    for version in range(1, 9):  # each kind twice
        handle = trainer.weights()
        updates = [fast.update.remote(handle, version), slow.update.remote(previous, version - 1)]
        ray.get(updates, timeout=200)
        for engine, at in ((fast, version), (slow, version - 1)):
            got = ray.get(engine.weights.remote(), timeout=200)
            assert got.keys() == expected(at).keys()
            assert all(torch.equal(got[name], weight) for name, weight in expected(at).items())
        trainer.release(version - 1)
        previous = handle
    deadline = time.monotonic() + 30
    while list(folder.iterdir()) and time.monotonic() < deadline:  # both were released
        time.sleep(0.05)
    assert list(folder.iterdir()) == []


def plan(gpus: int, **devices: int) -> DevicePlan:
    requests = {role: RoleRequest(num_devices=devices.get(role)) for role in ROLES}
    return plan_devices(requests, [torch.device("cuda", i) for i in range(gpus)], needs_reference=False)


CPUS, ONE_GPU, GPUS = plan(0, inference=2), plan(1), plan(4, inference=2)
LORA = "train_model.lora.enabled=true"


@pytest.mark.parametrize(
    ("devices", "overrides", "chosen"),
    [
        (CPUS, [], "object_store"),
        (ONE_GPU, [], "cuda_ipc"),
        (GPUS, [], "broadcast"),
        (GPUS, [LORA], "adapters"),
        (CPUS, ["inference_model.weight_transfer=broadcast"], "broadcast"),
        (GPUS, ["inference_model.weight_transfer=object_store"], "object_store"),
        (ONE_GPU, ["inference_model.weight_transfer=object_store", LORA], "object_store"),
    ],
)
def test_the_kind_is_chosen_by_where_the_two_sides_are(devices: DevicePlan, overrides: list[str], chosen: str) -> None:
    assert choose_transfer(compose_config(*overrides), devices) == chosen


@pytest.mark.parametrize(
    ("devices", "asked", "message"),
    [
        (CPUS, "cuda_ipc", r"they are on cpu and cpu, cpu: use inference_model\.weight_transfer=auto"),
        (GPUS, "cuda_ipc", r"they are on cuda:0 and cuda:1, cuda:2: use inference_model\.weight_transfer=broadcast"),
        (ONE_GPU, "broadcast", r"both are on cuda:0: use inference_model\.weight_transfer=cuda_ipc"),
    ],
)
def test_a_kind_that_cannot_work_there_is_refused(devices: DevicePlan, asked: str, message: str) -> None:
    config = compose_config(f"inference_model.weight_transfer={asked}")
    with pytest.raises(ConfigError, match=message):
        choose_transfer(config, devices)


def test_a_run_in_one_process_has_no_choice(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"weight_transfer=broadcast must be auto where trainer and engine are in one proc"
    ):
        build(compose_config("inference_model.weight_transfer=broadcast"), tmp_path)

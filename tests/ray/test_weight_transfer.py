"""Weights of two sharded ranks for two engines, on a real Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.support.configs import compose_config
from tests.support.models import make_tiny_model
from tests.support.tasks import plays_nothing
from torchrl_grpo.assembly.run import build
from torchrl_grpo.collectors import Sampler
from torchrl_grpo.config import ConfigError
from torchrl_grpo.generation import TransformersEngine
from torchrl_grpo.learner import Learner
from torchrl_grpo.models.sharding import shard_model
from torchrl_grpo.runtime.actors import Actor
from torchrl_grpo.runtime.cluster import Cluster
from torchrl_grpo.runtime.learner import RayLearner
from torchrl_grpo.weights import ObjectSender, named_weights

pytest.importorskip("ray")


class Growing:
    """Stand-in for a trainer whose weights double each time they are read, so that version v is 2
    ** (v + 1).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.version, self.optim_steps = model, 0, 0
        self.parameters, self.update_size = list(model.parameters()), 0.0

    @torch.no_grad()
    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for weight in self.model.parameters():
            weight.mul_(2)
        self.version += 1
        return named_weights(self.model, dtype)


def expected(version: int) -> dict[str, Tensor]:
    return {name: weight * 2 ** (version + 1) for name, weight in named_weights(make_tiny_model())}


class Shown(Sampler):
    """Expose the engine's weights."""

    def weights(self) -> dict[str, Tensor]:
        engine: Any = self.engine
        return dict(engine.model.named_parameters())


def make_learner(mesh: DeviceMesh | None) -> Learner:
    assert mesh is not None
    model = shard_model(make_tiny_model(), mesh)
    return Learner(Growing(model), [], ObjectSender(torch.float32))  # type: ignore[arg-type]


def make_sampler() -> Sampler:
    return Shown(
        TransformersEngine(make_tiny_model(1)),
        plays_nothing,
        None,
        groups_at_a_time=1,
    )


@pytest.fixture(scope="module")
def roles(ray_cluster: Cluster) -> Iterator[tuple[RayLearner, list[Any]]]:
    import ray

    options: dict[str, Any] = {"num_cpus": 0}
    learner = RayLearner(make_learner, options=[options] * 2)
    engines = [ray.remote(Actor).options(**options).remote(make_sampler) for _ in range(2)]
    ready = [engine.setup.remote() for engine in engines]
    learner.start()
    ray.get(ready)
    yield learner, engines
    learner.close()


def test_two_engines_get_the_weights_of_two_ranks_at_their_own_pace(
    roles: tuple[RayLearner, list[Any]],
) -> None:
    import ray

    learner, (fast, slow) = roles
    previous = learner.weights()
    for version in range(1, 4):
        handle = learner.weights()
        updates = [
            fast.call.remote("update", handle, version),
            slow.call.remote("update", previous, version - 1),
        ]
        ray.get(updates, timeout=200)
        for engine, at in ((fast, version), (slow, version - 1)):
            got = ray.get(engine.call.remote("weights"), timeout=200)
            assert got.keys() == expected(at).keys()
            assert all(torch.equal(got[name], weight) for name, weight in expected(at).items())
        learner.release(version - 1)
        previous = handle


def test_a_run_in_one_process_has_no_choice(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="weight_transfer=broadcast must be auto",
    ):
        build(compose_config("inference_model.weight_transfer=broadcast"), tmp_path)

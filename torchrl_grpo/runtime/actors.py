"""What runs in the processes of a distributed run: plain classes that become Ray actors, each around one role's part.

A part is made by a factory, which is called in the actor's own process by ``setup``. Data goes from actor to actor as
object references: of a group, the driver sees the numbers in a ``RolloutReport`` and nothing else.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tensordict import TensorDictBase
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from torchrl_grpo.collectors.sampler import RolloutTask, Sampler
from torchrl_grpo.host.processes import show_stack_when_asked
from torchrl_grpo.host.startup import leave
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.models.sharding import init_mesh
from torchrl_grpo.runtime.cluster import interface_of
from torchrl_grpo.runtime.groups import Travelling, join_groups, score_groups
from torchrl_grpo.runtime.placement import own_device
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.weights import WeightHandle
from torchrl_grpo.weights.broadcast import open_store


class SamplerActor:
    """One sampler: an engine and the environments that it plays."""

    def __init__(self, factory: Callable[[], Sampler]) -> None:
        self._factory = factory

    def setup(self, seed: int, state: dict[str, Any] | None) -> int:
        """Makes the sampler, and seeds its engine or goes on from the state that an earlier actor reported.

        Returns:
            the process id.
        """
        _begin()
        self._sampler = self._factory()
        if state is None:
            self._sampler.engine.seed(seed)
        else:
            self._sampler.engine.load_state_dict(state)
        return os.getpid()

    def update(self, handle: WeightHandle, version: int) -> float:
        """See ``Sampler.update``."""
        return self._sampler.update(handle, version)

    def play(self, task: RolloutTask) -> tuple[Any, ...]:
        """Plays a task; returns its report and one lazy stack a group."""
        report, groups = self._sampler.play(task)
        return (report, *map(Travelling, groups))

    def evaluate(self, sampled: bool) -> tuple[int, dict[str, float], list[dict[str, Any]]]:
        """The version of the engine's weights, and what ``Sampler.evaluate`` gives."""
        return (self._sampler.engine.policy_version, *self._sampler.evaluate(sampled=sampled))

    def probe(self) -> Any:
        """See ``Sampler.probe``."""
        return self._sampler.probe()

    def close(self) -> None:
        """Ends the sampler and its processes."""
        self._sampler.close()


class ReferenceActor:
    """A reference model on its own device."""

    def __init__(self, factory: Callable[[], KLScoring]) -> None:
        self._factory = factory

    def setup(self) -> int:
        """Makes the model; returns the process id."""
        _begin()
        self._scoring = self._factory()
        return os.getpid()

    def update(self, handle: WeightHandle) -> None:
        """Replaces the reference model's weights."""
        self._scoring.update_weights(handle.weights())

    def score(self, *groups: TensorDictBase) -> tuple[Any, ...]:
        """Scores the groups of a task in one batch; returns the seconds and the groups."""
        start = time.perf_counter()
        scored = map(Travelling, score_groups(self._scoring, groups))
        return (time.perf_counter() - start, *scored)


class LearnerActor:
    """One rank of the trainer."""

    def __init__(
        self, factory: Callable[[DeviceMesh | None], Learner], rank: int, world_size: int, tensor_parallel_size: int
    ) -> None:
        self._factory = factory
        self._rank = rank
        self._world_size = world_size
        self._tensor_parallel_size = tensor_parallel_size
        self._store: TCPStore | None = None

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Opens the store in which the ranks find each other, on a free port of this process's host.

        Returns:
            host and port.
        """
        host = own_address()
        self._store = open_store(host, timeout_s)
        return host, self._store.port

    def setup(self, address: tuple[str, int] | None, timeout_s: float) -> tuple[int, int]:
        """Joins the process group, if there is more than one rank, and makes the learner.

        Args:
            address: of rank 0's store, None for a single rank.
            timeout_s: how long a rank waits for the others, here and in each collective call.

        Returns:
            the process id, and the version, which is not 0 in a resumed run.
        """
        _begin()
        mesh = None
        if address is not None:
            # By itself gloo takes what the machine's name stands for, which is often an address of the machine alone.
            if (interface := interface_of(own_address())) is not None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            store = self._store or TCPStore(*address, timeout=timedelta(seconds=timeout_s))
            mesh = init_mesh(
                self._rank,
                self._world_size,
                store,
                device=own_device(),
                timeout_s=timeout_s,
                tensor_parallel_size=self._tensor_parallel_size,
            )
        self._learner = self._factory(mesh)
        return os.getpid(), self._learner.version

    def train(self, *groups: TensorDictBase) -> tuple[int, dict[str, float]]:
        """Trains on the groups of a batch; returns the new version and the metrics."""
        start = time.perf_counter()
        batch = join_groups(groups)
        seconds = {"time/transfer_s": time.perf_counter() - start}
        metrics = self._learner.train_batch(batch) | seconds
        return self._learner.version, metrics

    def send(self, method: str) -> tuple[int, WeightHandle | None]:
        """The version and, on rank 0, the weights that a method of the learner sends."""
        return self._learner.version, getattr(self._learner, method)()

    def call(self, method: str, *arguments: Any) -> Any:
        """What another method of the learner gives."""
        return getattr(self._learner, method)(*arguments)


def _begin() -> None:
    show_stack_when_asked()
    atexit.register(leave)  # where Ray ends before it has killed the actor


def own_address() -> str:
    """Where other machines reach this one."""
    import ray

    return ray.util.get_node_ip_address()

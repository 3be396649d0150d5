"""What runs in the processes of a distributed run: plain classes, which ``source`` and ``trainer`` make Ray actors of.

An actor is made of a factory, which is called in the actor's own process by ``setup``. Data goes from actor to actor as
object references: of a group, the driver sees the numbers in a ``UnitReport`` and nothing else.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils import logging as transformers_logging

from torchrl_grpo import keys
from torchrl_grpo.collectors.dynamic import GroupCounts
from torchrl_grpo.collectors.evaluation import Evaluator
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.summary import rollout_metrics, sample_rows
from torchrl_grpo.generation.base import Engine, SamplingParams, preserve_rng
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.learner.step import GRPOTrainer
from torchrl_grpo.models.sharding import init_mesh
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.weights import ObjectSender, Sender, WeightHandle, log_prob_mismatch, sample_probe


@dataclass(frozen=True)
class Unit:
    """Groups that one replica plays in one go.

    Attributes:
        state: state of the environment that draws them.
        groups: their ids, as that environment gives them.
        stop: the first id that is not this unit's. Dynamic sampling may play any groups below it instead.
    """

    state: dict[str, Any]
    groups: tuple[int, ...]
    stop: int


@dataclass(frozen=True)
class UnitReport:
    """What the driver is told about a unit.

    Attributes:
        groups: ids in the order of the data.
        versions: for each group, the oldest weights that sampled one of its tokens.
        generate_s: seconds in the engine.
        env_s: seconds in the environment, rewards included.
        engine: the engine's state afterwards, None where units overlap.
        dynamic: what dynamic sampling did, None without it.
        rewards: what the reward workers counted since the latest report, nothing without them.
    """

    groups: tuple[int, ...]
    versions: tuple[int, ...]
    generate_s: float
    env_s: float
    engine: dict[str, Any] | None
    dynamic: GroupCounts | None = None
    rewards: dict[str, int] = field(default_factory=dict)


@dataclass
class Replica:
    """The parts of one inference replica.

    Attributes:
        engine: samples; must be thread-safe if there is more than one collector.
        collectors: one for each unit that may be played at a time, all on that engine.
        evaluator: or None.
        params: how training samples are drawn, for the check of the weight sync.
        probe_prompts: prompts for that check, [T] int64 each.
        reward_pool: of all environments of the replica, None where they score themselves.
    """

    engine: Engine
    collectors: Sequence[RolloutCollector]
    evaluator: Evaluator | None
    params: SamplingParams
    probe_prompts: Sequence[Tensor]
    reward_pool: RewardPool | None = None


class RolloutActor:
    """One inference replica: an engine and the environments that it plays."""

    def __init__(self, factory: Callable[[], Replica]) -> None:
        self._factory = factory

    def setup(self, seed: int, state: dict[str, Any] | None) -> int:
        """Makes the parts, and seeds the engine or goes on from the state that an earlier actor reported.

        Returns:
            the process id.
        """
        _be_quiet()
        self._replica = self._factory()
        self._idle: queue.SimpleQueue[RolloutCollector] = queue.SimpleQueue()
        for collector in self._replica.collectors:
            self._idle.put(collector)
        if state is None:
            self._replica.engine.seed(seed)
        else:
            self._replica.engine.load_state_dict(state)
        return os.getpid()

    def update(self, handle: WeightHandle, version: int) -> float:
        """Gives the engine new weights; returns the seconds that it took."""
        start = time.perf_counter()
        self._replica.engine.load(handle, version)
        return time.perf_counter() - start

    def play(self, unit: Unit) -> tuple[Any, ...]:
        """Plays a unit; returns its report and one lazy stack a group."""
        collector = self._idle.get_nowait()
        try:
            collector.env.load_state_dict(unit.state)
            batch = collector.rollout()
            spent = collector.last
        finally:
            self._idle.put(collector)
        groups = [lazy_stack(list(part.unbind(0))) for part in batch.split(len(batch) // len(unit.groups))]
        report = UnitReport(
            groups=tuple(int(group.get(keys.GROUP_ID)[0]) for group in groups),
            versions=tuple(int(group.get(keys.POLICY_VERSION).min()) for group in groups),
            generate_s=spent.generate_seconds,
            env_s=spent.env_seconds,
            engine=self._replica.engine.state_dict() if len(self._replica.collectors) == 1 else None,
            dynamic=spent.groups if collector.dynamic_sampling else None,
            rewards={} if self._replica.reward_pool is None else self._replica.reward_pool.take_counts(),
        )
        return (report, *groups)

    def evaluate(self, sampled: bool) -> tuple[int, dict[str, float], list[dict[str, Any]]]:
        """The engine's version and what its ``Evaluator`` gives."""
        evaluator = self._replica.evaluator
        assert evaluator is not None
        return (self._replica.engine.policy_version, *evaluator.evaluate(sampled=sampled))

    def probe(self) -> Any:
        """A few sampled tokens with their log-probs, for ``TrainerActor.gap``."""
        engine = self._replica.engine
        with preserve_rng(engine):
            return sample_probe(engine, self._replica.probe_prompts, self._replica.params)

    def close(self) -> None:
        """Ends the engine, its processes and the reward workers."""
        for collector in self._replica.collectors:
            collector.shutdown()
        self._replica.engine.close()
        if self._replica.reward_pool is not None:
            self._replica.reward_pool.close()


class ReferenceActor:
    """A reference model on its own device."""

    def __init__(self, factory: Callable[[], KLScoring]) -> None:
        self._factory = factory

    def setup(self) -> int:
        """Makes the model; returns the process id."""
        _be_quiet()
        self._scoring = self._factory()
        return os.getpid()

    def update(self, handle: WeightHandle) -> None:
        """Replaces the reference model's weights."""
        self._scoring.update_weights(handle.weights())

    def score(self, *groups: TensorDictBase) -> tuple[Any, ...]:
        """Scores the groups of a unit in one batch; returns the seconds and the groups."""
        start = time.perf_counter()
        batch = self._scoring(lazy_stack([row for group in groups for row in group.unbind(0)]))
        rows = list(batch.unbind(0))
        scored = [lazy_stack([rows.pop(0) for _ in range(len(group))]) for group in groups]
        return (time.perf_counter() - start, *scored)


@dataclass
class Rank:
    """The parts of one training rank.

    Attributes:
        trainer: sees the whole batch and trains its share.
        transforms: what is applied to the whole batch first, by name: reward shaping, advantage.
        sender: gives the weights to the engines.
    """

    trainer: GRPOTrainer
    transforms: Sequence[tuple[str, Callable[[TensorDictBase], TensorDictBase]]]
    sender: Sender


class TrainerActor:
    """One rank of the trainer."""

    def __init__(
        self, factory: Callable[[DeviceMesh | None], Rank], rank: int, world_size: int, tensor_parallel_size: int
    ) -> None:
        self._factory = factory
        self._rank = rank
        self._world_size = world_size
        self._tensor_parallel_size = tensor_parallel_size
        self._batch: TensorDictBase | None = None
        self._store: TCPStore | None = None

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Opens the store in which the ranks find each other, on a free port of this process's host.

        Returns:
            host and port.
        """
        host = own_address()
        # The port stays open from here on: one that is only looked up could be taken before the ranks meet.
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        return host, self._store.port

    def setup(self, address: tuple[str, int] | None, timeout_s: float) -> int:
        """Joins the process group, if there is more than one rank, and makes the parts.

        Args:
            address: of rank 0's store, None for a single rank.
            timeout_s: how long a rank waits for the others, here and in each collective call.

        Returns:
            the process id.
        """
        _be_quiet()
        mesh = None
        if address is not None:
            store = self._store or TCPStore(*address, timeout=timedelta(seconds=timeout_s))
            mesh = init_mesh(
                self._rank,
                self._world_size,
                store,
                device=own_device(),
                timeout_s=timeout_s,
                tensor_parallel_size=self._tensor_parallel_size,
            )
        self._parts = self._factory(mesh)
        return os.getpid()

    def progress(self) -> tuple[int, int]:
        """The version and the optimizer steps so far, which a resumed run begins with."""
        return self._parts.trainer.version, self._parts.trainer.optim_steps

    def train(self, *groups: TensorDictBase) -> tuple[int, int, dict[str, float]]:
        """Trains on the groups of a batch; returns the new version, the optimizer steps so far, and the metrics."""
        start = time.perf_counter()
        batch = lazy_stack([row for group in groups for row in group.unbind(0)])
        times = {"workers/transfer_s": time.perf_counter() - start}
        for name, transform in self._parts.transforms:
            start = time.perf_counter()
            batch = transform(batch)
            times[f"workers/{name}_s"] = time.perf_counter() - start
        trainer = self._parts.trainer
        metrics = trainer.train_batch(batch) | times
        if self._rank == 0:
            metrics |= rollout_metrics(batch)
            self._batch = batch
        return trainer.version, trainer.optim_steps, metrics

    def weights(self) -> tuple[int, WeightHandle | None]:
        """The version and, on rank 0, where the engines find its weights."""
        trainer = self._parts.trainer
        return trainer.version, self._parts.sender.send(trainer, trainer.version, keep=self._rank == 0)

    def full_weights(self) -> tuple[int, WeightHandle | None]:
        """The version and, on rank 0, the weights themselves in the trainer's dtype."""
        trainer = self._parts.trainer
        return trainer.version, ObjectSender(None).send(trainer, trainer.version, keep=self._rank == 0)

    def release(self, version: int) -> None:
        """Frees the weights of a version, which nobody reads any more."""
        self._parts.sender.release(version)

    def save(self, checkpointer: Checkpointer, source: dict[str, Any]) -> Path | None:
        """Writes a checkpoint, from rank 0."""
        return self._parts.trainer.save(checkpointer, source)

    def export(self, checkpointer: Checkpointer, tokenizer: Any) -> Path | None:
        """Writes the model, from rank 0."""
        return self._parts.trainer.export(checkpointer, tokenizer)

    def samples(self, most: int) -> list[dict[str, Any]]:
        """Rows of the latest batch, on rank 0."""
        return [] if self._batch is None else sample_rows(self._batch, "train", most)

    def gap(self, probe: Any) -> tuple[float, float]:
        """Mean and largest difference to the log-probs of an engine, in nats."""
        return log_prob_mismatch(probe, self._parts.trainer.score)


def own_device() -> torch.device:
    """What this process computes on: an actor sees the devices that it was given and no others."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")


def own_address() -> str:
    """Where other machines reach this one."""
    import ray

    return ray.util.get_node_ip_address()


def _be_quiet() -> None:
    """Ray copies what an actor prints to the user's terminal, which has a progress bar of its own."""
    transformers_logging.disable_progress_bar()

"""Where ``fit`` gets its batches: the ``RolloutSource`` interface, and the source that collects in this process."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_grpo import keys
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.summary import rollout_metrics, sample_rows
from torchrl_grpo.reward_pool import RewardPool


class RolloutSource(Protocol):
    """Gives batches of finished, scored sequences and takes new weights.

    ``trainer_version - policy_version`` of a sequence that ``next_batch`` returns never exceeds ``max_staleness``.
    """

    max_staleness: int

    def next_batch(self) -> Any:
        """The next batch, as the trainer that goes with this source takes it."""

    def publish(self, weights: Any, version: int) -> None:
        """Gives the engines the weights of a trained batch, as that trainer gives them."""

    def metrics(self) -> dict[str, float]:
        """What is known here of the latest batch, named ``section/name``: seconds, staleness, rewards and lengths."""

    def samples(self, most: int) -> list[dict[str, Any]]:
        """At most so many sequences of the latest batch, as rows of ``samples.jsonl``."""

    def state_dict(self) -> dict[str, Any]:
        """What the next batches depend on, apart from the weights.

        ``env`` (where the problems are), ``units`` (what was drawn from it and no batch has taken) and ``engines`` (the
        state of each, None where it cannot be told).
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave."""

    def close(self) -> None:
        """Ends the collector and its engine. May be called again."""


class LocalSource:
    """Collects in this process, between two training steps: staleness is 0.

    Args:
        collector: makes the sequences.
        transforms: what is applied to each batch in order, by name; the name appears in ``time/{name}_s``.
        colocated: whether the engine shares its device with the other roles; it then sleeps while they work.
        reward_pool: of the collector's environment, for its counts; not closed here.
    """

    max_staleness = 0

    def __init__(
        self,
        collector: RolloutCollector,
        transforms: Sequence[tuple[str, Callable[[TensorDictBase], TensorDictBase]]],
        *,
        colocated: bool = False,
        reward_pool: RewardPool | None = None,
    ) -> None:
        self.collector = collector
        self.colocated = colocated
        self.transforms = list(transforms)
        self._version = collector.policy_version
        self._reward_pool = reward_pool
        self._rewards: Counter[str] = Counter()
        self._metrics: dict[str, float] = {}
        self._batch: TensorDictBase | None = None

    def next_batch(self) -> TensorDictBase:
        """Collects one batch [N], with advantages, and reference log-probs where they are used.

        Raises:
            RuntimeError: a sequence was sampled by weights that are older than the latest published ones.
        """
        collector = self.collector
        batch = collector.rollout()
        if self.colocated:
            collector.policy.engine.sleep()
        times = {"generate": collector.last.generate_seconds, "reward": collector.last.env_seconds}
        for name, transform in self.transforms:
            start = time.perf_counter()
            batch = transform(batch)
            times[name] = time.perf_counter() - start
        oldest = int(batch.get(keys.POLICY_VERSION).min())
        if self._version - oldest > self.max_staleness:
            raise RuntimeError(
                f"a sequence of version {oldest} was about to be trained at version {self._version}, "
                f"which is more than max_staleness={self.max_staleness} behind."
            )
        self._metrics = {f"time/{name}_s": seconds for name, seconds in times.items()}
        self._metrics["staleness/max"] = float(self._version - oldest)
        if self._reward_pool is not None:
            self._rewards.update(self._reward_pool.take_counts())
            self._metrics |= self._rewards
        if collector.dynamic_sampling:
            counts = dataclasses.asdict(collector.last.groups)
            self._metrics |= {f"rollout/groups_{name}": float(count) for name, count in counts.items()}
        self._batch = batch
        return batch

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Updates the engine; the next batch is sampled by these weights."""
        if self.colocated:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # what the trainer's allocator holds is not there for the engine's process
            self.collector.policy.engine.wake()
        self.collector.update_policy_weights_(weights, version)
        self._version = version

    def metrics(self) -> dict[str, float]:
        """See ``RolloutSource``."""
        return self._metrics | ({} if self._batch is None else rollout_metrics(self._batch))

    def samples(self, most: int) -> list[dict[str, Any]]:
        """See ``RolloutSource``."""
        return [] if self._batch is None else sample_rows(self._batch, "train", most)

    def state_dict(self) -> dict[str, Any]:
        """See ``RolloutSource``. Nothing is drawn ahead here."""
        state = self.collector.state_dict()
        return {"env": state["env"], "units": [], "engines": [state["engine"]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``RolloutSource``.

        Raises:
            ValueError: there are units to be played again, which this source cannot do.
        """
        if state["units"]:
            raise ValueError(f"{len(state['units'])} units were drawn ahead of their training: use a RaySource.")
        own = self.collector.state_dict()
        self.collector.load_state_dict(own | {"env": state["env"], "engine": state["engines"][0] or own["engine"]})
        self._version = self.collector.policy_version

    def close(self) -> None:
        """Shuts the collector and its engine down."""
        self.collector.shutdown()

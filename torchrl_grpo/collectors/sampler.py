"""``Sampler``: an engine and the environments that it plays. A local run calls it, a Ray actor wraps it."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_grpo import keys
from torchrl_grpo.collectors.evaluation import Evaluator
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.envs.prompts import Outcomes
from torchrl_grpo.generation.base import Engine, SamplingParams, preserve_rng
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.weights import WeightHandle
from torchrl_grpo.weights.mismatch import Probe, sample_probe


@dataclass(frozen=True)
class RolloutTask:
    """Groups that one sampler plays in one go.

    Attributes:
        state: state of the environment that draws them.
        groups: their ids, as that environment gives them.
        further: the states before the further rollouts that dynamic sampling may need, each of as many groups.
    """

    state: dict[str, Any]
    groups: tuple[int, ...]
    further: tuple[dict[str, Any], ...] = ()

    @property
    def own(self) -> set[int]:
        """The ids of all groups that the task may play."""
        starts = [self.groups[0], *(state["next_group"] for state in self.further)]
        return {start + number for start in starts for number in range(len(self.groups))}

    def __str__(self) -> str:
        return f"groups {self.groups[0]} to {self.groups[-1]}"


@dataclass(frozen=True)
class RolloutReport:
    """What a rollout did.

    Attributes:
        groups: ids in the order of the data.
        versions: for each group, the oldest weights that sampled one of its tokens.
        generate_s: seconds in the engine.
        env_s: seconds in the environment, rewards included.
        engine: the engine's state afterwards, None where rollouts overlap.
        dynamic: what dynamic sampling did with the groups, by name; empty without it.
        rewards: what scorers, tools and their processes did since the latest report, by name.
        outcomes: what ``Prompts.take_news`` gave, of all groups that were played.
    """

    groups: tuple[int, ...]
    versions: tuple[int, ...]
    generate_s: float
    env_s: float
    engine: dict[str, Any] | None
    dynamic: dict[str, int] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    outcomes: Outcomes = ()

    def spans(self, actor: str, start: float) -> list[dict[str, Any]]:
        """The rollout as spans of ``timeline.jsonl``: sampling, and then the rewards, as if all of them came after it.

        Args:
            actor: that made it.
            start: of it, in Unix seconds.
        """
        scored = {"actor": actor, "kind": "score", "start": start + self.generate_s, "seconds": self.env_s}
        return [{"actor": actor, "kind": "sample", "start": start, "seconds": self.generate_s}, scored]


class Sampler:
    """Plays rollouts, evaluates, and takes new weights.

    Args:
        engine: samples; must be thread-safe if there is more than one collector.
        collectors: one for each rollout that may run at a time, all on that engine and all alike.
        evaluator: measures accuracy on the test split, or None.
        params: how training samples are drawn, for ``probe``.
        probe_prompts: prompts for ``probe``, [T] int64 each.
        reward_pool: scores for all environments, and is closed with the sampler; None where they score themselves.
    """

    def __init__(
        self,
        engine: Engine,
        collectors: Sequence[RolloutCollector],
        evaluator: Evaluator | None,
        params: SamplingParams,
        probe_prompts: Sequence[Tensor],
        reward_pool: RewardPool | None = None,
    ) -> None:
        self.engine = engine
        self.collectors = list(collectors)
        self.evaluator = evaluator
        self.params = params
        self.probe_prompts = list(probe_prompts)
        self.reward_pool = reward_pool
        self._idle: queue.SimpleQueue[RolloutCollector] = queue.SimpleQueue()
        for collector in self.collectors:
            self._idle.put(collector)

    def update(self, handle: WeightHandle, version: int) -> float:
        """Gives the engine new weights; returns the seconds that it took."""
        start = time.perf_counter()
        self.engine.load(handle, version)
        return time.perf_counter() - start

    def rollout(self, task: RolloutTask | None = None) -> tuple[RolloutReport, TensorDictBase]:
        """Plays a task, or without one what comes next in the environment's order.

        Returns:
            the report and the batch, a flat lazy stack whose groups are adjacent.
        """
        collector = self._idle.get_nowait()
        try:
            if task is not None:
                collector.base_env.load_state_dict(task.state)
            batch = collector.rollout(() if task is None else task.further)
            spent = collector.last
        finally:
            self._idle.put(collector)
        versions: dict[int, int] = {}
        of_rows = (batch.get(key).flatten().tolist() for key in (keys.GROUP_ID, keys.POLICY_VERSION))
        for group, version in zip(*of_rows, strict=True):
            versions[group] = min(version, versions.get(group, version))
        report = RolloutReport(
            groups=tuple(versions),
            versions=tuple(versions.values()),
            generate_s=spent.generate_seconds,
            env_s=spent.env_seconds,
            engine=self.engine.state_dict() if len(self.collectors) == 1 else None,
            dynamic=asdict(spent.groups) if collector.dynamic_sampling else {},
            rewards=collector.take_counts(),
            outcomes=collector.base_env.prompts.take_news(),
        )
        return report, batch

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """What ``Evaluator.evaluate`` gives; nothing without an evaluator."""
        return ({}, []) if self.evaluator is None else self.evaluator.evaluate(sampled=sampled)

    def probe(self) -> Probe:
        """A few sampled tokens with their log-probs, for ``Learner.mismatch``; it does not change the run's draws."""
        with preserve_rng(self.engine):
            return sample_probe(self.engine, self.probe_prompts, self.params)

    def close(self) -> None:
        """Ends the engine, its processes and the reward workers. May be called again."""
        for collector in self.collectors:
            collector.shutdown()
        self.engine.close()
        if self.reward_pool is not None:
            self.reward_pool.close()

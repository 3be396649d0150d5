"""``Sampler`` (rollout worker): an engine and its environments, in this process or in an actor."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack

from torchrl_grpo import keys
from torchrl_grpo.collectors.demonstrations import Demonstrations
from torchrl_grpo.collectors.evaluation import Evaluator
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.errors import ConfigError, ReceiptError
from torchrl_grpo.generation.base import Engine
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.tasks.drawing import Drawn
from torchrl_grpo.weights import WeightHandle


@dataclass(frozen=True)
class RolloutTask:
    """Groups that one sampler plays at once. A task contains its problems, so any sampler can play
    it, even repeatedly.
    """

    drawn: tuple[Drawn, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """The ids of the groups."""
        return tuple(drawn.group for drawn in self.drawn)

    def __str__(self) -> str:
        return f"groups {self.groups[0]} to {self.groups[-1]}"


@dataclass(frozen=True)
class GroupReport:
    """Report on a finished group.

    Attributes:
        group: id of the group.
        version: version of the oldest weights that sampled any of its tokens.
        varied: whether its valid rewards differ, that is, whether it has a learning signal.
        outcomes: for each response with a valid reward, for ``Drawing.record``: the problem's index,
            and whether the response is correct.
    """

    group: int
    version: int
    varied: bool = True
    outcomes: tuple[tuple[int, bool], ...] = ()


@dataclass(frozen=True)
class RolloutReport:
    """Report on a rollout.

    Attributes:
        groups: reports on the groups, in the order of the task.
        generate_s: seconds in the engine.
        env_s: seconds in the environment, including rewards.
        engine: ``Sampler.state_dict`` afterwards; None if rollouts overlap.
        rewards: counts of scorers, tools and their processes since the latest report, by name.
    """

    groups: tuple[GroupReport, ...]
    generate_s: float
    env_s: float
    engine: dict[str, Any] | None
    rewards: dict[str, float] = field(default_factory=dict)

    def spans(self, actor: str, start: float) -> list[dict[str, Any]]:
        """Return the rollout as spans of ``timeline.jsonl``: sampling, and then all rewards.

        Args:
            actor: name of the actor that played it.
            start: start of the rollout, in Unix seconds.
        """
        spans = [
            ("sample", start, self.generate_s),
            ("score", start + self.generate_s, self.env_s),
        ]
        return [
            {"actor": actor, "kind": kind, "start": start, "seconds": seconds}
            for kind, start, seconds in spans
        ]


class Sampler:
    """Plays rollouts, evaluates, and takes new weights.

    Args:
        engine: samples the responses; must be thread-safe if tasks are played concurrently.
        make_collector: function that makes a collector on this engine for a number of groups.
        evaluator: measures accuracy on the test split, or None.

    Keyword Args:
        groups_at_a_time: maximum number of groups that are played at once; a task with more is
            played in several rounds.
        overlapping: whether several threads play tasks concurrently.
        turns: whether the engine shares its device with other roles, which use it while the engine
            is idle: the engine sleeps after each task, and when ``sleep`` is called.
        reward_pool: scores for all environments, and is closed with the sampler; None if they score
            by themselves.
        writers: functions that add entries to the rows of each finished group, in place.
        seed: seeds the sampling of each round, together with the id of the round's first group, so
            that the result does not depend on which sampler plays a task. None continues with the
            engine's random state.
    """

    def __init__(
        self,
        engine: Engine,
        make_collector: Callable[[int], RolloutCollector | Demonstrations],
        evaluator: Evaluator | None,
        *,
        groups_at_a_time: int,
        overlapping: bool = False,
        turns: bool = False,
        reward_pool: RewardPool | None = None,
        writers: Sequence[Callable[[Drawn, Sequence[TensorDictBase]], None]] = (),
        seed: int | None = None,
    ) -> None:
        self.seed = seed
        self.engine = engine
        self.evaluator = evaluator
        self.groups_at_a_time = groups_at_a_time
        self.overlapping = overlapping
        self.turns = turns
        self.reward_pool = reward_pool
        self.writers = writers
        self._make_collector = make_collector
        # Idle collectors, with the number of groups that each plays.
        self._idle: list[tuple[int, RolloutCollector | Demonstrations]] = []
        self._lock = threading.Lock()
        self._asleep = False

    def update(self, handle: WeightHandle, version: int) -> tuple[float, float]:
        """Give the engine new weights. Return the seconds that this and the receipts took.

        Raises:
            ReceiptError: the engine does not have the new weights afterwards.
        """
        start = time.perf_counter()
        self._empty_cache()
        self.engine.load(handle, version)  # loading wakes the engine
        self._asleep = False
        if self.engine.policy_version != version:
            raise ReceiptError(
                f"an engine has the weights of version {self.engine.policy_version} after the "
                f"update to version {version}: {type(self.engine).__name__}.load must set "
                "policy_version."
            )
        return time.perf_counter() - start, self.engine.receipt_s

    def play(self, task: RolloutTask) -> tuple[RolloutReport, list[TensorDictBase]]:
        """Play a task.

        Returns:
            the report, and a lazy stack of sequences for each group.
        """
        self._wake()
        rows: list[TensorDictBase] = []
        generate_s = env_s = 0.0
        rewards: dict[str, float] = {}
        for start in range(0, len(task.drawn), self.groups_at_a_time):
            at_a_time = task.drawn[start : start + self.groups_at_a_time]
            collector = self._take(len(at_a_time))
            if self.seed is not None:
                seed = random.Random(f"{self.seed}/{at_a_time[0].group}").getrandbits(32)
                self.engine.seed(seed)
            try:
                rows.extend(collector.rollout(at_a_time).unbind(0))
                generate_s += collector.last.generate_seconds
                env_s += collector.last.env_seconds
                for name, count in collector.take_counts().items():
                    rewards[name] = rewards.get(name, 0) + count
            finally:
                self._idle.append((len(at_a_time), collector))
        groups: dict[int, list[TensorDictBase]] = {group: [] for group in task.groups}
        for row in rows:
            groups[int(row.get(keys.GROUP_ID))].append(row)
        for write in self.writers:
            for drawn in task.drawn:
                write(drawn, groups[drawn.group])
        report = RolloutReport(
            groups=tuple(_report(drawn, groups[drawn.group]) for drawn in task.drawn),
            generate_s=generate_s,
            env_s=env_s,
            engine=None if self.overlapping else self.state_dict(),
            rewards=rewards,
        )
        self.sleep()
        return report, [lazy_stack(group) for group in groups.values()]

    def sleep(self) -> None:
        """Release the engine's device, if it is shared, to the other roles until the engine is
        needed again.
        """
        if self.turns and not self._asleep:
            self.engine.sleep()
            self._asleep = True
            torch.cuda.empty_cache()

    def _wake(self) -> None:
        """Wake the engine if it sleeps."""
        if self._asleep:
            self._empty_cache()
            self.engine.wake()
            self._asleep = False

    def _empty_cache(self) -> None:
        """Release the memory cached by the trainer's allocator, which a waking engine's process
        could not use.
        """
        if self.turns:
            torch.cuda.empty_cache()

    def _take(self, groups: int) -> RolloutCollector | Demonstrations:
        """Return an idle collector of this many groups."""
        with self._lock:
            for position, (size, collector) in enumerate(self._idle):
                if size == groups:
                    del self._idle[position]
                    return collector
        return self._make_collector(groups)

    def evaluate(self, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return the results of ``Evaluator.evaluate``; empty without an evaluator."""
        if self.evaluator is None:
            return {}, []
        self._wake()
        return self.evaluator.evaluate(sampled=sampled)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the engine and of the environments' transforms, by the number of
        groups that an environment plays.
        """
        states = {
            groups: deepcopy(collector.transforms.state_dict())
            for groups, collector in self._idle
            if isinstance(collector, RolloutCollector)
        }
        transforms = {groups: state for groups, state in states.items() if state}
        return self.engine.state_dict() | ({"transforms": transforms} if transforms else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``.

        Raises:
            ConfigError: the transforms differ from the state's.
        """
        self.engine.load_state_dict(state)
        for groups, transforms in state.get("transforms", {}).items():
            if groups not in range(1, self.groups_at_a_time + 1):
                continue  # no environment of this run plays that many
            collector: Any = self._take(groups)
            try:
                collector.transforms.load_state_dict(transforms)
            except Exception as error:  # a foreign state may raise anything
                raise ConfigError(
                    "env.transforms must be those of the checkpoint of train.resume, whose state "
                    f"does not fit ({error!s:.200}): use the same transforms."
                ) from error
            self._idle.append((groups, collector))

    def close(self) -> None:
        """Close the engine, its processes and the reward workers. May be called again."""
        for _, collector in self._idle:
            collector.shutdown()
        self.engine.close()
        if self.reward_pool is not None:
            self.reward_pool.close()


def _report(drawn: Drawn, rows: Sequence[TensorDictBase]) -> GroupReport:
    valid = [row for row in rows if _is_valid(row) and _ends(row)]
    return GroupReport(
        group=drawn.group,
        version=min(int(row.get(keys.POLICY_VERSION)) for row in rows),
        varied=has_variance(rows),
        outcomes=tuple((drawn.index, bool(row.get(keys.CORRECT))) for row in valid),
    )


def has_variance(rows: Iterable[TensorDictBase]) -> bool:
    """Return whether the valid rewards of one group differ, so that its advantages are not all 0
    (arXiv 2503.14476, section 3.2).

    Args:
        rows: the sequences of the group (a list or a batch), with ``("next", "reward")``, and
            ``"reward_valid"`` unless all are valid. The task's reward counts, not the shaped one.
    """
    return len({row.get(keys.REWARD).item() for row in rows if _is_valid(row) and _ends(row)}) > 1


def _ends(row: TensorDictBase) -> bool:
    """Return whether a row has its trajectory's reward: of several samples, the last one."""
    return row.get(keys.TRAJECTORY, None) is None or bool(row.get(keys.DONE))


def _is_valid(row: TensorDictBase) -> bool:
    return bool(row.get(keys.REWARD_VALID, torch.tensor(True)))

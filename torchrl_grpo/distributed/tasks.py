"""``TaskQueue``: which rollout tasks there are, and where each of them is. Bookkeeping alone: no processes, no time."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo.collectors.sampler import RolloutReport, RolloutTask
from torchrl_grpo.collectors.staleness import GroupBuffer
from torchrl_grpo.envs import LLMEnv


@dataclass(eq=False)
class Progress:
    """Where a task is: its groups that no batch has taken, how many actors were given it for what it is in now
    (sampling, scoring), and what actors gave."""

    task: RolloutTask
    left: set[int]
    attempts: int = 0
    report: RolloutReport | None = None
    refs: list[Any] = field(default_factory=list)
    reference_s: float = 0.0


class TaskQueue:
    """Draws tasks as the ``GroupBuffer`` has room for them, takes them back, and makes batches of those that are done.

    Attributes:
        buffer: the groups.
        unscored: tasks that were played and wait for a reference model.

    Args:
        env: draws the problems; it is never stepped.
        buffer: bounds the staleness.
        task_groups: groups in a task; divides the buffer's ``groups_per_batch``.
        total_groups: groups of the whole run; no more are drawn.
        rounds: most plays of a task, which then has as many times its problems to itself.

    Raises:
        ValueError: ``task_groups`` does not divide ``groups_per_batch``.
    """

    def __init__(
        self, env: LLMEnv, buffer: GroupBuffer, *, task_groups: int, total_groups: int, rounds: int = 1
    ) -> None:
        if buffer.groups_per_batch % task_groups:
            raise ValueError(
                f"groups_per_batch={buffer.groups_per_batch} must be a multiple of task_groups={task_groups}: use "
                f"{buffer.groups_per_batch // task_groups * task_groups or task_groups}."
            )
        self.buffer = buffer
        self.unscored: list[Progress] = []
        self._env = env
        self._task_groups = task_groups
        self._total_groups = total_groups
        self._rounds = rounds
        self._progress: list[Progress] = []  # of all tasks that no batch has taken whole
        self._unplayed: list[Progress] = []  # in the order of their groups
        self._dynamic: Counter[str] = Counter()  # what dynamic sampling did since the latest batch
        self._rewards: Counter[str] = Counter()  # what the reward workers counted so far
        self._most_waiting = 0
        self._resampled = 0

    def next_unplayed(self) -> Progress | None:
        """A task to be played, with a place in the buffer for each of its groups; None while there is no room."""
        if not self._unplayed:
            self._draw()
        if not self._unplayed or len(self._unplayed[0].left) > self.buffer.room:
            return None
        progress = self._unplayed.pop(0)
        for group in progress.left:
            self.buffer.admit(group)
        return progress

    def _draw(self) -> None:
        """Draws the next task, if the run has one more and there is room for it."""
        state = self._env.state_dict()
        first, reserved = state["next_group"], self._task_groups * self._rounds
        if first >= self._total_groups * self._rounds or self.buffer.room < self._task_groups:
            return
        self._env.prompts.skip(reserved)
        if self._env.prompts.epoch == state["epoch"]:
            state.pop("outcomes", None)  # only the start of an epoch asks for them, and they are many
        groups = tuple(range(first, first + self._task_groups))
        self._add(Progress(RolloutTask(state, groups, first + reserved), set(groups)))

    def _add(self, progress: Progress) -> None:
        self._progress.append(progress)
        self._unplayed.append(progress)

    def give_back(self, progress: Progress) -> None:
        """Takes back a task whose sampler was lost: it will be played again."""
        for group in progress.left:
            self.buffer.withdraw(group)
        self._resampled += len(progress.left)
        bisect.insort(self._unplayed, progress, key=lambda other: other.task.groups[0])

    def played(self, progress: Progress, report: RolloutReport) -> int:
        """Notes what a sampler did; returns how many responses it gave.

        Raises:
            RuntimeError: it played other groups than those that it was given.
        """
        task, groups = progress.task, report.groups
        own = groups == task.groups if self._rounds == 1 else set(groups) <= set(range(task.groups[0], task.stop))
        if not own or len(groups) != len(task.groups):
            raise RuntimeError(f"groups {groups} were played instead of {task.groups}, before {task.stop}.")
        progress.report, progress.attempts = report, 0
        self._rewards.update(report.rewards)
        self._dynamic.update(report.dynamic)
        return self._env.repeats * report.dynamic.get("played", len(groups))

    def finish(self, progress: Progress) -> None:
        """Lets the groups of a task wait for a batch."""
        assert progress.report is not None
        # Groups that dynamic sampling played instead stand for those that were given out.
        for group, version, ref in zip(progress.task.groups, progress.report.versions, progress.refs, strict=True):
            if group in progress.left:
                self.buffer.finish(group, version, (progress, ref))
        progress.refs = []  # a group's data lives as long as something waits for it
        self._most_waiting = max(self._most_waiting, self.buffer.waiting)

    def take(self) -> tuple[list[tuple[int, Any]], dict[str, float]] | None:
        """The next batch as (group, reference to its data), and its metrics; None while it is not there."""
        taken = self.buffer.take()
        if taken is None:
            return None
        for group, (progress, _) in taken:
            progress.left.discard(group)
        for progress in self._progress:
            if not progress.left and progress.report is not None:  # one with groups left may be played again
                self._env.prompts.add(progress.report.outcomes)
        self._progress = [progress for progress in self._progress if progress.left]
        return [(group, ref) for group, (_, ref) in taken], self._metrics([progress for _, (progress, _) in taken])

    def _metrics(self, tasks: Sequence[Progress]) -> dict[str, float]:
        """What is known of the batch that was taken, given the task of each of its groups."""
        staleness = self.buffer.staleness()
        reports = [progress.report for progress in tasks if progress.report is not None]
        metrics = {
            "staleness/max": float(max(staleness)),
            "staleness/mean": sum(staleness) / len(staleness),
            "buffer/pending": self.buffer.pending,
            "buffer/waiting": self.buffer.waiting,
            "buffer/waiting_max": self._most_waiting,
            "workers/generate_s": sum(report.generate_s / len(report.groups) for report in reports),
            "workers/reward_s": sum(report.env_s / len(report.groups) for report in reports),
            "workers/groups_resampled": self._resampled,
            **self._rewards,
            **self._env.prompts.metrics(),
        }
        if any(progress.reference_s for progress in tasks):
            metrics["workers/reference_s"] = sum(each.reference_s / len(each.task.groups) for each in tasks)
        if self._rounds > 1:
            metrics |= {f"rollout/groups_{name}": float(count) for name, count in self._dynamic.items()}
            self._dynamic.clear()
        self._most_waiting = self.buffer.waiting
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Where the problems are, and which tasks no batch has taken whole."""
        ahead = sorted(self._progress, key=lambda progress: progress.task.groups)
        return {
            "env": self._env.state_dict(),
            "tasks": [
                {
                    "env": progress.task.state,
                    "groups": list(progress.task.groups),
                    "stop": progress.task.stop,
                    "wanted": sorted(progress.left),
                }
                for progress in ahead
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave, before anything is drawn."""
        self._env.load_state_dict(state["env"])
        for saved in state["tasks"]:
            task = RolloutTask(saved["env"], tuple(saved["groups"]), saved["stop"])
            self._add(Progress(task, set(saved["wanted"])))

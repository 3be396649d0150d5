"""``TaskQueue``: which rollout tasks there are, and where each of them is. Bookkeeping alone: no processes, no time."""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchrl_grpo.collectors.sampler import RolloutReport, RolloutTask
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.runtime.staleness import GroupBuffer


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
        rounds: most plays of a task, which then has as many times its problems to itself. Those that it did not need
            are played by later tasks.

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
        self._unplayed: deque[Progress] = deque()  # in the order of their groups
        self._left = 0  # groups of all these tasks that no batch has taken
        self._spare: list[dict[str, Any]] = []  # states before plays that were drawn and not needed, in their order
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
        progress = self._unplayed.popleft()
        for group in progress.left:
            self.buffer.admit(group)
        return progress

    def _draw(self) -> None:
        """Draws the next task, if the run has one more and there is room for it."""
        drawn = self.buffer.taken + self._left
        if drawn >= self._total_groups or self.buffer.room < self._task_groups:
            return
        state, *further = self._plays(self._rounds)
        groups = tuple(range(state["next_group"], state["next_group"] + self._task_groups))
        self._add(Progress(RolloutTask(state, groups, tuple(further)), set(groups)))

    def _plays(self, count: int) -> list[dict[str, Any]]:
        """The states before so many plays of a task's groups: first those that were not needed."""
        states, self._spare = self._spare[:count], self._spare[count:]
        while len(states) < count:
            state = self._env.state_dict()
            self._env.prompts.skip(self._task_groups)
            if self._env.prompts.epoch == state["epoch"]:
                state.pop("outcomes", None)  # only the start of an epoch asks for them, and they are many
            states.append(state)
        return states

    def _add(self, progress: Progress) -> None:
        self._progress.append(progress)
        self._left += len(progress.left)
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
        own = groups == task.groups if self._rounds == 1 else set(groups) <= task.own
        if not own or len(groups) != len(task.groups):
            raise RuntimeError(f"groups {groups} were played instead of {task.groups} or others of {task.own}.")
        plays = -(-report.dynamic.get("played", len(groups)) // len(task.groups))
        self._spare = sorted([*self._spare, *task.further[plays - 1 :]], key=lambda state: state["next_group"])
        progress.task = replace(task, further=task.further[: plays - 1])
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
        self._left -= len(taken)
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
            "spare": self._spare,
            "tasks": [
                {
                    "env": progress.task.state,
                    "groups": list(progress.task.groups),
                    "further": list(progress.task.further),
                    "wanted": sorted(progress.left),
                }
                for progress in ahead
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave, before anything is drawn."""
        self._env.load_state_dict(state["env"])
        self._spare = list(state.get("spare", []))
        for saved in state["tasks"]:
            further = [*saved["further"], *self._plays(self._rounds - 1 - len(saved["further"]))]
            self._add(Progress(RolloutTask(saved["env"], tuple(saved["groups"]), tuple(further)), set(saved["wanted"])))

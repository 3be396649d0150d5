"""``TaskQueue``: bookkeeping of rollout tasks and their states, without processes or time."""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrl import torchrl_logger

from torchrl_grpo.collectors.sampler import GroupReport, RolloutReport, RolloutTask
from torchrl_grpo.runtime.staleness import GroupBuffer
from torchrl_grpo.tasks.drawing import Drawing, Drawn


@dataclass(eq=False)
class Progress:
    """State of a task.

    Attributes:
        task: the task, with the problems of its groups.
        left: groups that no batch has taken yet.
        attempts: number of actors that have tried the current stage (sampling or scoring).
        report: the sampler's report, once the task has been played.
        kept: groups that continue to a batch, in the order of ``refs``.
        refs: data of these groups, or references to it.
        reference_s: seconds of scoring.
        scorers: workers of each kind that still has to score the task, in order; one worker per
            kind scores it.
    """

    task: RolloutTask
    left: set[int]
    attempts: int = 0
    report: RolloutReport | None = None
    kept: list[GroupReport] = field(default_factory=list)
    refs: list[Any] = field(default_factory=list)
    reference_s: float = 0.0
    scorers: list[Sequence[Any]] = field(default_factory=list)


class TaskQueue:
    """Draws tasks while the ``GroupBuffer`` has room, takes interrupted tasks back, and makes
    batches of finished ones.

    With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2), a group whose valid rewards are all
    equal frees its slot, and another problem is drawn, until ``most_played`` groups have been
    played for one batch. After that such groups stay in the batch.

    Attributes:
        buffer: slots and order of the groups.
        unscored: played tasks that wait for a reference model or a teacher.

    Args:
        drawing: draws the problems.
        buffer: bounds the staleness.

    Keyword Args:
        task_groups: number of groups in a task; divides the buffer's ``groups_per_batch``. A task
            has fewer groups if fewer are missing.
        total_groups: number of groups that the whole run trains on; no more are drawn.
        group_size: number of responses in a group.
        most_played: maximum number of groups played for one batch with dynamic sampling; None
            disables dynamic sampling.

    Raises:
        ValueError: ``task_groups`` does not divide ``groups_per_batch``.
    """

    def __init__(
        self,
        drawing: Drawing,
        buffer: GroupBuffer,
        *,
        task_groups: int,
        total_groups: int,
        group_size: int,
        most_played: int | None = None,
    ) -> None:
        if buffer.groups_per_batch % task_groups:
            raise ValueError(
                f"groups_per_batch={buffer.groups_per_batch} must be a multiple of "
                f"task_groups={task_groups}: use "
                f"{buffer.groups_per_batch // task_groups * task_groups or task_groups}."
            )
        self.buffer = buffer
        self.unscored: list[Progress] = []
        self._drawing = drawing
        self._task_groups = task_groups
        self._total_groups = total_groups
        self._group_size = group_size
        self._most_played = most_played
        self._progress: list[Progress] = []  # of tasks with groups that no batch has taken
        self._unplayed: deque[Progress] = deque()  # in the order of their groups
        self._left = 0  # number of these groups
        self._dynamic: Counter[str] = Counter()  # counts of dynamic sampling since the last batch
        self._released_s: Counter[str] = Counter()  # seconds of the groups that freed their slots
        self._rewards: Counter[str] = Counter()  # counts of the reward workers so far
        self._most_waiting = 0
        self._resampled = 0
        self._warned = False

    def next_unplayed(self) -> Progress | None:
        """Return a task to play, with a slot in the buffer for each of its groups; None if there is
        no room.
        """
        if not self._unplayed:
            self._draw()
        if not self._unplayed or len(self._unplayed[0].left) > self.buffer.room:
            return None
        progress = self._unplayed.popleft()
        for group in progress.left:
            self.buffer.admit(group)
        return progress

    def _draw(self) -> None:
        """Draw the next task, if the run has groups left and there is room for it."""
        missing = self._total_groups - self.buffer.num_taken - self._left
        groups = min(self._task_groups, self.buffer.room, missing)
        if groups < min(self._task_groups, missing) and self.buffer.pending:
            return  # pending groups may free more slots, and a larger task costs an engine no more
        if groups > 0:
            self._add([self._drawing.draw() for _ in range(groups)])

    def _add(self, drawn: Sequence[Drawn]) -> None:
        task = RolloutTask(tuple(drawn))
        progress = Progress(task, set(task.groups))
        self._progress.append(progress)
        self._left += len(progress.left)
        self._unplayed.append(progress)

    def give_back(self, progress: Progress) -> None:
        """Take back a task whose sampler was lost, to be played again."""
        for group in progress.left:
            self.buffer.withdraw(group)
        self._resampled += len(progress.left)
        bisect.insort(self._unplayed, progress, key=lambda other: other.task.groups[0])

    def played(self, progress: Progress, report: RolloutReport, data: Sequence[Any]) -> int:
        """Record that a sampler played a task. Return its number of responses.

        Args:
            progress: state of the task.
            report: the sampler's report.
            data: data of each group, or a reference to it.

        Raises:
            RuntimeError: the sampler played other groups than the task's.
        """
        groups = tuple(group.group for group in report.groups)
        if groups != progress.task.groups:
            raise RuntimeError(f"groups {groups} were played instead of {progress.task.groups}.")
        progress.report = report
        progress.attempts = 0
        progress.kept = []
        progress.refs = []
        progress.reference_s = 0.0
        self._rewards.update(report.rewards)
        for group, ref in zip(report.groups, data, strict=True):
            if self._should_resample(group):
                self._release(progress, group)
            else:
                progress.kept.append(group)
                progress.refs.append(ref)
        return self._group_size * len(groups)

    def _should_resample(self, group: GroupReport) -> bool:
        """Count a played group. Return whether another problem replaces it, because it has no learning
        signal.
        """
        if self._most_played is None:
            return False
        self._dynamic["played"] += 1
        if group.varied:
            return False
        if self._dynamic["zero_variance"] < self._most_played - self.buffer.groups_per_batch:
            self._dynamic["zero_variance"] += 1
            return True
        self._dynamic["filled"] += 1
        if not self._warned:
            self._warned = True
            torchrl_logger.warning(
                f"dynamic sampling: {self._most_played} groups were played for a batch of "
                f"{self.buffer.groups_per_batch}, and too few have different rewards; "
                "zero-variance groups fill it. Further batches like it are only counted."
            )
        return False

    def _release(self, progress: Progress, group: GroupReport) -> None:
        self.buffer.withdraw(group.group)
        self._leave(progress, group)
        self._released_s.update(_seconds(progress))
        if not progress.left:
            self._progress.remove(progress)

    def _leave(self, progress: Progress, group: GroupReport) -> None:
        """Remove a group that is trained or dropped from its task, and record its outcomes."""
        progress.left.discard(group.group)
        self._left -= 1
        self._drawing.record(group.outcomes)

    def finish(self, progress: Progress) -> None:
        """Mark the groups of a task as ready for a batch."""
        for group, ref in zip(progress.kept, progress.refs, strict=True):
            self.buffer.finish(group.group, group.version, (progress, group, ref))
        progress.refs = []  # so that a group's data can be freed once it is trained
        self._most_waiting = max(self._most_waiting, self.buffer.waiting)

    def take(self) -> tuple[list[tuple[int, Any]], dict[str, float]] | None:
        """Return the next batch as pairs of a group and its data (or a reference to it), and the
        batch's metrics; None if it is not ready.
        """
        batch = self.buffer.take()
        if batch is None:
            return None
        for _, (progress, group, _) in batch:
            self._leave(progress, group)
        self._progress = [progress for progress in self._progress if progress.left]
        metrics = self._metrics([progress for _, (progress, *_) in batch])
        return [(number, ref) for number, (*_, ref) in batch], metrics

    def _metrics(self, tasks: Sequence[Progress]) -> dict[str, float]:
        """Return the metrics of a batch, given the task of each of its groups."""
        staleness = self.buffer.staleness()
        seconds = self._released_s
        self._released_s = Counter()
        for progress in tasks:
            seconds.update(_seconds(progress))
        metrics = {
            "staleness/max": float(max(staleness)),
            "staleness/mean": sum(staleness) / len(staleness),
            "buffer/pending": self.buffer.pending,
            "buffer/waiting": self.buffer.waiting,
            "buffer/waiting_max": self._most_waiting,
            "workers/generate_s": seconds["generate_s"],
            "workers/reward_s": seconds["reward_s"],
            "workers/groups_resampled": self._resampled,
            **self._rewards,
            **self._drawing.metrics(),
        }
        if any(progress.reference_s for progress in tasks):
            metrics["workers/reference_s"] = sum(
                each.reference_s / len(each.kept) for each in tasks
            )
        if self._most_played is not None:
            counts = {name: self._dynamic[name] for name in ("played", "zero_variance", "filled")}
            metrics |= {f"rollout/groups_{name}": float(count) for name, count in counts.items()}
            self._dynamic.clear()
        self._most_waiting = self.buffer.waiting
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the drawing, and the drawn groups that no batch has taken, with the
        indices of their problems.
        """
        ahead = sorted(
            [drawn.group, drawn.index]
            for progress in self._progress
            for drawn in progress.task.drawn
            if drawn.group in progress.left
        )
        return {"drawing": self._drawing.state_dict(), "ahead": ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from ``state_dict``. Call this before anything is drawn."""
        self._drawing.load_state_dict(state["drawing"])
        ahead = [self._drawing.again(group, index) for group, index in state["ahead"]]
        for start in range(0, len(ahead), self._task_groups):
            self._add(ahead[start : start + self._task_groups])


def _seconds(progress: Progress) -> dict[str, float]:
    """Return the seconds of one group of a task, as an equal share of the task's seconds."""
    report = progress.report
    assert report is not None
    count = len(report.groups)
    return {"generate_s": report.generate_s / count, "reward_s": report.env_s / count}

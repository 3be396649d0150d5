"""Rollout tasks that are played without a sampler."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.echo import EchoTask
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.collectors.sampler import GroupReport, RolloutReport
from torchrl_grpo.runtime.staleness import GroupBuffer
from torchrl_grpo.runtime.tasks import Progress, TaskQueue
from torchrl_grpo.tasks.drawing import Drawing


def make_drawing(size: int = 100) -> Drawing:
    """Return a drawing of an ``EchoTask``'s problems."""
    task = EchoTask(size)
    problems = task.problems("train")
    return Drawing(task, problems, range(len(problems)))


def make_queue(
    *,
    batch: int = 3,
    task: int | None = None,
    max_staleness: int = 0,
    version: int = 0,
    most_played: int | None = None,
    total: int = 1000,
) -> TaskQueue:
    """Return a queue with its own drawing; by default a task has as many groups as a batch."""
    buffer = GroupBuffer(batch, max_staleness, version)
    return TaskQueue(
        make_drawing(),
        buffer,
        task_groups=task or batch,
        total_groups=total,
        group_size=2,
        most_played=most_played,
    )


def plays_nothing(groups: int) -> RolloutCollector:
    """Stand in for the collectors of a sampler that gets no task."""
    raise AssertionError(f"a task of {groups} groups was to be played")


def next_task(queue: TaskQueue) -> Progress:
    """Return the next task, which must exist."""
    progress = queue.next_unplayed()
    assert progress is not None
    return progress


def play(
    queue: TaskQueue,
    progress: Progress,
    varied: Callable[[int], bool] = lambda group: True,
    outcomes: Callable[[int], tuple[bool, ...]] = lambda index: (),
) -> int:
    """Report a task as played by the published weights; a group's data is its id.

    Args:
        queue: queue of the task.
        progress: progress of the task.
        varied: whether the rewards of a group differ.
        outcomes: outcomes of a problem, by its index.

    Returns:
        The result of ``TaskQueue.played``.
    """
    version = queue.buffer.version
    reports = [
        GroupReport(
            one.group,
            version,
            varied(one.group),
            tuple((one.index, correct) for correct in outcomes(one.index)),
        )
        for one in progress.task.drawn
    ]
    report = RolloutReport(
        tuple(reports), generate_s=2.0 * len(reports), env_s=1.0 * len(reports), engine=None
    )
    responses = queue.played(progress, report, progress.task.groups)
    queue.finish(progress)
    return responses


def next_batch(
    queue: TaskQueue,
    varied: Callable[[int], bool] = lambda group: True,
    outcomes: Callable[[int], tuple[bool, ...]] = lambda index: (),
) -> tuple[list[int], dict[str, float]]:
    """Play tasks until there is a batch and publish its weights; return the groups and the metrics."""
    batch = None
    for _ in range(1000):  # fail instead of hanging if the queue draws without end
        if (batch := queue.take()) is not None:
            break
        play(queue, next_task(queue), varied, outcomes)
    assert batch is not None
    groups, metrics = batch
    assert all(group == data for group, data in groups)
    queue.buffer.publish(queue.buffer.version + 1)
    return [group for group, _ in groups], metrics

"""``TaskQueue``: which problems are drawn for which groups, dynamic sampling, and the tasks of a
resumed run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.support.tasks import make_drawing, make_queue, next_batch, next_task, play
from torchrl_grpo.collectors.sampler import GroupReport, RolloutReport
from torchrl_grpo.runtime.tasks import TaskQueue


def counts(metrics: dict[str, float]) -> tuple[float, ...]:
    return tuple(
        metrics[f"rollout/groups_{name}"] for name in ("played", "zero_variance", "filled")
    )


def varies(*groups: int) -> Callable[[int], bool]:
    return lambda group: group in groups


def test_groups_have_the_problems_of_an_epoch_in_its_order() -> None:
    queue = make_queue(task=1)
    drawing = make_drawing()
    drawn = [next_task(queue).task.drawn[0] for _ in range(3)]
    assert drawn == [drawing.draw() for _ in range(3)]
    assert [group.group for group in drawn] == [0, 1, 2]
    assert [group.problem for group in drawn] == [drawing.problems[group.index] for group in drawn]
    assert queue.next_unplayed() is None  # all slots are taken


def test_no_more_groups_are_drawn_than_the_run_trains_on() -> None:
    queue = make_queue(batch=2, max_staleness=9, total=6)
    tasks = [queue.next_unplayed() for _ in range(5)]
    assert [None if progress is None else progress.task.groups for progress in tasks] == [
        (0, 1), (2, 3), (4, 5), None, None,
    ]  # fmt: skip


def test_other_groups_than_those_of_the_task_are_refused() -> None:
    queue = make_queue(batch=1)
    progress = next_task(queue)
    report = RolloutReport((GroupReport(1, 0),), 0.0, 0.0, None)
    with pytest.raises(RuntimeError, match=r"\(1,\) .* \(0,\)"):
        queue.played(progress, report, [None])


def test_tasks_divide_a_batch() -> None:
    with pytest.raises(ValueError, match=r"groups_per_batch=3 .*task_groups=2: use 2"):
        make_queue(task=2)


def test_a_lost_task_is_played_again_before_later_ones() -> None:
    queue = make_queue(batch=2, task=1, max_staleness=1)
    lost, other = next_task(queue), next_task(queue)
    queue.give_back(other)
    queue.give_back(lost)
    assert (queue.buffer.pending, queue.buffer.room) == (0, 4)
    assert [next_task(queue), next_task(queue)] == [lost, other]
    assert next_task(queue).task.groups == (2,)
    for progress in (other, lost):
        play(queue, progress)
    groups, metrics = next_batch(queue)
    assert groups == [0, 1] and metrics["workers/groups_resampled"] == 2


# Dynamic sampling


def test_zero_variance_groups_are_dropped_and_others_drawn_for_them() -> None:
    queue = make_queue(most_played=30)
    varied = [group not in (0, 3) for group in range(8)].__getitem__
    # Tasks: groups 0 to 2, then 3 in the slot of 0, then 4 in the slot of 3.
    groups, metrics = next_batch(queue, varied)
    assert groups == [1, 2, 4] and counts(metrics) == (5, 2, 0)
    groups, metrics = next_batch(queue, varied)
    assert groups == [5, 6, 7] and counts(metrics) == (3, 0, 0)


def test_without_dynamic_sampling_no_group_gives_its_place_back() -> None:
    groups, metrics = next_batch(make_queue(), varies())
    assert groups == [0, 1, 2]
    assert not any(name.startswith("rollout/groups_") for name in metrics)


def test_a_used_up_budget_fills_the_batch_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr("torchrl_grpo.runtime.tasks.torchrl_logger.warning", warnings.append)
    queue = make_queue(most_played=6)
    # Groups 0 to 5 are played: 2 has variance, 4 and 5 are the last ones without.
    groups, metrics = next_batch(queue, varies(2))
    assert groups == [2, 4, 5] and counts(metrics) == (6, 3, 2)
    groups, metrics = next_batch(queue, varies(2))
    assert groups == [9, 10, 11] and counts(metrics) == (6, 3, 3)
    assert (
        len(warnings) == 1
        and "6 groups were played for a batch of 3, and too few have different" in warnings[0]
    )


@pytest.mark.parametrize("most_played", [3, 4, 7, 30])
def test_no_batch_plays_more_groups_than_the_budget(most_played: int) -> None:
    queue = make_queue(most_played=most_played)
    for _ in range(3):
        groups, metrics = next_batch(queue, varies())
        assert len(groups) == 3
        assert counts(metrics) == (most_played, most_played - 3, 3)


def test_a_group_that_gave_its_place_back_counts_in_the_seconds() -> None:
    queue = make_queue(most_played=30)
    assert play(queue, next_task(queue), varies(1)) == 6
    assert queue.take() is None
    groups, metrics = next_batch(queue, lambda group: True)
    assert groups == [1, 3, 4]
    assert metrics["workers/generate_s"] == pytest.approx(2.0 * 5)
    assert metrics["workers/reward_s"] == pytest.approx(1.0 * 5)
    _, metrics = next_batch(queue)
    assert metrics["workers/generate_s"] == pytest.approx(2.0 * 3)


def test_scoring_is_shared_by_the_groups_that_were_scored() -> None:
    queue = make_queue(batch=2, most_played=30)
    progress = next_task(queue)
    play(queue, progress, varies(1))
    progress.reference_s = 3.0
    _, metrics = next_batch(queue)
    assert metrics["workers/reference_s"] == pytest.approx(3.0)


def test_a_small_task_waits_while_more_places_may_be_given_back() -> None:
    queue = make_queue(batch=4, task=2, most_played=40)
    first, second = next_task(queue), next_task(queue)
    play(queue, first, varies(0))
    assert (
        queue.buffer.room == 1 and queue.next_unplayed() is None
    )  # the second task may give up a slot too
    play(queue, second, varies(2))
    assert next_task(queue).task.groups == (4, 5)
    queue = make_queue(batch=4, task=2, most_played=40)
    first, second = next_task(queue), next_task(queue)
    play(queue, first, varies(0))
    play(queue, second)
    assert next_task(queue).task.groups == (4,)


def test_a_task_all_of_whose_groups_gave_their_places_back_is_gone() -> None:
    queue = make_queue(batch=2, most_played=20)
    progress = next_task(queue)
    play(queue, progress, varies())
    assert progress.kept == [] and progress.left == set()
    assert queue.state_dict()["ahead"] == []
    assert (queue.buffer.pending, queue.buffer.waiting, queue.buffer.room) == (0, 0, 2)
    assert next_batch(queue)[0] == [2, 3]


# Resumed runs


def test_a_resumed_run_plays_what_no_batch_has_taken_and_then_goes_on() -> None:
    """Groups that gave up their slots are not played again."""
    queue = make_queue(batch=2, task=2, max_staleness=2, most_played=20)
    tasks = [next_task(queue) for _ in range(3)]
    play(queue, tasks[2])
    play(queue, tasks[0], varies(1))
    assert (
        queue.take() is not None
    )  # groups 4 and 5: 1 waits, 2 and 3 are in progress, and 0 is gone
    state = queue.state_dict()
    assert [group for group, _ in state["ahead"]] == [1, 2, 3]
    indices = {one.group: one.index for progress in tasks for one in progress.task.drawn}
    assert all(indices[group] == index for group, index in state["ahead"])
    resumed = make_queue(batch=2, task=2, max_staleness=2, version=1, most_played=20)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    again = [next_task(resumed) for _ in range(3)]
    drawn = [one for progress in again for one in progress.task.drawn]
    assert [[one.group, one.index] for one in drawn[:3]] == state["ahead"]
    assert [one.group for one in drawn[3:]] == [6, 7]
    assert drawn[3:] == [queue._drawing.draw() for _ in range(2)]
    assert [len(progress.task.groups) for progress in again] == [2, 1, 2]


@pytest.mark.parametrize("task", [1, 2, 3, 6])
def test_a_resumed_run_may_have_tasks_of_another_size(task: int) -> None:
    """A checkpoint does not contain the number of samplers or of turns."""
    queue = make_queue(batch=6, task=2, max_staleness=1)
    for _ in range(6):
        next_task(queue)
    state = queue.state_dict()
    resumed = make_queue(batch=6, task=task, max_staleness=0)
    resumed.load_state_dict(state)
    batches = [next_batch(resumed)[0] for _ in range(3)]
    assert [group for batch in batches for group in batch] == list(range(18))


def test_a_resumed_run_ends_after_the_same_number_of_groups() -> None:
    queue = make_queue(batch=2, task=1, max_staleness=1, most_played=20, total=6)
    for progress in [next_task(queue) for _ in range(4)]:
        play(queue, progress, varies(1, 3))
    assert queue.take() is not None
    resumed = make_queue(batch=2, task=1, version=1, most_played=20, total=6)
    resumed.load_state_dict(queue.state_dict())
    batches = [next_batch(resumed)[0] for _ in range(2)]
    assert batches == [[4, 5], [6, 7]]
    assert resumed.next_unplayed() is None


OUTCOMES: Sequence[tuple[bool, ...]] = ((True, True), (True, False), (False, False))


def test_outcomes_count_once_for_groups_that_are_trained_or_dropped() -> None:
    def outcomes(index: int) -> tuple[bool, ...]:
        return OUTCOMES[index % 3]

    def recorded(queue: TaskQueue) -> dict[int, tuple[bool, ...]]:
        outcomes_of: dict[int, list[bool]] = {}
        for index, correct, count in queue.state_dict()["drawing"].get("outcomes", []):
            outcomes_of.setdefault(index, []).extend([bool(correct)] * count)
        return {index: tuple(sorted(values, reverse=True)) for index, values in outcomes_of.items()}

    queue = make_queue(batch=2, task=1, max_staleness=1, most_played=30)
    queue._drawing.difficulty_filter = (0.05, 0.95)
    indices: dict[int, int] = {}

    def varied(group: int) -> bool:
        return indices[group] % 3 == 1

    group_ids: list[int] = []
    for _ in range(15):
        while (batch := queue.take()) is None:
            progress = next_task(queue)
            indices |= {one.group: one.index for one in progress.task.drawn}
            play(queue, progress, varied, outcomes)
        group_ids += [group for group, _ in batch[0]]
        queue.buffer.publish(queue.buffer.version + 1)
    done = set(indices) - {group for group, _ in queue.state_dict()["ahead"]}
    # An epoch has 100 problems, and fewer groups were played; each finished one counts once.
    assert len(set(group_ids)) == len(group_ids) == 30 < len(done) <= 100
    assert recorded(queue) == {indices[group]: outcomes(indices[group]) for group in done}
    resumed = make_queue(batch=2, task=1, max_staleness=1, version=15, most_played=30)
    resumed._drawing.difficulty_filter = (0.05, 0.95)
    resumed.load_state_dict(queue.state_dict())
    assert recorded(resumed) == recorded(queue)

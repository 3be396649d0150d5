"""The group buffer: the bounds on staleness and on waiting groups, in any order of arrivals."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tasks import make_queue
from torchrl_grpo.collectors.sampler import GroupReport, RolloutReport
from torchrl_grpo.runtime.staleness import GroupBuffer
from torchrl_grpo.runtime.tasks import Progress


def test_bound_0_admits_the_next_batch_only_after_weights_are_out() -> None:
    buffer = GroupBuffer(groups_per_batch=2, max_staleness=0)
    assert buffer.room == 2
    for group in (0, 1):
        buffer.admit(group)
    assert (buffer.room, buffer.pending, buffer.waiting) == (0, 2, 0)
    buffer.finish(1, 0, "b")
    assert buffer.take() is None
    buffer.finish(0, 0, "a")
    assert (buffer.pending, buffer.waiting) == (0, 2)
    assert buffer.take() == [(0, "a"), (1, "b")]  # in the order of the groups, not of arrival
    assert buffer.staleness() == [0, 0]
    assert buffer.room == 0
    buffer.publish(1)
    assert buffer.room == 2


def test_a_straggler_is_awaited_if_the_next_batch_were_too_late_for_it() -> None:
    buffer = GroupBuffer(groups_per_batch=2, max_staleness=1)
    for group in range(4):
        buffer.admit(group)
    for group in (1, 2):
        buffer.finish(group, 0, group)
    assert buffer.take() == [(1, 1), (2, 2)]  # group 0 is late: another one replaces it
    buffer.publish(1)
    for group in (4, 5):
        buffer.admit(group)
        buffer.finish(group, 1, group)
    buffer.finish(3, 0, 3)
    assert buffer.waiting == 3
    assert buffer.take() is None  # there are enough, but group 0 must not be left for version 2
    buffer.finish(0, 0, 0)
    assert buffer.take() == [(0, 0), (3, 3)]
    assert buffer.staleness() == [1, 1]


def test_a_group_whose_maker_is_gone_is_admitted_again() -> None:
    buffer = GroupBuffer(groups_per_batch=1, max_staleness=0)
    buffer.admit(0)
    buffer.withdraw(0)
    assert buffer.room == 1
    buffer.admit(0)
    buffer.finish(0, 0, "again")
    assert buffer.take() == [(0, "again")]


def test_what_breaks_the_rules_is_refused_with_the_numbers() -> None:
    buffer = GroupBuffer(groups_per_batch=1, max_staleness=0)
    with pytest.raises(RuntimeError, match="group 7 arrived but is not pending"):
        buffer.finish(7, 0, None)
    buffer.admit(0)
    with pytest.raises(RuntimeError, match="group 0 was admitted twice"):
        buffer.admit(0)
    with pytest.raises(RuntimeError, match="group 1 was admitted while all 1 slots were taken"):
        buffer.admit(1)
    with pytest.raises(RuntimeError, match=r"group 0 .* version 0 .* -1"):
        buffer.finish(0, -1, None)
    buffer = GroupBuffer(groups_per_batch=1, max_staleness=0)
    buffer.admit(0)
    buffer.finish(0, 0, None)
    buffer.publish(3)  # the group was not taken in the meantime
    with pytest.raises(RuntimeError, match=r"1 groups of version 2 .* version 3"):
        buffer.take()
    for arguments, field in (((0, 0), "groups_per_batch=0"), ((1, -1), "max_staleness=-1")):
        with pytest.raises(ValueError, match=field):
            GroupBuffer(*arguments)


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 2**32))
def test_no_order_of_events_breaks_the_bounds_or_stops_the_run(
    max_staleness: int, groups_per_batch: int, seed: int
) -> None:
    """With stragglers and losses, each group is trained once, fresh enough, and the run never
    stalls.
    """
    draw = random.Random(seed)
    buffer = GroupBuffer(groups_per_batch, max_staleness)
    flying: dict[int, int] = {}
    lost: list[int] = []
    trained: list[int] = []
    next_group, published, training = 0, 0, False
    for _ in range(400):
        event = draw.choice(["begin", "begin", "finish", "finish", "train", "lose"])
        if event == "begin" and buffer.room:
            group = lost.pop(0) if lost else next_group
            next_group += group == next_group
            buffer.admit(group)
            flying[group] = published
        elif event == "finish" and flying:
            group = draw.choice(list(flying))
            buffer.finish(group, flying.pop(group), group)
        elif event == "lose" and flying and draw.random() < 0.3:
            group = draw.choice(list(flying))
            buffer.withdraw(group)
            del flying[group]
            lost.append(group)
        elif event == "train" and training:
            published, training = published + 1, False
            buffer.publish(published)
        elif event == "train" and (batch := buffer.take()) is not None:
            training = True
            trained += [group for group, _ in batch]
            assert max(buffer.staleness()) <= max_staleness
        assert buffer.pending + buffer.waiting + len(buffer.staleness()) <= buffer.capacity
    assert len(trained) == len(set(trained))
    # From any such state, finishing the tasks in progress gives a batch.
    if training:
        buffer.publish(published + 1)
    for group in list(flying):
        buffer.finish(group, flying.pop(group), group)
    for group in range(next_group, next_group + buffer.room):
        buffer.admit(group)
        buffer.finish(group, buffer.version, group)
    assert buffer.take() is not None


class Simulated:
    """A run without actors: tasks are played in any order, groups give up their slots, actors and
    drivers die.

    Attributes:
        trained: groups, in the order in which batches took them.
        released: groups that gave up their slots.
        problems: index of each group's problem, which never changes.
    """

    def __init__(
        self, draw: random.Random, max_staleness: int, batch: int, task: int, spare: int, steps: int
    ) -> None:
        self.draw = draw
        self.settings = {
            "batch": batch,
            "task": task,
            "most_played": batch + spare,
            "total": batch * steps,
        }
        self.max_staleness = max_staleness
        self.steps = steps
        self.queue = make_queue(max_staleness=max_staleness, **self.settings)
        self.playing: list[
            tuple[Progress, int]
        ] = []  # with the version of the weights at its start
        self.training = False
        self.trained: list[int] = []
        self.released: list[int] = []
        self.problems: dict[int, int] = {}
        self.saved = (0, self.queue.state_dict(), 0, 0)

    def begin(self) -> bool:
        progress = self.queue.next_unplayed()
        if progress is None:
            return False
        for group in progress.task.drawn:
            assert self.problems.setdefault(group.group, group.index) == group.index
        self.playing.append((progress, self.queue.buffer.version))
        return True

    def finish(self) -> bool:
        """Finish a task with the weights of its first version or, if they arrived in between, of a
        later one.
        """
        if not self.playing:
            return False
        progress, begun = self.playing.pop(self.draw.randrange(len(self.playing)))
        version = self.draw.randint(begun, self.queue.buffer.version)
        groups = progress.task.groups
        report = RolloutReport(
            tuple(GroupReport(group, version, self.draw.random() < 0.6) for group in groups),
            0.0,
            0.0,
            None,
        )
        self.queue.played(progress, report, groups)
        self.released += sorted(set(groups) - {group.group for group in progress.kept})
        self.queue.finish(progress)
        return True

    def lose(self) -> bool:
        if self.playing:
            self.queue.give_back(self.playing.pop(self.draw.randrange(len(self.playing)))[0])
        return True

    def train(self) -> bool:
        """Take a batch, or publish the weights of the one in training."""
        if self.training:
            self.training = False
            self.queue.buffer.publish(self.queue.buffer.version + 1)
            return True
        batch = self.queue.take()
        if batch is None:
            return False
        groups, metrics = batch
        assert len(groups) == self.settings["batch"]
        assert metrics["staleness/max"] <= self.max_staleness
        assert metrics["rollout/groups_zero_variance"] <= self.settings["most_played"] - len(groups)
        self.trained += [group for group, _ in groups]
        self.training = True
        self.saved = (
            self.queue.buffer.version + 1,
            self.queue.state_dict(),
            len(self.trained),
            len(self.released),
        )
        return True

    def resume(self) -> bool:
        """Resume from the latest batch, with tasks of another size."""
        version, state, trained, released = self.saved
        sizes = [
            size
            for size in range(1, self.settings["batch"] + 1)
            if self.settings["batch"] % size == 0
        ]
        self.settings["task"] = self.draw.choice(sizes)
        self.queue = make_queue(max_staleness=self.max_staleness, **self.settings)
        self.queue.load_state_dict(state)
        self.queue.buffer.publish(version)
        del self.trained[trained:], self.released[released:]
        self.playing = []
        self.training = False
        return True


@pytest.mark.slow
@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(0, 2**32),
)
def test_a_run_trains_each_group_once_whatever_is_lost_or_released(
    max_staleness: int, tasks: int, task: int, spare: int, seed: int
) -> None:
    draw = random.Random(seed)
    run = Simulated(draw, max_staleness, tasks * task, task, spare, steps=8)
    rare = [run.lose, run.resume]
    for _ in range(150):
        happens = rare if draw.random() < 0.05 else [run.begin, run.finish, run.train]
        draw.choice(happens)()
        buffer = run.queue.buffer
        assert buffer.pending + buffer.waiting + len(buffer.staleness()) <= buffer.capacity
        everything = run.trained + run.released
        assert len(set(everything)) == len(everything)
    # From any such state, the run reaches its end.
    while run.queue.buffer.version < run.steps:
        assert run.train() or run.finish() or run.begin()
    assert len(run.trained) == tasks * task * run.steps
    assert sorted(run.trained + run.released) == list(range(len(run.trained) + len(run.released)))
    assert run.queue.state_dict()["ahead"] == [] and not run.begin()

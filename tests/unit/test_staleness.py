"""The group buffer: the bound on staleness and on waiting groups, whatever the order in which groups arrive."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_grpo.runtime.staleness import GroupBuffer


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
    assert buffer.take() == [(1, 1), (2, 2)]  # group 0 is late: another one takes its place
    buffer.publish(1)
    for group in (4, 5):
        buffer.admit(group)
        buffer.finish(group, 1, group)
    buffer.finish(3, 0, 3)
    assert buffer.waiting == 3
    assert buffer.take() is None  # enough are there, but group 0 must not be left for version 2
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
    with pytest.raises(RuntimeError, match="group 7 arrived, and is not pending"):
        buffer.finish(7, 0, None)
    buffer.admit(0)
    with pytest.raises(RuntimeError, match="group 0 was admitted twice"):
        buffer.admit(0)
    with pytest.raises(RuntimeError, match="group 1 has no room: all 1 slots are taken"):
        buffer.admit(1)
    with pytest.raises(RuntimeError, match="group 0 was admitted for version 0 and sampled by -1"):
        buffer.finish(0, -1, None)
    buffer = GroupBuffer(groups_per_batch=1, max_staleness=0)
    buffer.admit(0)
    buffer.finish(0, 0, None)
    buffer.publish(3)  # nobody took the group meanwhile
    with pytest.raises(RuntimeError, match="1 groups of version 2 or older were left for version 3"):
        buffer.take()
    for arguments, field in (((0, 0), "groups_per_batch=0"), ((1, -1), "max_staleness=-1")):
        with pytest.raises(ValueError, match=field):
            GroupBuffer(*arguments)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 2**32))
def test_no_order_of_events_breaks_the_bounds_or_stops_the_run(
    max_staleness: int, groups_per_batch: int, seed: int
) -> None:
    """Stragglers and losses: each group is trained once, fresh enough, and the run always goes on."""
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
    # Whatever state that left, finishing what is under way gives a batch.
    if training:
        buffer.publish(published + 1)
    for group in list(flying):
        buffer.finish(group, flying.pop(group), group)
    for group in range(next_group, next_group + buffer.room):
        buffer.admit(group)
        buffer.finish(group, buffer.version, group)
    assert buffer.take() is not None

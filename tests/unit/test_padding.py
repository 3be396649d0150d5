"""Padding and micro-batches."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from torchrl_grpo.models.entries import (
    pad,
    sequences_of,
)
from torchrl_grpo.models.passes import micro_batches, pass_tokens, rank_micro_batches

LENGTHS = (9, 14, 6, 11, 8, 12, 7, 10, 30, 5, 17)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_micro_batches_hold_each_sequence_once_and_keep_the_budget(
    lengths: list[int], budget: int
) -> None:
    parts = micro_batches(torch.tensor(lengths), budget)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(lengths)))
    for part in parts:
        longest = max(lengths[i] for i in part.tolist())
        assert len(part) == 1 or len(part) * longest <= budget


GROUPS = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=1, max_size=6)), min_size=1
)


def of_groups(groups: list[tuple[int, list[int]]]) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return the sequences of groups, from the length of each prompt and those of its responses:
    lengths, the number of tokens shared with the sequence before, and their groups.
    """
    rows = [
        (prompt + own, prompt * bool(at), number)
        for number, (prompt, responses) in enumerate(groups)
        for at, own in enumerate(responses)
    ]
    lengths, shared, numbers = zip(*rows, strict=True)
    return torch.tensor(lengths), list(shared), list(numbers)


def computed_tokens(rows: list[int], groups: list[tuple[int, list[int]]]) -> int:
    lengths, _, numbers = of_groups(groups)
    own = sum(int(lengths[row]) - groups[numbers[row]][0] for row in rows)
    return own + sum(groups[number][0] for number in {numbers[row] for row in rows})


@given(GROUPS, st.integers(1, 200))
def test_micro_batches_count_a_prompt_once_and_keep_the_budget(
    groups: list[tuple[int, list[int]]], budget: int
) -> None:
    lengths, shared, _ = of_groups(groups)
    parts = [part.tolist() for part in micro_batches(lengths, budget, shared)]
    assert list(chain.from_iterable(parts)) == list(range(len(lengths)))
    computed = [computed_tokens(part, groups) for part in parts]
    for part, tokens in zip(parts, computed, strict=True):
        assert len(part) == 1 or tokens <= budget
        again = [0, *(shared[row] for row in part[1:])]
        assert tokens == pass_tokens([int(lengths[row]) for row in part], again)
    assert all(a + b > budget for a, b in pairwise(computed))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("groups", [1, 3, 16])
def test_ranks_share_groups_about_equally_and_whole_where_they_can(
    world_size: int, groups: int
) -> None:
    responses = [[(7 * group + 5 * i) % 13 + 8 for i in range(8)] for group in range(groups)]
    every = [(50, own) for own in responses]
    lengths, shared, _ = of_groups(every)
    shares = [
        rank_micro_batches(lengths, 10**6, rank, world_size, shared) for rank in range(world_size)
    ]
    assert all(len(share) == 1 for share in shares)
    rows = [share[0].tolist() for share in shares]
    assert sorted(chain.from_iterable(rows)) == list(range(len(lengths)))
    computed = [computed_tokens(share, every) for share in rows]
    assert max(computed) <= 1.25 * sum(computed) / world_size
    if groups >= 4 * world_size:
        assert sum(computed) == pass_tokens(lengths.tolist(), shared)


def test_micro_batches_refuse_an_empty_budget() -> None:
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        micro_batches(torch.tensor([1]), 0)


def test_pad_fills_the_right_and_names_a_missing_entry() -> None:
    batch = lazy_stack([TensorDict({("tokens", "full"): torch.arange(n)}) for n in (2, 3)])
    assert pad(batch, ("tokens", "full"), 9).tolist() == [[0, 1, 9], [0, 1, 2]]
    with pytest.raises(KeyError, match=r"log_probs\.full, .*tokens\.full.*: write it"):
        pad(batch, ("log_probs", "full"))


def test_entries_of_each_token_are_cut_like_the_tokens_of_a_torchrl_batch() -> None:
    """Row 0 has two tokens of padding on the left, and its advantages must be cut with them."""
    real = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    batch = TensorDict(
        {
            ("tokens", "full"): torch.arange(12).view(2, 6),
            ("masks", "all_attention_mask"): real,
            ("masks", "all_assistant_mask"): torch.tensor([[False] * 3 + [True] * 3] * 2),
            ("log_probs", "full"): torch.full((2, 6), -0.5),
            "advantage": torch.arange(6.0).expand(2, 6).clone(),
            "group": torch.tensor([[7], [8]]),
        },
        [2],
    )
    rows = sequences_of(batch)
    assert rows[0]["advantage"].tolist() == [2, 3, 4, 5]
    assert rows[0]["tokens", "full"].tolist() == [2, 3, 4, 5]
    assert rows[1]["advantage"].tolist() == [0, 1, 2, 3, 4, 5]
    assert [row["group"].item() for row in rows.unbind(0)] == [7, 8]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_shares_hold_each_sequence_once_in_equally_many_micro_batches(world_size: int) -> None:
    lengths = torch.tensor(LENGTHS)
    shares = [rank_micro_batches(lengths, 30, rank, world_size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(int(i) for share in shares for part in share for i in part) == list(
        range(len(LENGTHS))
    )
    tokens = [sum(int(lengths[part].sum()) for part in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(LENGTHS)
    assert all(
        len(part) * int(lengths[part].max()) <= 30
        for share in shares
        for part in share
        if len(part)
    )


def test_one_rank_has_the_micro_batches_of_a_single_process() -> None:
    lengths = torch.tensor(LENGTHS)
    ours = rank_micro_batches(lengths, 30, 0, 1)
    theirs = micro_batches(lengths, 30)
    assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]

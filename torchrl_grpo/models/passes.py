"""Batches split into passes by a token budget, for one rank or several."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter

import torch
from torch import Tensor

from torchrl_grpo.models.layout import Layout, shared_prefixes
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass, and perhaps backward pass, over some sequences of a batch.

    Sequences and layout are made when they are first asked for, which on an accelerator is while it
    computes the pass before.

    Args:
        index: [n] int64, the sequences; empty in a pass that only keeps several ranks together.
        batch: all sequences.
        scorer: that makes the layout, if it is a ``TokenScorer``.
        shared: number of tokens that each has in common with the one before it; None if they are
            padded.
    """

    index: Tensor
    batch: Rows
    scorer: object
    shared: list[int] | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens that it computes."""
        return pass_tokens(self.batch.lengths[self.index].tolist(), self.shared)

    @property
    def features(self) -> int:
        """Tokens of the distinct images."""
        every = self.batch.images or [()] * len(self.batch)
        images = {span.image for row in self.index.tolist() for span in every[row]}
        return sum(image.num_features for image in images)

    @cached_property
    def rows(self) -> Rows:
        """The sequences."""
        return self.batch.take(self.index)

    @cached_property
    def layout(self) -> Layout | None:
        """Their layout, on the CPU; None without a ``TokenScorer``."""
        if not isinstance(self.scorer, TokenScorer):
            return None
        return self.scorer.layout(self.rows, self.shared)


def make_passes(
    scorer: object, rows: Rows, max_tokens: int, rank: int = 0, world_size: int = 1
) -> list[Pass]:
    """Divide sequences into one rank's passes; see ``rank_micro_batches``.

    Args:
        scorer: that makes the layouts, if it is a ``TokenScorer``.
        rows: the sequences of all ranks.
        max_tokens: token budget of a pass.
        rank: 0 to ``world_size - 1``.
        world_size: number of ranks.
    """
    order, shared = list(range(len(rows))), None
    if isinstance(scorer, TokenScorer) and scorer.packs(int(rows.lengths.max()), rows.images):
        order, shared = shared_prefixes(rows)
    in_order = torch.tensor(order, device="cpu")
    parts = rank_micro_batches(rows.lengths[in_order], max_tokens, rank, world_size, shared)
    return [Pass(in_order[part], rows, scorer, _shared_of(shared, part)) for part in parts]


def _shared_of(shared: Sequence[int] | None, part: Tensor) -> list[int] | None:
    """Return ``shared`` of only some of the sequences, [n] int64, in their order."""
    if shared is None:
        return None
    between = pairwise(part.tolist())
    return [0, *(min(shared[one + 1 : other + 1]) for one, other in between)][: len(part)]


def pass_tokens(lengths: Sequence[int], shared: Sequence[int] | None = None) -> int:
    """Return the number of tokens that one forward pass over some sequences computes.

    Args:
        lengths: number of tokens in each sequence.
        shared: how many of them each has in common with the one before it, computed once; None for
            sequences that are padded to the longest one.

    Example:
        >>> pass_tokens([5, 6, 3]), pass_tokens([5, 6, 3], [0, 4, 0])
        (18, 10)
    """
    if shared is None:
        return len(lengths) * max(lengths, default=0)
    return sum(lengths) - sum(shared)


def micro_batches(
    lengths: Tensor, max_tokens: int, shared: Sequence[int] | None = None
) -> list[Tensor]:
    """Split sequences into micro-batches that compute at most ``max_tokens`` tokens each.

    Padded sequences are sorted by length, longest first, so that little of the budget goes to
    padding. Other sequences stay in their order, in which those that share tokens are together. If
    they do not fit, the next micro-batch computes these tokens again.

    Args:
        lengths: [N] int64, number of tokens in each sequence.
        max_tokens: token budget; a longer sequence gets its own micro-batch.
        shared: as in ``pass_tokens``.

    Returns:
        index tensors [n_i] int64, which together contain each of 0..N-1 once.

    Example:
        >>> [part.tolist() for part in micro_batches(torch.tensor([2, 5, 3]), 6)]
        [[1], [2, 0]]
        >>> [part.tolist() for part in micro_batches(torch.tensor([5, 5, 6]), 8, [0, 4, 0])]
        [[0, 1], [2]]
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1: for example, 4096.")
    order = list(range(len(lengths)))
    if shared is None:
        order = lengths.sort(descending=True, stable=True).indices.tolist()
    sizes, parts, used = lengths.tolist(), list[list[int]](), 0
    for row in order:
        more = sizes[row] - shared[row] if shared else sizes[parts[-1][0]] if parts else 0
        if parts and used + more <= max_tokens:
            parts[-1].append(row)
            used += more
        else:
            parts.append([row])
            used = sizes[row]
    return [torch.tensor(part, device="cpu") for part in parts]


def rank_micro_batches(
    lengths: Tensor,
    max_tokens: int,
    rank: int,
    world_size: int,
    shared: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return one rank's micro-batches of a shared batch. All ranks compute about the same number of
    tokens.

    All ranks get the same number of micro-batches, because each is a collective operation of a
    sharded model. The sequences of a tree stay on one rank, unless they are more than half of its
    share.

    Args:
        lengths: [N] int64, number of tokens in each sequence of the whole batch.
        max_tokens: as in ``micro_batches``.
        rank: 0 to ``world_size - 1``.
        world_size: number of ranks; with 1, this is ``micro_batches``.
        shared: as in ``pass_tokens``.

    Returns:
        index tensors [n_i] int64; one is empty if this rank has no sequences for that micro-batch.

    Example:
        >>> [part.tolist() for part in rank_micro_batches(torch.tensor([2, 5, 3, 4]), 6, rank=0, world_size=2)]
        [[1], [0]]
    """
    if world_size == 1:
        return micro_batches(lengths, max_tokens, shared)
    common = [0] * len(lengths) if shared is None else shared
    most, pieces = max(1, pass_tokens(lengths.tolist(), common) // (2 * world_size)), []
    starts = [row for row, same in enumerate(common) if not same]
    for begin, end in pairwise([*starts, len(common)]):
        for part in micro_batches(lengths[begin:end], most, common[begin:end]):
            piece = part + begin
            used = pass_tokens(lengths[piece].tolist(), _shared_of(common, piece))
            pieces.append((used, piece.tolist()))
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, number) for number in range(world_size)]  # a heap
    for tokens, rows in sorted(pieces, key=itemgetter(0), reverse=True):
        load, number = heapq.heappop(loads)
        shares[number] += rows
        heapq.heappush(loads, (load + tokens, number))
    split = []
    for share in map(sorted, shares):
        of_rank = torch.tensor(share, dtype=torch.int64, device="cpu")
        own = micro_batches(lengths[of_rank], max_tokens, _shared_of(shared, of_rank))
        split.append([of_rank[part] for part in own])
    missing = max(map(len, split)) - len(split[rank])
    return split[rank] + [lengths.new_empty(0)] * missing

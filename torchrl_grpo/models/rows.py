"""``Rows``: a batch of sequences as flat tensors, without padding and without a mask.

It is the only reader of batches for scoring and loss. Everything before is a TensorDict: ragged (a
lazy stack of sequences) or padded on the right.

Shape suffixes: B sequences, T tokens of one, N tokens, S scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from torchrl_grpo import keys as K
from torchrl_grpo.images import Spans
from torchrl_grpo.models.entries import columns, demonstrations_in, images_of_rows
from torchrl_grpo.models.segments import Segments, send

_OF_SAMPLED: dict[NestedKey, float] = {
    K.KEPT: -1,
    K.KEPT_LOG_PROBS: -math.inf,
    K.TEACHER_STATES: 0.0,
}
"""Entries with a row of numbers for each sampled token, and what fills up shorter rows."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Sequences, and what is known of their scored tokens.

    Args:
        tokens: [N] int64, of all sequences, on the CPU.
        of_tokens: where each sequence is in ``tokens``.
        scored: [S] int64, indices of the scored tokens in ``tokens``.
        of_scored: where each sequence is in ``scored``.
        images: of each sequence, if there are any.
        values: [S, ...] by key, a value of each scored token, on any device.
        totals: scalars by key, of the whole optimization batch.
        trajectory: [B] int64, of each sequence; None if each is a trajectory, or nothing asks.
    """

    tokens: Tensor
    of_tokens: Segments
    scored: Tensor
    of_scored: Segments
    images: Sequence[Spans] | None = None
    values: dict[NestedKey, Tensor] = field(default_factory=dict)
    totals: dict[NestedKey, Tensor] = field(default_factory=dict)
    trajectory: Tensor | None = None

    @classmethod
    def from_padded(
        cls,
        tokens_BT: Tensor,
        mask_BT: Tensor,
        images: Sequence[Spans] | None = None,
    ) -> Rows:
        """Return right-padded sequences, of which the mask says which tokens to score.

        Args:
            tokens_BT: [B, T] int64.
            mask_BT: [B, T] bool.
            images: of each sequence.
        """
        batch = TensorDict({K.FULL: tokens_BT, K.ASSISTANT_MASK: mask_BT}, mask_BT.shape[:1])
        return replace(cls.read(batch), images=images)

    @classmethod
    def read(
        cls,
        batch: TensorDictBase,
        names: Iterable[NestedKey] = (),
        tokens_key: NestedKey = K.FULL,
        mask_key: NestedKey = K.ASSISTANT_MASK,
        images_key: NestedKey = K.IMAGES,
        required: Iterable[NestedKey] = (),
    ) -> Rows:
        """Read a batch [B], ragged or padded on the right.

        Args:
            batch: batch size [B].
            names: further entries to read, if the batch has them; see ``value``.
            tokens_key: of the tokens, [T] int64 in each sequence.
            mask_key: of the mask of the scored tokens, [T] bool.
            images_key: of the images.
            required: the ``names`` that the batch must have.

        Raises:
            KeyError: the batch has no tokens or no mask, or lacks a required entry.
            ValueError: an entry does not fit the tokens.
        """
        must = tokens_key, mask_key
        of_rows = columns(batch, [*must, *names], required=[*must, *required])
        parts = of_rows.pop(tokens_key), of_rows.pop(mask_key)
        tokens, mask = (torch.cat(part).reshape(-1).cpu() for part in parts)
        lengths = torch.tensor([row.shape[0] for row in parts[0]], device="cpu")
        real = None
        if not isinstance(batch, LazyStackedTensorDict):
            real = batch.get(K.ATTENTION_MASK, None)
        if real is not None:
            real = real.bool().cpu()
            tokens, mask, lengths = tokens[real.flatten()], mask[real.flatten()], real.sum(-1)
        of_tokens, scored = Segments.of(lengths), mask.nonzero().squeeze(-1)
        of_scored = Segments.of(of_tokens.row[scored].bincount(minlength=len(lengths)))
        rows = cls(tokens, of_tokens, scored, of_scored, images_of_rows(batch, images_key))
        values = {name: rows._at_scored(name, column) for name, column in of_rows.items()}
        return replace(rows, values=values)

    def value(self, batch: TensorDictBase, name: NestedKey) -> Tensor:
        """Return an entry of the batch of these rows at each scored token, [S, ...].

        Args:
            batch: the batch of these rows.
            name: key of an entry with one value for each sequence, each token (a padded row may be
                longer than its sequence), or each sampled token.

        Raises:
            ValueError: the entry has another shape.
        """
        return self._at_scored(name, columns(batch, [name], required=[name])[name])

    def _at_scored(self, name: NestedKey, column: list[Tensor]) -> Tensor:
        """Return an entry, of which each sequence has a tensor, at each scored token."""
        fill = _OF_SAMPLED.get(name)
        if any(isinstance(value, TensorDictBase) for value in column):
            raise ValueError(
                f"entry {name!r} must be a tensor, but has entries of its own: use the whole key, "
                "and in in_keys of a part a tuple of keys, such as "
                '(("other", "log_probs"), "staleness").'
            )
        sizes = torch.tensor(
            [value.shape[0] if value.ndim else 0 for value in column], device="cpu"
        )
        if fill is None:
            position, needed = self.position, self.lengths
            unfit = torch.tensor([value.numel() for value in column], device="cpu") != sizes
        else:
            position, needed = self.of_scored.number, self.of_scored.sizes
            unfit = sizes < needed
            width = max(value.shape[1] for value in column)
            column = [_widened(value, width, fill) for value in column]
        unfit |= (sizes < needed) & (sizes != 1)
        if unfit.any():
            shape = [len(self), *column[int(unfit.long().argmax())].shape]
            raise ValueError(
                f"entry {name!r} of shape {shape} must be [{len(self)}, 1], one value for each "
                f"sequence, or [{len(self)}, {int(needed.max())}], one for each token: compute it "
                "for the tokens of this batch, or use unsqueeze(-1)."
            )
        flat, row = torch.cat(column), self.of_scored.row
        start = sizes.cumsum(0) - sizes
        places = start[row] + torch.where(sizes[row] == 1, 0, position)
        return flat.flatten(0 if fill is None else 1).index_select(0, send(places, flat.device))

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.of_tokens)

    @property
    def lengths(self) -> Tensor:
        """[B] int64, number of tokens of each sequence."""
        return self.of_tokens.sizes

    @cached_property
    def position(self) -> Tensor:
        """[S] int64, position of each scored token in its sequence."""
        return self.scored - self.of_tokens.offsets[self.of_scored.row]

    def take(self, index: Tensor) -> Rows:
        """Return some sequences, [n] int64; for none, the first one, without scored tokens, because
        a pass must compute something.
        """
        places, sizes = self.of_scored.places(index), self.of_scored.sizes[index]
        if not len(index):
            index, sizes = torch.zeros(2, 1, dtype=torch.int64, device="cpu")
        of_tokens, of_scored = Segments.of(self.lengths[index]), Segments.of(sizes)
        images = (self.images and [self.images[row] for row in index.tolist()]) or None
        return Rows(
            self.tokens[self.of_tokens.places(index)],
            of_tokens,
            self.position[places] + of_tokens.offsets[of_scored.row],
            of_scored,
            images,
            {name: value[send(places, value.device)] for name, value in self.values.items()},
            self.totals,
        )

    def with_demonstrations(self, batch: TensorDictBase, flag: NestedKey) -> Rows:
        """Return the rows with the demonstrations that the rows of their batch carry, as further
        rows at the end.

        Args:
            batch: the batch of these rows.
            flag: key of the value that is True on the tokens of demonstrations. Their other values
                are 0.
        """
        sources = [batch[row] for row in demonstrations_in(batch)]
        if not sources:
            return self
        entries = (), K.DEMONSTRATION, K.DEMONSTRATION_MASK, K.DEMONSTRATION_IMAGES
        more = Rows.read(lazy_stack(sources), *entries)
        values = {
            name: torch.cat([value, value.new_zeros(len(more.scored), *value.shape[1:])])
            for name, value in self.values.items()
        }
        values[flag][len(self.scored) :] = True
        trajectory, images = self.trajectory, None
        if trajectory is not None:
            trajectory = torch.cat([trajectory, torch.zeros_like(more.lengths)])
        if self.images or more.images:
            images = [spans for rows in (self, more) for spans in rows.images or [()] * len(rows)]
        return replace(
            self,
            tokens=torch.cat([self.tokens, more.tokens]),
            of_tokens=Segments.of(torch.cat([self.lengths, more.lengths])),
            scored=torch.cat([self.scored, more.scored + len(self.tokens)]),
            of_scored=Segments.of(torch.cat([self.of_scored.sizes, more.of_scored.sizes])),
            images=images,
            values=values,
            trajectory=trajectory,
        )

    def write(
        self, batch: TensorDictBase, name: NestedKey, values: Tensor, tokens_key: NestedKey = K.FULL
    ) -> None:
        """Write values of the scored tokens, [S, ...], into the batch of these rows, in place."""
        parts = self.split(values)
        if isinstance(batch, LazyStackedTensorDict):
            for row, part in zip(batch.tensordicts, parts, strict=True):
                row.set(name, part)
        else:  # the padding may be on the left
            real = batch.get(K.ATTENTION_MASK, torch.ones_like(batch.get(tokens_key)))
            padded = values.new_zeros(*real.shape, *values.shape[1:])
            padded[send(real, values.device).bool()] = torch.cat(parts)
            batch.set(name, padded)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return values of the scored tokens, [S, ...], for each sequence with 0 on its other
        tokens, [T, ...].
        """
        of_tokens = values.new_zeros(len(self.tokens), *values.shape[1:])
        scored = send(self.scored, values.device)
        return list(of_tokens.index_put((scored,), values).split(self.lengths.tolist()))

    def padded(self, values: Tensor, width: int | None = None) -> Tensor:
        """Return values of the scored tokens, [S, ...], as [B, T, ...] padded with 0."""
        width = int(self.lengths.max()) if width is None else width
        out = values.new_zeros(len(self), width, *values.shape[1:])
        places = (send(part, values.device) for part in (self.of_scored.row, self.position))
        return out.index_put(tuple(places), values)


def _widened(value: Tensor, width: int, fill: float) -> Tensor:
    """Return a tensor, [n, K], with more columns."""
    more = width - value.shape[1]
    return torch.nn.functional.pad(value, (0, more), value=fill) if more else value

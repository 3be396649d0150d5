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
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from torchrl_grpo import keys as K
from torchrl_grpo.images import Spans
from torchrl_grpo.models.layout import send
from torchrl_grpo.models.padding import (
    demonstrations_in,
    entry,
    has,
    images_of_row,
    images_of_rows,
)
from torchrl_grpo.models.segments import Segments

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
    def of(
        cls,
        tokens_BT: Tensor,
        mask_BT: Tensor,
        images: Sequence[Spans] | None = None,
        lengths: Tensor | None = None,
    ) -> Rows:
        """Return right-padded sequences, of which the mask says which tokens to score.

        Args:
            tokens_BT: [B, T] int64.
            mask_BT: [B, T] bool.
            images: of each sequence.
            lengths: [B] int64, number of tokens of each; all T by default.
        """
        tokens, mask = tokens_BT.cpu(), mask_BT.cpu()
        whole = torch.full(tokens.shape[:1], tokens.shape[1], device="cpu")
        lengths = whole if lengths is None else lengths.cpu()
        real = torch.arange(tokens.shape[1], device="cpu") < lengths[:, None]
        return cls._of(tokens[real], lengths, mask[real], images)

    @classmethod
    def _of(
        cls, tokens: Tensor, lengths: Tensor, mask: Tensor, images: Sequence[Spans] | None
    ) -> Rows:
        of_tokens, scored = Segments.of(lengths), mask.nonzero().squeeze(-1)
        sizes = of_tokens.row[scored].bincount(minlength=len(lengths))
        return cls(tokens, of_tokens, scored, Segments.of(sizes), images)

    @classmethod
    def read(
        cls,
        batch: TensorDictBase,
        names: Iterable[NestedKey] = (),
        tokens_key: NestedKey = K.FULL,
        mask_key: NestedKey = K.ASSISTANT_MASK,
    ) -> Rows:
        """Read a batch [B], ragged or padded on the right.

        Args:
            batch: batch size [B].
            names: further entries to read, if the batch has them; see ``value``.
            tokens_key: of the tokens, [T] int64 in each sequence.
            mask_key: of the mask of the scored tokens, [T] bool.

        Raises:
            KeyError: the batch has no tokens or no mask.
            ValueError: an entry does not fit the tokens.
        """
        flat, lengths = _flat(batch, tokens_key)
        mask, sizes = _flat(batch, mask_key)
        place = Segments.of(lengths)
        start = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))[:-1]
        real = torch.arange(len(place.row), device="cpu") - place.offsets[place.row]
        flags = mask.reshape(-1).bool().cpu()[start[place.row] + real]
        tokens = flat.reshape(-1).cpu()
        if has(batch, K.ATTENTION_MASK) and not isinstance(batch, LazyStackedTensorDict):
            exists = entry(batch, K.ATTENTION_MASK).bool().cpu()
            lengths = exists.sum(-1)
            tokens, flags = tokens[exists.flatten()], flags[exists.flatten()]
        rows = cls._of(tokens, lengths, flags, images_of_rows(batch))
        return rows.reading(batch, names)

    def reading(self, batch: TensorDictBase, names: Iterable[NestedKey]) -> Rows:
        """Return the rows with further entries of the batch that they are of, if it has them."""
        values = {name: self.value(batch, name) for name in names if has(batch, name)}
        return replace(self, values=self.values | values)

    def value(self, batch: TensorDictBase, name: NestedKey) -> Tensor:
        """Return an entry of the batch at each scored token, [S, ...].

        Args:
            batch: the batch of these rows.
            name: key of an entry with one value for each sequence, each token (a padded row may be
                longer than its sequence), or each sampled token.

        Raises:
            ValueError: the entry has another shape.
        """
        flat, sizes = _flat(batch, name, _OF_SAMPLED.get(name))
        if name in _OF_SAMPLED:
            position, needed = self.number, self.of_scored.sizes
        else:
            position, needed = self.position, self.of_tokens.sizes
            flat = flat.reshape(flat.shape[0], -1).squeeze(-1)
        of_token = sizes != 1
        short = (of_token & (sizes < needed)) if name not in _OF_SAMPLED else sizes < needed
        if short.any() or (flat.ndim > 1 and name not in _OF_SAMPLED):
            size = int(sizes[short.long().argmax()])
            raise ValueError(
                f"entry {name!r} of shape {[len(self), size]} must be [{len(self)}, 1], one value for "
                f"each sequence, or [{len(self)}, {int(needed.max())}], one for each token: compute "
                "it for the tokens of this batch."
            )
        row = self.of_scored.row
        start = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))[:-1]
        if name not in _OF_SAMPLED:
            position = torch.where(of_token[row], position, 0)
        return flat.index_select(0, send(start[row] + position, flat.device))

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

    @cached_property
    def number(self) -> Tensor:
        """[S] int64, number of each scored token among those of its sequence."""
        numbers = torch.arange(len(self.scored), device="cpu")
        return numbers - self.of_scored.offsets[self.of_scored.row]

    def take(self, index: Tensor) -> Rows:
        """Return some sequences, [n] int64; for none, the beginning of one, without scored tokens,
        because a pass must compute something.
        """
        if not len(index):
            tokens = self.tokens[:2]
            none = {name: value[:0] for name, value in self.values.items()}
            of_none = Rows._of(tokens, torch.tensor([len(tokens)]), torch.zeros_like(tokens), None)
            return replace(of_none, values=none, totals=self.totals)
        of_tokens, places = Segments.of(self.lengths[index]), self.of_scored.places(index)
        of_scored = Segments.of(self.of_scored.sizes[index])
        images = (self.images and [self.images[row] for row in index.tolist()]) or None
        return Rows(
            self.tokens[self.of_tokens.places(index)],
            of_tokens,
            self.position[places] + of_tokens.offsets[of_scored.row],
            of_scored,
            images,
            {name: value[places.to(value.device)] for name, value in self.values.items()},
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
        tokens = [row.get(K.DEMONSTRATION) for row in sources]
        masks = [row.get(K.DEMONSTRATION_MASK) for row in sources]
        lengths = torch.tensor([len(part) for part in tokens], device="cpu")
        images = [images_of_row(row, K.DEMONSTRATION_IMAGES) for row in sources]
        more = Rows._of(torch.cat(tokens).cpu(), lengths, torch.cat(masks).cpu(), images)
        values = {
            name: torch.cat([value, value.new_zeros(len(more.scored), *value.shape[1:])])
            for name, value in self.values.items()
        }
        values[flag][len(self.scored) :] = True
        every = [*(self.images or [()] * len(self)), *images]
        trajectory = self.trajectory
        if trajectory is not None:
            trajectory = torch.cat([trajectory, torch.zeros_like(lengths)])
        return replace(
            self,
            tokens=torch.cat([self.tokens, more.tokens]),
            of_tokens=Segments.of(torch.cat([self.lengths, lengths])),
            scored=torch.cat([self.scored, more.scored + len(self.tokens)]),
            of_scored=Segments.of(torch.cat([self.of_scored.sizes, more.of_scored.sizes])),
            images=every if any(every) else None,
            values=values,
            trajectory=trajectory,
        )

    def to(self, device: torch.device) -> Rows:
        """Return the rows with their values on a device, copied without waiting."""
        values, totals = (
            {name: send(value, device) for name, value in part.items()}
            for part in (self.values, self.totals)
        )
        return replace(self, values=values, totals=totals)

    def write(
        self, batch: TensorDictBase, name: NestedKey, values: Tensor, tokens_key: NestedKey = K.FULL
    ) -> None:
        """Write values of the scored tokens, [S, ...], into the batch of these rows, in place."""
        if isinstance(batch, LazyStackedTensorDict):
            for row, part in zip(batch.tensordicts, self.of_each(values), strict=True):
                row.set(name, part)
        elif (real := batch.get(K.ATTENTION_MASK, None)) is None:
            batch.set(name, self.padded(values, batch.get(tokens_key).shape[1]))
        else:  # the padding may be on the left
            padded = values.new_zeros(*real.shape, *values.shape[1:])
            padded[send(real, values.device).bool()] = torch.cat(self.of_each(values))
            batch.set(name, padded)

    def of_each(self, values: Tensor) -> list[Tensor]:
        """Return values of the scored tokens, [S, ...], for each sequence with 0 on its other
        tokens, [T, ...].
        """
        whole = values.new_zeros(len(self.tokens), *values.shape[1:])
        scored = self.scored.to(values.device)
        return list(whole.index_put((scored,), values).split(self.lengths.tolist()))

    def padded(self, values: Tensor, width: int | None = None) -> Tensor:
        """Return values of the scored tokens, [S, ...], as [B, T, ...] padded with 0."""
        width = int(self.lengths.max()) if width is None else width
        whole = values.new_zeros(len(self) * width, *values.shape[1:])
        places = send(self.of_scored.row * width + self.position, values.device)
        return whole.index_put((places,), values).unflatten(0, (len(self), width))


def _flat(
    batch: TensorDictBase, name: NestedKey, fill: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return an entry of all sequences, one after another, and its size in each, [B] int64.

    Args:
        batch: batch size [B].
        name: key of the entry.
        fill: what fills up the second dimension, where it differs.
    """
    if not isinstance(batch, LazyStackedTensorDict):
        value = entry(batch, name)
        if value.ndim < 2:
            raise _no_axis(name, value.shape, len(batch))
        return value.flatten(0, 1), torch.full((len(value),), value.shape[1], device="cpu")
    parts = [entry(row, name) for row in batch.tensordicts]
    if parts[0].ndim == 0:
        raise _no_axis(name, (len(parts),), len(parts))
    if fill is not None:
        width = max(part.shape[1] for part in parts)
        parts = [
            part
            if part.shape[1] == width
            else torch.nn.functional.pad(part, (0, width - part.shape[1]), value=fill)
            for part in parts
        ]
    return torch.cat(parts), torch.tensor([len(part) for part in parts], device="cpu")


def _no_axis(name: NestedKey, shape: Sequence[int], rows: int) -> ValueError:
    return ValueError(
        f"entry {name!r} of shape {list(shape)} must be [{rows}, 1], one value for each sequence, or "
        f"[{rows}, T], one for each token: use unsqueeze(-1)."
    )

"""Layout of the sequences of a pass, without padding, in which responses to one prompt share one copy
of it.

All sequences of a pass are one row of tokens. Of those that begin with the same prompt, the first
is complete, and the others consist only of their responses, at their original positions. Linear
layers and norms do not need to know this, but attention does (``attention``).

A layout is made on the CPU, because its sizes depend on values, and then copied to the model's
device.

Shape suffixes: B sequences, T tokens, N tokens of a row, S scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.images import EncodedImage, ImageSpan, Spans
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.segments import Segments, send

Prompt = tuple[int, int]
"""Number of a prompt in its batch, and its length."""


@dataclass(frozen=True, eq=False)
class GatherIndex:
    """Positions along a dimension of a tensor, possibly with repetitions.

    Args:
        places: [M] int64.
        sums: indices by which ``pick`` sums the gradients of each position; empty if PyTorch does.
    """

    places: Tensor
    sums: tuple[Tensor, ...] = ()

    def to(self, device: torch.device) -> GatherIndex:
        """Return the index on a device, copied without waiting."""
        if device.type == "cpu":  # the CPU sums sequentially, in the order of the positions
            return self
        return GatherIndex(
            send(self.places, device), tuple(send(tensor, device) for tensor in self._sums())
        )

    def _sums(self) -> tuple[Tensor, ...]:
        """Return the unique positions [R], their first index in ``places`` [R], the repeated
        positions [P], and the indices of their repetitions [K, P], -1 for those with fewer.
        """
        order = self.places.argsort(stable=True)
        once, counts = self.places[order].unique_consecutive(return_counts=True)
        begin, several = counts.cumsum(0) - counts, counts > 1
        most = max(counts.tolist(), default=1)
        nth = torch.arange(1, most, device=counts.device)[:, None]
        again = order[torch.where(nth < counts[several], begin[several] + nth, 0)]
        return once, order[begin], once[several], torch.where(nth < counts[several], again, -1)


class _Pick(torch.autograd.Function):
    """``tensor.index_select(dim, picks.places)`` with a deterministic gradient.

    On CUDA, PyTorch's gradient adds in the order in which threads arrive, and rounds each sum to
    the tensor's dtype. This one adds in the order of the positions, in float32 or wider.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, picks: GatherIndex) -> Tensor:
        ctx.dim, ctx.sums, ctx.size = dim, picks.sums, tensor.shape[dim]
        return tensor.index_select(dim, picks.places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once, first, several, again = ctx.sums
        grad = grads[0].movedim(ctx.dim, 0)
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros((ctx.size, *grad.shape[1:]), dtype=wide)
        total.index_copy_(0, once, grad.index_select(0, first).to(wide))
        if again.numel():
            more = grad.index_select(0, again.flatten().clamp(min=0)).unflatten(0, again.shape)
            is_place = (again >= 0).view(*again.shape, *[1] * (grad.ndim - 1))
            sums = torch.where(is_place, more, 0).sum(0, dtype=wide)
            total.index_add_(0, several, sums)  # once to each position
        return total.to(grad.dtype).movedim(0, ctx.dim), None, None


def pick(tensor: Tensor, dim: int, picks: GatherIndex) -> Tensor:
    """Select positions along a dimension of a tensor, with a deterministic gradient."""
    return _Pick.apply(tensor, dim, picks) if picks.sums else tensor.index_select(dim, picks.places)


@dataclass(frozen=True, eq=False)
class ImageLayout:
    """Where the features of images are in a layout's tokens.

    Args:
        images: distinct images, whose features are computed once.
        places: [M] int64, flat indices in the tokens.
        features: indices [M] in the features of the images, one image after another.
    """

    images: tuple[EncodedImage, ...]
    places: Tensor
    features: GatherIndex

    def to(self, device: torch.device) -> ImageLayout:
        """Return the layout on a device; the images stay where they are."""
        return ImageLayout(self.images, send(self.places, device), self.features.to(device))


@dataclass(frozen=True, eq=False)
class Layout:
    """Inputs of a model, and positions of the scored tokens' predictions in its output.

    Args:
        tokens: [1, N] without padding, or [B, T - 1] for padded sequences.
        predictors: [S], flat indices in ``tokens`` of the tokens from which scored tokens are
            predicted.
        targets: [S] int64, the scored tokens.
        first: int64, which scored tokens are the first one of a sequence, and have no prediction:
            they are predicted from themselves. None if there are none.
        positions: [1, N] int64, or None for padded sequences; with three axes (M-RoPE), [3, 1, N]
            or [3, B, T - 1].
        groups: for each prompt, its length, the length of the first sequence, and the lengths of
            the other responses.
        once: [R] int64, the sorted unique ``tokens``; None if the embedding gets a dense gradient.
        place: [N] int64, index of each token in ``once``.
        images: the images among the tokens, if there are any.
    """

    tokens: Tensor
    predictors: GatherIndex
    targets: Tensor
    first: Tensor | None = None
    positions: Tensor | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    once: Tensor | None = None
    place: Tensor | None = None
    images: ImageLayout | None = None

    def with_unique_tokens(self) -> Layout:
        """Return the layout with its unique tokens, for ``tied_rows``. Call this on the CPU."""
        once, place = self.tokens.flatten().unique(return_inverse=True)
        return replace(self, once=once, place=place)

    def to(self, device: torch.device) -> Layout:
        """Return the layout on a device, copied without waiting."""
        if self.tokens.device == device:
            return self
        tensors: dict[str, Any] = {
            name: send(value, device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        images = None if self.images is None else self.images.to(device)
        return replace(self, predictors=self.predictors.to(device), images=images, **tensors)

    def model_inputs(self) -> dict[str, Any]:
        """Return the arguments of a model's forward."""
        if not self.groups:
            inputs = {"input_ids": self.tokens, "use_cache": False}
            return inputs if self.positions is None else inputs | {"position_ids": self.positions}
        mask = torch.ones_like(
            self.tokens[:, :1, None, None], dtype=torch.bool
        )  # Transformers accepts a 4D mask as ready-made
        inputs = {"input_ids": self.tokens, "position_ids": self.positions, "attention_mask": mask}
        return inputs | {"use_cache": False, "layout": self}

    @cached_property
    def lengths(self) -> tuple[list[int], list[int]]:
        """Number of queries and keys of each sequence."""
        queries = [own for _, *parts in self.groups for own in parts]
        keys = [
            own + bool(i) * prompt for prompt, *parts in self.groups for i, own in enumerate(parts)
        ]
        return queries, keys

    @cached_property
    def keys(self) -> GatherIndex:
        """Positions in the row of the tokens that each sequence attends to, one sequence after
        another.
        """
        places, start = [], 0
        for prompt, *parts in self.groups:
            shared = torch.arange(start, start + prompt, device="cpu")
            for i, own in enumerate(parts):
                rest = torch.arange(start, start + own, device="cpu")
                places += [shared] * bool(i) + [rest]
                start += own
        return GatherIndex(torch.cat(places)).to(self.tokens.device)

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Boundaries of each sequence's queries and keys, int32, as for ``varlen_attn``."""
        starts = (torch.tensor([0, *part], device="cpu") for part in self.lengths)
        bounds = (part.cumsum(0, dtype=torch.int32) for part in starts)
        queries, keys = (send(part, self.tokens.device) for part in bounds)
        return queries, keys

    @cached_property
    def masks(self) -> dict[tuple[int, int, int, torch.dtype], Tensor]:
        """Masks that earlier layers have made, for reuse by later ones."""
        return {}


def shared_prompts(rows: Rows) -> list[Prompt]:
    """Return the prompt of each sequence: its tokens before the first scored one, and the images
    among them. Equal prompts have the same number.
    """
    lengths = rows.lengths.scatter_reduce(0, rows.of_scored.row, _after_first(rows), "amin")
    tokens, numbers = rows.tokens.numpy(), dict[tuple[bytes, Spans], int]()
    starts = rows.of_tokens.offsets.tolist()
    prompts = zip(starts, lengths.tolist(), rows.images or [()] * len(rows), strict=False)
    return [
        (
            numbers.setdefault(
                (tokens[start : start + length].tobytes(), _before(length, spans)), row
            ),
            length,
        )
        for row, (start, length, spans) in enumerate(prompts)
    ]


def _before(end: int, spans: Spans) -> Spans:
    """Return the images that begin before a position."""
    return tuple(span for span in spans if span.offset < end)


def _after_first(rows: Rows) -> Tensor:
    """Return the position of each scored token, for a sequence's first token its second one's."""
    return rows.position.clamp(min=1)


def _layout(rows: Rows, tokens: Tensor, predictors: Tensor, **options: Any) -> Layout:
    """Return the layout of sequences whose scored tokens have these predictors, [S] int64."""
    first = (rows.position == 0).nonzero().squeeze(-1)
    targets = rows.tokens[rows.scored]
    return Layout(
        tokens, GatherIndex(predictors), targets, first if len(first) else None, **options
    )


def padded(rows: Rows, grid: Tensor | None = None) -> Layout:
    """Return the layout of sequences that are padded on the right; see ``packed``."""
    width = max(int(rows.lengths.max()) - 1, 1)

    def pad(values: Tensor) -> Tensor:
        out = values.new_zeros(*values.shape[:-1], len(rows), width + 1)
        out[..., rows.of_tokens.row, rows.of_tokens.number] = values
        return out[..., :width]

    spans = [
        (number * width, span)
        for number, spans in enumerate(rows.images or ())
        for span in spans
        if span.end <= width
    ]
    return _layout(
        rows,
        pad(rows.tokens),
        rows.of_scored.row * width + _after_first(rows) - 1,
        positions=None if grid is None else pad(grid),
        images=_image_layout(spans),
    )


def _image_layout(spans: Sequence[tuple[int, ImageSpan]]) -> ImageLayout | None:
    """Return the layout of images; each comes with the index of its sequence's first token."""
    if not spans:
        return None
    images = tuple(dict.fromkeys(span.image for _, span in spans))
    counts = [image.num_features for image in images]
    ends = torch.tensor(counts, device="cpu").cumsum(0).tolist()
    index = {
        image: torch.arange(end - count, end, device="cpu")
        for image, count, end in zip(images, counts, ends, strict=True)
    }
    places = [first + span.offset + span.is_embed.nonzero().squeeze(-1) for first, span in spans]
    features = torch.cat([index[span.image] for _, span in spans])
    return ImageLayout(images, torch.cat(places), GatherIndex(features))


def packed(
    rows: Rows, prompts: Sequence[Prompt] | None = None, grid: Tensor | None = None
) -> Layout:
    """Return the layout without padding and with one copy of each prompt. Tokens after the last
    scored one are dropped.

    Args:
        rows: the sequences; no image is partly in the prompt.
        prompts: prompts of the sequences, if ``shared_prompts`` has already found them in this
            batch or in a larger one.
        grid: [3, N] int64, positions with three axes; None counts the tokens.

    Returns:
        the layout, on the CPU.
    """
    row, position = rows.of_scored.row, _after_first(rows)
    ends = torch.zeros_like(rows.lengths).scatter_reduce(0, row, position, "amax").tolist()
    rows_of: dict[Prompt, list[int]] = {}
    for number, prompt in enumerate(shared_prompts(rows) if prompts is None else prompts):
        if ends[number]:
            rows_of.setdefault(prompt, []).append(number)
    if not rows_of:  # a pass that scores nothing still runs
        rows_of[0, 1], ends[0] = [0], 1
    # Of each sequence in the row: its number in the batch, its first token that is not in the row
    # as part of another sequence, the number of its tokens from there, and what is added to a
    # position for its index in the row, from there on and before.
    parts, groups, used = list[list[int]](), list[tuple[int, ...]](), 0
    for (_, length), numbers in rows_of.items():
        lead = used
        for number in numbers:
            start = length if number != numbers[0] else 0
            parts.append([number, start, ends[number] - start, used - start, lead])
            used += ends[number] - start
        sizes = [size for _, _, size, _, _ in parts[-len(numbers) :]]
        groups.append((length, *filter(None, sizes)))
    number, start, size, shift, lead = torch.tensor(parts, device="cpu").T
    own = Segments.of(size)
    positions = own.number + start[own.row]
    source = rows.of_tokens.offsets[number[own.row]] + positions
    of_rows = torch.zeros(len(rows), 3, dtype=torch.int64, device="cpu")
    of_rows[number] = torch.stack([start, shift, lead], 1)
    start, shift, lead = of_rows[row].T
    spans = [
        (shift_of, span)
        for number_of, start_of, size_of, shift_of, _ in parts
        for span in (rows.images[number_of] if rows.images else ())
        if start_of <= span.offset and span.end <= start_of + size_of
    ]
    axes = positions if grid is None else grid[:, source]
    return _layout(
        rows,
        rows.tokens[source][None],
        position - 1 + torch.where(position <= start, lead, shift),
        positions=axes.unsqueeze(-2),
        groups=tuple(groups),
        images=_image_layout(spans),
    )

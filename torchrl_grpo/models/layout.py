"""Layout of the sequences of a pass, without padding, in which those that begin with the same tokens
share one copy of them.

All sequences of a pass are one row of tokens. They form a tree of prefixes, in whose order each
consists only of what follows its longest prefix in the row, at the original positions. Linear
layers and norms do not need to know this, but attention does (``attention``).

A layout is made on the CPU, because its sizes depend on values, and then copied to the model's
device.

Shape suffixes: B sequences, T tokens, N tokens of a row, S scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.images import EncodedImage, ImageSpan
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.segments import send

MIN_SHARED = 16
"""Fewest tokens that are shared by themselves, beyond a whole prompt."""
MAX_READERS = 32
"""Most tokens that attend to a prefix, for each token that sharing it saves. On a CPU such a token
costs a second call of attention."""

Range = tuple[int, int]
"""Index of the first token in the row, and of the one after the last."""


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
        paths: for each sequence that has tokens of its own, the parts of the row that it attends to,
            in the order of its positions; its own come last. () for padded sequences.
        once: [R] int64, the sorted unique ``tokens``; None if the embedding gets a dense gradient.
        place: [N] int64, index of each token in ``once``.
        images: the images among the tokens, if there are any.
    """

    tokens: Tensor
    predictors: GatherIndex
    targets: Tensor
    first: Tensor | None = None
    positions: Tensor | None = None
    paths: tuple[tuple[Range, ...], ...] = ()
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
        if not self.paths:
            inputs = {"input_ids": self.tokens, "use_cache": False}
            return inputs if self.positions is None else inputs | {"position_ids": self.positions}
        mask = torch.ones_like(
            self.tokens[:, :1, None, None], dtype=torch.bool
        )  # Transformers accepts a 4D mask as ready-made
        inputs = {"input_ids": self.tokens, "position_ids": self.positions, "attention_mask": mask}
        return inputs | {"use_cache": False, "layout": self}

    @cached_property
    def prefixes(self) -> dict[Range, Range]:
        """Each part of the row that further sequences attend to, and where these are."""
        readers: dict[Range, Range] = {}
        for *shared, (start, end) in self.paths:
            for prefix in shared:
                readers[prefix] = readers.get(prefix, (start, end))[0], end
        return readers

    @cached_property
    def lengths(self) -> tuple[list[int], list[int]]:
        """Number of queries and keys of each sequence."""
        sizes = [[end - start for start, end in path] for path in self.paths]
        return [own for *_, own in sizes], [sum(parts) for parts in sizes]

    @cached_property
    def keys(self) -> GatherIndex:
        """Positions in the row of the tokens that each sequence attends to, one sequence after
        another.
        """
        places = [torch.arange(*part, device="cpu") for path in self.paths for part in path]
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


def shared_prefixes(rows: Rows) -> tuple[list[int], list[int]]:
    """Return the sequences in the order of their tree of prefixes, and how many tokens each shares
    with the one before it.

    Tokens are the same if those before them are, and their images. A prefix is worth sharing if it
    contains the prompts of all that begin with it, and otherwise from ``MIN_SHARED`` tokens on, if
    there are at most ``MAX_READERS`` times as many tokens to attend to it as it saves. Tokens after
    the last scored one do not count.
    """
    row, position = rows.of_scored.row, _after_first(rows)
    prompts = rows.lengths.scatter_reduce(0, row, position, "amin").tolist()
    ends, ids, numbers = _ends(rows), rows.tokens, dict[EncodedImage, int]()
    for start, spans in zip(rows.of_tokens.offsets.tolist(), rows.images or (), strict=False):
        for span in spans:  # each image has an id of its own
            ids = ids.clone() if ids is rows.tokens else ids
            ids[start + span.offset : start + span.end] = ~numbers.setdefault(
                span.image, len(numbers)
            )
    parts = ids.split(rows.lengths.tolist())
    sequences = [part[:end].numpy() for part, end in zip(parts, ends, strict=True)]
    by_tokens = sorted(range(len(rows)), key=lambda number: sequences[number].tobytes())
    common = [0]
    for one, other in pairwise(by_tokens):
        size = min(ends[one], ends[other])
        differs = sequences[one][:size] != sequences[other][:size]
        common.append(int(differs.argmax()) if differs.any() else size)
    # Of each sequence, for each prefix: the first one that begins with it, and its length.
    tree: list[list[Range]] = [[(0, 0)] for _ in ends]
    waiting = [(0, len(ends))]
    while waiting:  # sequences that begin with the same tokens, and with those of one prefix
        begin, end = waiting.pop()
        if end - begin < 2:
            continue
        members, least = by_tokens[begin:end], min(common[begin + 1 : end])
        cuts = [at for at in range(begin + 1, end) if common[at] == least]
        size = least - tree[members[0]][-1][1]
        readers = sum(ends[number] - least for number in members)
        is_worth = size >= MIN_SHARED and readers <= MAX_READERS * size * len(cuts)
        prompt = max(prompts[number] for number in members)
        if is_worth or least - size + 1 < prompt <= least:
            for number in members:
                tree[number].append((min(members), least))
        waiting += pairwise([begin, *cuts, end])
    order = sorted(range(len(ends)), key=lambda number: [*tree[number], (number, 0)])
    shared = [0]
    for one, other in pairwise(order):
        same = (a[1] for a, b in zip(tree[one], tree[other], strict=False) if a == b)
        shared.append(max(same))
    return order, shared


def _ends(rows: Rows) -> list[int]:
    """Return of each sequence the number of tokens from which scored ones are predicted."""
    ends = torch.zeros_like(rows.lengths)
    return ends.scatter_reduce(0, rows.of_scored.row, _after_first(rows), "amax").tolist()


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


def packed(rows: Rows, shared: Sequence[int] | None = None, grid: Tensor | None = None) -> Layout:
    """Return the layout without padding and with one copy of each shared prefix. Tokens after the
    last scored one are dropped.

    Args:
        rows: the sequences.
        shared: number of tokens that each has in common with the one before it, if
            ``shared_prefixes`` has put them into their order.
        grid: [3, N] int64, positions with three axes; None counts the tokens.

    Returns:
        the layout, on the CPU.
    """
    order: Sequence[int] = range(len(rows))
    if not shared:
        order, shared = shared_prefixes(rows)
    ends, offsets = _ends(rows), rows.of_tokens.offsets.tolist()
    if not any(ends):  # a pass that scores nothing still runs
        ends[0] = 1
    place = torch.zeros_like(rows.tokens)  # of each token in the row
    source, spans, paths = list[Tensor](), list[tuple[int, ImageSpan]](), list[tuple[Range, ...]]()
    path, before, used = tuple[Range, ...](), 0, 0
    for number, same in zip(order, shared, strict=True):
        if not ends[number]:
            continue
        begin, end = offsets[number], used + ends[number] - same
        place[begin : begin + same] = place[before : before + same]
        place[begin + same : begin + ends[number]] = torch.arange(used, end, device="cpu")
        source.append(torch.arange(begin + same, begin + ends[number], device="cpu"))
        for span in rows.images[number] if rows.images else ():
            if same <= span.offset and span.end <= ends[number]:
                spans.append((used - same, span))
        path = _first_tokens(path, same)
        if used < end:
            path = *path, (used, end)
            paths.append(path)
        before, used = begin, end
    places = torch.cat(source)
    positions = places - rows.of_tokens.offsets[rows.of_tokens.row[places]]
    axes = positions if grid is None else grid[:, places]
    return _layout(
        rows,
        rows.tokens[places][None],
        place[rows.scored - (rows.position > 0).long()],
        positions=axes.unsqueeze(-2),
        paths=tuple(paths),
        images=_image_layout(spans),
    )


def _first_tokens(path: tuple[Range, ...], count: int) -> tuple[Range, ...]:
    """Return the parts of a path that have its first tokens."""
    parts = list[Range]()
    for start, end in path:
        if count > 0:
            parts.append((start, min(end, start + count)))
        count -= end - start
    return tuple(parts)

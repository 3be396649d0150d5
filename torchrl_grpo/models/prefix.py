"""Layout and attention of sequences without padding, in which responses to one prompt share one
copy of it.

All sequences of a pass are one row of tokens. Of those that begin with the same prompt, the first
is complete, and the others consist only of their responses, at their original positions. Linear
layers and norms do not need to know this. Attention does, and is therefore registered in Hugging
Face's interface in place of ``sdpa``. A model gets the layout as an argument of its forward, and
passes it to its attention. Without a layout, ``sdpa`` is unchanged.

A layout is made on the CPU, because its sizes depend on values, and then copied to the model's
device.

Shape suffixes: B sequences, T tokens, N tokens of a row, S scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from torchrl_grpo.compat.torch import flash_attention as _flash
from torchrl_grpo.compat.torch import flash_attention_backward as _flash_backward
from torchrl_grpo.images import EncodedImage, ImageSpan, Spans

Prompt = tuple[int, int]
"""Number of a prompt in its batch, and its length."""

_sdpa = AttentionInterface()["sdpa"]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, without waiting for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


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

    @property
    def num_features(self) -> int:
        """Tokens of the distinct images."""
        return sum(image.num_features for image in self.images)

    def to(self, device: torch.device) -> ImageLayout:
        """Return the layout on a device; the images stay where they are."""
        return ImageLayout(self.images, send(self.places, device), self.features.to(device))


@dataclass(frozen=True, eq=False)
class Layout:
    """Inputs of a model, and positions of the scored tokens' predictions in its output.

    Args:
        source: the tokens and the mask that this is the layout of, [B, T] each.
        tokens: [1, N] without padding, or [B, T - 1] for padded sequences.
        predictors: flat indices in ``tokens`` of the S tokens from which the scored tokens are
            predicted.
        targets: [S] int64, the scored tokens.
        places: [S] int64, their flat indices in [B, T].
        positions: [1, N] int64, or None for padded sequences; with three axes (M-RoPE), [3, 1, N]
            or [3, B, T - 1].
        groups: for each prompt, its length, the length of the first sequence, and the lengths of
            the other responses.
        once: [R] int64, the sorted unique ``tokens``; None if the embedding gets a dense gradient.
        place: [N] int64, index of each token in ``once``.
        images: the images among the tokens, if there are any.
    """

    source: tuple[Tensor, Tensor]
    tokens: Tensor
    predictors: GatherIndex
    targets: Tensor
    places: Tensor
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
        """Return the layout on a device, copied without waiting. ``source`` is not copied."""
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


def shared_prompts(
    tokens_BT: Tensor, mask_BT: Tensor, images: Sequence[Spans] | None = None
) -> list[Prompt]:
    """Return the prompt of each sequence: its tokens before the first one in the mask, and the
    images among them. Equal prompts have the same number.

    >>> shared_prompts(torch.tensor([[5, 6, 7], [5, 6, 8], [4, 6, 8]]), torch.tensor([[False, False, True]] * 3))
    [(0, 2), (0, 2), (2, 2)]
    """
    tokens_BT, mask_BT = tokens_BT.cpu(), mask_BT[:, 1:].cpu()
    lengths = torch.where(mask_BT.any(1), mask_BT.int().argmax(1) + 1, tokens_BT.shape[1]).tolist()
    numbers: dict[tuple[bytes, Spans], int] = {}
    rows = zip(tokens_BT.numpy(), lengths, images or [()] * len(lengths), strict=True)
    return [
        (numbers.setdefault((row[:length].tobytes(), _before(length, spans)), i), length)
        for i, (row, length, spans) in enumerate(rows)
    ]


def _before(end: int, spans: Spans) -> Spans:
    """Return the images that begin before a position."""
    return tuple(span for span in spans if span.offset < end)


def padded(
    tokens_BT: Tensor,
    mask_BT: Tensor,
    images: Sequence[Spans] | None = None,
    grid: Tensor | None = None,
) -> Layout:
    """Return the layout of sequences that are padded on the right; see ``packed``."""
    source = tokens_BT, mask_BT
    tokens_BT, mask_BT = tokens_BT.cpu(), mask_BT.cpu()
    width = tokens_BT.shape[1] - 1
    predictors = mask_BT[:, 1:].flatten().nonzero().squeeze(-1)
    targets = tokens_BT[:, 1:].flatten().index_select(0, predictors)
    places = predictors + predictors // max(width, 1) + 1
    tokens = tokens_BT[:, :-1]
    found = [
        (row * width, span)
        for row, spans in enumerate(images or ())
        for span in spans
        if span.end <= width
    ]
    return Layout(
        source,
        tokens,
        GatherIndex(predictors),
        targets,
        places,
        positions=None if grid is None else grid[..., :-1],
        images=_image_layout(found),
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
    tokens_BT: Tensor,
    mask_BT: Tensor,
    prompts: Sequence[Prompt] | None = None,
    images: Sequence[Spans] | None = None,
    grid: Tensor | None = None,
) -> Layout:
    """Return the layout without padding and with one copy of each prompt. Tokens after the last
    scored one are dropped.

    Args:
        tokens_BT: int64, padding on the right.
        mask_BT: bool, the tokens to score.
        prompts: prompts of the sequences, if ``shared_prompts`` has already found them in this
            batch or in a larger one.
        images: the images of each sequence; no image is partly in the prompt.
        grid: [3, B, T] int64, positions with three axes; None counts the tokens.

    Returns:
        the layout, on the CPU.
    """
    source, width = (tokens_BT, mask_BT), tokens_BT.shape[1] - 1
    tokens_BT, mask_BT = tokens_BT.cpu(), mask_BT.cpu()
    scored = mask_BT[:, 1:]
    ends = torch.where(scored.any(1), width - scored.flip(1).int().argmax(1), 0).tolist()
    rows_of: dict[Prompt, list[int]] = {}
    for row, prompt in enumerate(
        shared_prompts(tokens_BT, mask_BT, images) if prompts is None else prompts
    ):
        if ends[row]:
            rows_of.setdefault(prompt, []).append(row)
    if not rows_of:  # a pass that scores nothing still runs
        rows_of[0, 1], ends[0] = [0], 1
    order, starts, groups = list[int](), list[int](), list[tuple[int, ...]]()
    for (_, length), rows in rows_of.items():
        order += rows
        starts += [0, *[length] * (len(rows) - 1)]
        groups.append(
            (length, ends[rows[0]], *(ends[row] - length for row in rows[1:] if ends[row] > length))
        )
    index, start_of = torch.tensor([order, starts], device="cpu")
    size = torch.tensor(ends, device="cpu")[index] - start_of
    offset = size.cumsum(0) - size - start_of  # from a token's position to its index in the row
    positions = torch.arange(int(size.sum()), device="cpu") - offset.repeat_interleave(size)
    # For each sequence, in the order of the batch. Its prompt may be in the row as part of another
    # sequence, the lead.
    shift, begin, lead = (torch.zeros_like(tokens_BT[:, 0]) for _ in range(3))
    shift[index], begin[index] = offset, start_of
    for rows in rows_of.values():
        lead[rows] = shift[rows[0]]
    flat = scored.flatten().nonzero().squeeze(-1)
    of_row, position = flat // max(width, 1), flat % max(width, 1)
    predictors = GatherIndex(
        position + torch.where(position < begin[of_row], lead[of_row], shift[of_row])
    )
    targets = tokens_BT[:, 1:].flatten()[flat]
    rows_of_tokens = index.repeat_interleave(size)
    tokens = tokens_BT[rows_of_tokens, positions]
    found = [
        (first, span)
        for row, start, first in zip(order, starts, offset.tolist(), strict=True)
        for span in (images[row] if images else ())
        if start <= span.offset and span.end <= ends[row]
    ]
    axes = positions if grid is None else grid[:, rows_of_tokens, positions]
    return Layout(
        source,
        tokens[None],
        predictors,
        targets,
        flat + of_row + 1,
        axes.unsqueeze(-2),
        tuple(groups),
        images=_image_layout(found),
    )


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute Hugging Face's ``sdpa`` or, with a layout, attention of each sequence over its prompt
    and itself.

    Args:
        query: [1, H, N, D], rotated by the tokens' positions.
        key: [1, key heads, N, D].
        value: [1, key heads, N, DV].
        **kwargs: arguments of Hugging Face's ``sdpa``. Of these, ``sliding_window`` is the number
            of tokens that a token attends to, including itself.

    Raises:
        NotImplementedError: the layer adds a bias to the scores.
    """
    if layout is None:
        return _sdpa(module, query, key, value, attention_mask, *args, **kwargs)
    if args or kwargs.get("position_bias") is not None:
        raise NotImplementedError("attention over packed sequences supports no bias.")
    longest, dropout = max(layout.lengths[1]), kwargs.get("dropout", 0.0)
    window = min(kwargs.get("sliding_window") or longest, longest)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    if torch.is_autocast_enabled(query.device.type):  # as in PyTorch's own
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    plain = dropout == 0.0 and query.shape[-1] == value.shape[-1]
    if plain and query.device.type == "cpu" and window == longest:
        return _FlashOnCPU.apply(query, key, value, layout.groups, scale), None
    key, value = (pick(tensor, 2, layout.keys) for tensor in (key, value))
    if plain and _has_varlen(query):
        return _flash_on_cuda(query, key, value, layout, window, scale), None
    return _each_sequence(query, key, value, layout, window, scale, dropout), None


AttentionInterface.register("sdpa", attention)


def _each_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    window: int,
    scale: float,
    dropout: float,
) -> Tensor:
    """Return the attention of one sequence after another, [1, N, H, DV]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    queries, keys = layout.lengths
    outs = []
    for q, k, v in zip(
        query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), strict=True
    ):
        whole = q.shape[2] == k.shape[2] <= window
        mask = None if whole else _causal_mask(q, k.shape[2], window, layout)
        outs.append(
            scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=whole, scale=scale)
        )
    return torch.cat(outs, 2).transpose(1, 2)


def _causal_mask(query: Tensor, keys: int, window: int, layout: Layout) -> Tensor:
    """Return the mask [queries, keys] that is added to the scores of a sequence's last tokens. All
    layers of a pass share it.

    Its rows begin at multiples of 8 elements, as CUDA's kernels require: they would copy any other
    mask in each layer.
    """
    queries, window = query.shape[2], min(window, keys)
    key = (queries, keys, window, query.dtype)
    if key not in layout.masks:
        mask = query.new_full((queries, -(-keys // 8) * 8), -math.inf)
        too_early = mask.tril(keys - queries - window)
        layout.masks[key] = mask.triu_(keys - queries + 1).add_(too_early).narrow(1, 0, keys)
    return layout.masks[key]


def _has_varlen(query: Tensor) -> bool:
    """Return whether PyTorch has flash attention for variable-length sequences on this device and
    for these heads.
    """
    size = query.shape[-1]
    fits = query.is_cuda and query.itemsize == 2 and size <= 256 and size % 8 == 0
    return fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _flash_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, window: int, scale: float
) -> Tensor:
    """Return the attention of all sequences in one call, [1, N, H, D]."""
    from torch.nn.attention.varlen import varlen_attn  # slow to import, and only CUDA has it

    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    begin_q, begin_k = layout.bounds
    most_q, most_k = (max(lengths) for lengths in layout.lengths)
    # Number of keys before and after a query's own key that it attends to, aligned with the last
    # query and key of a sequence.
    around = (-1 if window >= most_k else window - 1, 0)
    options: dict[str, Any] = {"enable_gqa": True} if _asks_for_gqa(varlen_attn) else {}
    out: Any = varlen_attn(
        q, k, v, begin_q, begin_k, most_q, most_k, scale=scale, window_size=around, **options
    )
    return out.unsqueeze(0)


@cache
def _asks_for_gqa(attend: Callable[..., Any]) -> bool:
    """Return whether PyTorch's attention must be told that keys have fewer heads. That of 2.11
    passes them to the same kernel without being told.
    """
    return "enable_gqa" in signature(attend).parameters


class _FlashOnCPU(torch.autograd.Function):
    """PyTorch's flash attention for CPUs: of each sequence or response to itself, and of responses
    to their prompt.

    The two outputs of a response are merged by their normalizers. With the merged output and
    normalizer, the backward pass of each part gives its part of the gradient. Inputs below float32
    are converted to float32, because in bfloat16 the kernel's backward pass is up to 5 times slower
    on the machines measured.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        groups: tuple[tuple[int, ...], ...],
        scale: float,
    ) -> Tensor:
        """Return the attention, [1, N, H, D]."""
        outs, normalizers = [], []
        for prompt, lengths, (q, k, v) in _by_group(groups, *_wide(query, key, value)):
            parts = [_flash(*part, 0.0, True, scale=scale) for part in _split(lengths, q, k, v)]
            if len(lengths) > 1:
                first = lengths[0]
                of_prompt, seen = _flash(
                    q[:, :, first:], k[:, :, :prompt], v[:, :, :prompt], 0.0, False, scale=scale
                )
                own, lse = (torch.cat(tensors, 2) for tensors in zip(*parts[1:], strict=True))
                own = own.lerp_(of_prompt, torch.sigmoid(seen - lse)[..., None])
                parts = [parts[0], (own, torch.logaddexp(lse, seen))]
            outs += [part[0].permute(2, 1, 0, 3) for part in parts]
            normalizers += [part[1].permute(2, 1, 0) for part in parts]
        out = torch.cat(outs).flatten(1, 2)[None].to(query.dtype)
        ctx.save_for_backward(query, key, value, out, torch.cat(normalizers))
        ctx.groups, ctx.scale = groups, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        wide = _wide(query, key, value)
        shape = wide[0].permute(2, 1, 0, 3).shape
        grad, out = (
            tensor.to(wide[0].dtype).reshape(shape).permute(2, 1, 0, 3) for tensor in (*grads, out)
        )
        gradients: tuple[list[Tensor], ...] = ([], [], [])
        for prompt, lengths, tensors in _by_group(
            ctx.groups, grad, *wide, out, lse.permute(2, 1, 0)
        ):
            parts = [
                _flash_backward(*part, 0.0, True, scale=ctx.scale)
                for part in _split(lengths, *tensors)
            ]
            if len(lengths) > 1:
                first = lengths[0]
                g, q, k, v, o, n = (
                    tensor[:, :, :prompt] if i in (2, 3) else tensor[:, :, first:]
                    for i, tensor in enumerate(tensors)
                )
                of_query, of_key, of_value = _flash_backward(
                    g, q, k, v, o, n, 0.0, False, scale=ctx.scale
                )
                parts[0][1][:, :, :prompt] += of_key
                parts[0][2][:, :, :prompt] += of_value
                for part, more in zip(parts[1:], of_query.split(lengths[1:], 2), strict=True):
                    part[0].add_(more)
            for collected, tensors_ in zip(gradients, zip(*parts, strict=True), strict=True):
                collected += [tensor.permute(2, 1, 0, 3) for tensor in tensors_]
        of_query, of_key, of_value = (torch.cat(collected) for collected in gradients)
        folded = (of_query.flatten(1, 2), of_key.sum(2), of_value.sum(2))
        return *(tensor.transpose(0, 1)[None].to(query.dtype) for tensor in folded), None, None


def _wide(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert to float32 or wider, [query heads per key head, key heads, N, D], without copying
    keys.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    folded = query[0].unflatten(0, (-1, repeats)).transpose(0, 1)
    return folded, key.expand(repeats, -1, -1, -1), value.expand(repeats, -1, -1, -1)


def _by_group(
    groups: tuple[tuple[int, ...], ...], *tensors: Tensor
) -> Iterator[tuple[int, Sequence[int], tuple[Tensor, ...]]]:
    """Yield each prompt's length, the lengths of its sequences, and their part of each tensor."""
    totals = [sum(lengths) for _, *lengths in groups]
    for (prompt, *lengths), *parts in zip(
        groups, *(tensor.split(totals, 2) for tensor in tensors), strict=True
    ):
        yield prompt, lengths, tuple(parts)


def _split(lengths: Sequence[int], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(lengths, 2) for tensor in tensors), strict=True)

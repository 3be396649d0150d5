"""Attention of sequences without padding, which may share prefixes.

It is registered in Hugging Face's interface in place of ``sdpa``. A model gets the ``Layout`` of its
tokens as an argument of its forward, and passes it to its attention. Without a layout, ``sdpa`` is
unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from torchrl_grpo.compat.torch import flash_attention as _flash
from torchrl_grpo.compat.torch import flash_attention_backward as _flash_backward
from torchrl_grpo.models.layout import Layout, pick

_sdpa = AttentionInterface()["sdpa"]


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
    """Compute Hugging Face's ``sdpa`` or, with a layout, attention of each sequence over its
    prefixes and itself.

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
    return _packed(query, key, value, layout, **kwargs), None


@torch.compiler.disable  # a graph would depend on the lengths of the sequences
def _packed(query: Tensor, key: Tensor, value: Tensor, layout: Layout, **kwargs: Any) -> Any:
    """Return the attention with a layout, [1, N, H, DV]."""
    longest, dropout = max(layout.lengths[1]), kwargs.get("dropout", 0.0)
    window = min(kwargs.get("sliding_window") or longest, longest)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    if torch.is_autocast_enabled(query.device.type):  # as in PyTorch's own
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    plain = dropout == 0.0 and query.shape[-1] == value.shape[-1]
    if plain and query.device.type == "cpu" and window == longest:
        return _FlashOnCPU.apply(query, key, value, layout, scale)
    key, value = (pick(tensor, 2, layout.keys) for tensor in (key, value))
    if plain and _has_varlen(query):
        return _flash_on_cuda(query, key, value, layout, window, scale)
    return _each_sequence(query, key, value, layout, window, scale, dropout)


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
    """PyTorch's flash attention for CPUs: of what each sequence has of its own to itself, and of all
    that begin with a prefix to it.

    The outputs of a token are merged by their normalizers. With the merged output and normalizer,
    the backward pass of each call gives its part of the gradient. Inputs below float32 are
    converted to float32, because in bfloat16 the kernel's backward pass is up to 5 times slower on
    the machines measured.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
    ) -> Tensor:
        """Return the attention, [1, N, H, D]."""
        q, k, v = _wide(query, key, value)
        parts = [
            _flash(*part, 0.0, True, scale=scale)
            for part in zip(*(x.split(layout.lengths[0], 2) for x in (q, k, v)), strict=True)
        ]
        out = _joined(part[0] for part in parts)
        lse = torch.cat([part[1] for part in parts], 2)
        for keys, queries in _slices(layout):
            more, seen = _flash(q[queries], k[keys], v[keys], 0.0, False, scale=scale)
            own = lse[queries]
            out[queries].lerp_(more, torch.sigmoid(seen - own)[..., None])
            own.copy_(torch.logaddexp(own, seen))
        out = out.permute(2, 1, 0, 3).flatten(1, 2)[None].to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        q, k, v = _wide(query, key, value)
        shape = q.permute(2, 1, 0, 3).shape
        grad, out = (
            tensor.to(q.dtype).reshape(shape).permute(2, 1, 0, 3) for tensor in (*grads, out)
        )
        tensors = (grad, q, k, v, out, lse)
        parts = [
            _flash_backward(*part, 0.0, True, scale=ctx.scale)
            for part in zip(*(x.split(ctx.layout.lengths[0], 2) for x in tensors), strict=True)
        ]
        of_query, of_key, of_value = map(_joined, zip(*parts, strict=True))
        for keys, queries in _slices(ctx.layout):
            more = _flash_backward(
                *(x[keys if x is k or x is v else queries] for x in tensors),
                *(0.0, False),
                scale=ctx.scale,
            )
            of_query[queries] += more[0]
            of_key[keys] += more[1]
            of_value[keys] += more[2]
        parts = [of_query.transpose(0, 1).flatten(0, 1), of_key.sum(0), of_value.sum(0)]
        return *(tensor[None].to(query.dtype) for tensor in parts), None, None


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """Concatenate tensors, [B, H, n, D], whose memory is in the order of n, H, B."""
    return torch.cat([part.permute(2, 1, 0, 3) for part in parts]).permute(2, 1, 0, 3)


def _slices(layout: Layout) -> Iterator[tuple[Any, Any]]:
    """Yield the index of each prefix, and that of the tokens that attend to it, for tensors
    [B, H, N, ...].
    """
    for pair in layout.prefixes.items():
        keys, queries = ((slice(None), slice(None), slice(*part)) for part in pair)
        yield keys, queries


def _wide(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert to float32 or wider, [query heads per key head, key heads, N, D], without copying
    keys.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    folded = query[0].unflatten(0, (-1, repeats)).transpose(0, 1)
    return folded, key.expand(repeats, -1, -1, -1), value.expand(repeats, -1, -1, -1)

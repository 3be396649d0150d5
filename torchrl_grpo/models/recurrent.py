"""Recurrent layers of packed sequences: state-space models, linear attention and short convolutions.

Such a layer carries states from each token to the next. With a ``Layout`` it computes the
sequences of the row side by side, padded on the right in this layer only. The states after a shared
prefix are computed once, and what follows it starts from them. A layer whose code cannot start
from states computes the prefix again for each sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from inspect import signature
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache, LinearAttentionLayer

from torchrl_grpo.models.layout import GatherIndex, Layout, pick
from torchrl_grpo.models.segments import send

# Names of a layer's argument for its cache, in the families and versions of transformers.
_CACHES = {"cache", "cache_params", "past_key_values"}


class _States(LinearAttentionLayer):
    """States of a layer, updated as Hugging Face's code does, but differentiable.

    Args:
        states: of the convolution and of the recurrence, [B, ...]. Without them, the next token is
            the first.
    """

    def __init__(self, *states: Tensor) -> None:
        super().__init__()
        self.record_past = True  # a state is then assigned, and not copied in place
        if states:
            self.conv_states[0], self.recurrent_states[0] = states
            self.conv_kernel_size[0] = states[0].shape[-1]
            self.is_conv_states_initialized[0] = self.has_previous_state[0] = True

    def update_recurrent_state(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.recurrent_states[0] = state
        return state

    def last(self) -> tuple[Tensor, Tensor]:
        """Return the states after the last token: the last inputs of the convolution, and the
        recurrent state, empty if the layer has none.
        """
        inputs, width = self.conv_states[0], self.conv_kernel_size[0]
        state = self.recurrent_states[0]
        return pad(inputs, (width, 0))[..., -width:], inputs[..., :0] if state is None else state


# A part of a sequence: positions of its tokens in the packed row, [T] int64; how many of the first
# ones another part has, too; and the number of the prefix whose states it starts from, from 1, or 0.
_Part = tuple[Tensor, int, int]


class _Call(NamedTuple):
    """Parts that a layer computes side by side, [B, T].

    Args:
        width: T.
        source: [B T] positions of their tokens in the packed row; padding repeats the last one.
        own: [K] int64, places in [B T] of the tokens whose results are used.
        starts: [B] the prefixes.
    """

    width: int
    source: GatherIndex
    own: Tensor
    starts: GatherIndex

    @classmethod
    def of(cls, parts: list[_Part], least: int, device: torch.device) -> _Call:
        """Return the call for parts, the longest first; T is at least ``least``."""
        width = max(len(parts[0][0]), least)
        place = torch.arange(width, device="cpu")
        own = [
            number * width + place[skip : len(row)] for number, (row, skip, _) in enumerate(parts)
        ]
        return cls(
            width,
            GatherIndex(torch.cat([row[place.clamp(max=len(row) - 1)] for row, *_ in parts])).to(
                device
            ),
            send(torch.cat(own), device),
            GatherIndex(torch.tensor([start for *_, start in parts], device="cpu")).to(device),
        )


@lru_cache(1)  # all layers of a pass share it
def _make_plan(layout: Layout, forks: bool) -> tuple[list[tuple[_Call, int]], list[_Call], Tensor]:
    """Return the calls of a layer for a packed row of N tokens.

    Args:
        layout: of the row.
        forks: whether sequences start from the states of a shared prefix.

    Returns:
        calls whose last states are kept, one for each end of a prefix, with the number of the
        prefix whose states it starts from, from 1, or 0; calls after them; and the
        index of each token of the row among the results of all calls, [N] int64.
    """
    prefixes, parts, number = list[_Part](), list[_Part](), dict[int, int]()
    cuts = sorted(end for _, end in layout.prefixes) if forks else []
    for path in layout.paths:
        *shared, (start, end) = path
        if forks:
            state = number[shared[-1][1]] if shared else 0
            for cut in cuts[bisect_right(cuts, start) : bisect_right(cuts, end)]:
                prefixes.append((torch.arange(start, cut, device="cpu"), 0, state))
                start, state = cut, len(prefixes)
                number[cut] = state
            if start < end:
                parts.append((torch.arange(start, end, device="cpu"), 0, state))
        else:
            row = torch.cat([torch.arange(*part, device="cpu") for part in path])
            parts.append((row, len(row) - (end - start), 0))
    # In a call, no part from 64 tokens on is twice as long as another.
    parts.sort(key=lambda part: -len(part[0]))
    calls = [
        list(call) for _, call in groupby(parts, lambda part: (len(part[0]) | 63).bit_length())
    ]
    device = layout.tokens.device
    return (
        [(_Call.of([part], 1, device), part[2]) for part in prefixes],
        # States would be updated in place by a single token.
        [_Call.of(call, 2, device) for call in calls],
        send(torch.cat([row[skip:] for row, skip, _ in prefixes + parts]).argsort(), device),
    )


class PackedLayer(nn.Module):
    """Mixin for the class of a recurrent layer, see ``pack_recurrent``.

    Attributes:
        layout: of the tokens that it gets next; None if they are a batch, as for Hugging Face.
        forks: whether sequences start from the states of their prefixes.
    """

    layer_idx: int
    layout: Layout | None = None
    forks = True

    @torch.compiler.disable  # a graph would depend on the lengths of the sequences
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Compute a packed row, [1, N, D], or without a layout what the layer itself computes."""
        compute_batch = super().forward
        kwargs.pop("layout", None)
        if self.layout is None:
            return compute_batch(hidden_states, **kwargs)
        results = list[Tensor]()

        def compute(call: _Call, *before: Tensor) -> _States:
            batch = pick(hidden_states[0], 0, call.source).unflatten(0, (-1, call.width))
            states = _States(*before)
            cache = Cache([states] * (self.layer_idx + 1))
            out = compute_batch(batch, **kwargs | dict.fromkeys(_CACHES & kwargs.keys(), cache))
            results.append(out.flatten(0, 1).index_select(0, call.own))
            return states

        prefixes, sequences, order = _make_plan(self.layout, self.forks)
        after = list[tuple[Tensor, Tensor]]()
        for call, start in prefixes:
            after.append(compute(call, *(after[start - 1] if start else ())).last())
        # Before its first token, the states of a sequence are zeros.
        states = [
            torch.cat([torch.zeros_like(kind[0]), *kind]) for kind in zip(*after, strict=True)
        ]
        for call in sequences:
            compute(call, *(pick(kind, 0, call.starts) for kind in states))
        return torch.cat(results).index_select(0, order)[None]


def pack_recurrent(model: nn.Module) -> list[PackedLayer]:
    """Let the recurrent layers of a model compute packed rows, and return them.

    What holds such a layer must get the ``layout`` of a packed row as an argument. The layer keeps
    its name and weights; its class becomes a subclass.
    """
    for parent in model.modules():
        for layer in parent.children():
            kind = type(layer)
            takes_cache = _CACHES & signature(kind.forward).parameters.keys()
            if takes_cache and hasattr(layer, "conv_kernel_size"):
                layer.__class__ = type(f"Packed{kind.__name__}", (PackedLayer, kind), {})
                parent.register_forward_pre_hook(_lay_out, with_kwargs=True)
    return [module for module in model.modules() if isinstance(module, PackedLayer)]


def _lay_out(parent: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
    """Give layers the layout that their parent gets, also when it is computed again."""
    for layer in parent.children():
        if isinstance(layer, PackedLayer):
            layer.layout = kwargs.get("layout")

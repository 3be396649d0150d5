"""Recurrent layers of packed sequences: state-space models, linear attention and short convolutions.

Such a layer carries states from each token of a row to the next. With a ``Layout`` it computes the
sequences of the row side by side, padded on the right in this layer only. The states after a shared
prompt are computed once, and the responses to it start from them. A layer whose code cannot start
from states computes the prompt again for each response.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache, LinearAttentionLayer

from torchrl_grpo.models.layout import GatherIndex, Layout, pick
from torchrl_grpo.models.segments import Segments, send

_CACHES = ("cache", "cache_params", "past_key_values")
"""Names of a layer's argument for its cache, in the families and versions of transformers."""


class _States(LinearAttentionLayer):
    """States of a layer, updated as Hugging Face's code does, but differentiable.

    Args:
        states: of the convolution and of the recurrence, [B, ...]; None if the layer has none.
            Without them, the next token is the first.
    """

    def __init__(self, *states: Tensor | None) -> None:
        super().__init__()
        self.record_past = True  # a state is then assigned, and not copied in place
        if states:
            self.conv_states[0], self.recurrent_states[0] = states
            self.is_conv_states_initialized[0] = self.has_previous_state[0] = True

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def last(self) -> tuple[Tensor, Tensor | None]:
        """Return the states after the last token; the convolution's is its last inputs."""
        inputs, width = self.conv_states[0], self.conv_kernel_size[0]
        return pad(inputs, (width, 0))[..., -width:], self.recurrent_states[0]


class _Part(NamedTuple):
    """A sequence, or what follows its prompt.

    Args:
        row: [T] int64, positions of its tokens in the packed row.
        own: how many of the last tokens no other part computes.
        start: number of the prompt that it starts from, from 1; 0 for none.
    """

    row: Tensor
    own: int
    start: int = 0


@dataclass(frozen=True, eq=False)
class _Call:
    """Parts that a layer computes side by side, [B, T].

    Args:
        shape: B and T.
        source: [M] positions of their tokens in the packed row.
        slots: [M] int64, places of these tokens in the flattened [B, T].
        results: [K] int64, places of the tokens that are their own.
        starts: [B] numbers of the prompts; None if no prompt is shared.
    """

    shape: tuple[int, int]
    source: GatherIndex
    slots: Tensor
    results: Tensor
    starts: GatherIndex | None

    @classmethod
    def of(cls, parts: Sequence[_Part], device: torch.device, width: int, forks: bool) -> _Call:
        """Return the call for parts of at most ``width`` tokens."""
        of_parts = Segments.of([len(part.row) for part in parts])
        slots = of_parts.row * width + of_parts.number
        own = torch.tensor([part.own for part in parts], device="cpu")
        is_own = of_parts.number >= (of_parts.sizes - own)[of_parts.row]
        starts = torch.tensor([part.start for part in parts], device="cpu")
        return cls(
            (len(parts), width),
            GatherIndex(torch.cat([part.row for part in parts])).to(device),
            send(slots, device),
            send(slots[is_own], device),
            GatherIndex(starts).to(device) if forks else None,
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """Calls of a recurrent layer for a packed row of N tokens.

    Args:
        prompts: calls whose last states are kept.
        sequences: calls after them.
        order: [N] int64, index of each token of the row among the results of all calls.
    """

    prompts: tuple[_Call, ...]
    sequences: tuple[_Call, ...]
    order: Tensor

    @classmethod
    def of(cls, layout: Layout, forks: bool) -> Plan:
        """Return the plan for a layout; with ``forks``, responses start from the states of their
        prompt.
        """
        prompts, parts, start = list[_Part](), list[_Part](), 0
        for length, *sizes in layout.groups:
            prompt = torch.arange(start, start + length, device="cpu")
            if forks and len(sizes) > 1:
                prompts.append(_Part(prompt, length))
            for i, size in enumerate(sizes):
                own = torch.arange(start, start + size, device="cpu")
                start += size
                if not forks or len(sizes) == 1:
                    parts.append(_Part(torch.cat([prompt, own]) if i else own, size))
                elif i or size > length:
                    own = own if i else own[length:]
                    parts.append(_Part(own, len(own), len(prompts)))
        calls = list[list[_Part]]()
        for part in sorted(parts, key=lambda part: -len(part.row)):
            if not calls or 2 * len(part.row) < len(calls[-1][0].row):
                calls.append([])  # in a call, no part is more than twice as long as another
            calls[-1].append(part)
        computed = itertools.chain(prompts, *calls)
        row = torch.cat([part.row[-part.own :] for part in computed])
        device = layout.tokens.device
        return cls(
            tuple(_Call.of([part], device, part.own, False) for part in prompts),
            # Of one token, states would be updated in place.
            tuple(
                _Call.of(call, device, max(len(call[0].row), 2), bool(prompts)) for call in calls
            ),
            send(row.argsort(), device),
        )


class PackedLayer(nn.Module):
    """Mixin for the class of a recurrent layer; see ``pack_recurrent``.

    Attributes:
        cache_argument: name of the argument of its forward that takes a cache.
        layout: of the tokens that it gets next; None if they are a batch, as for Hugging Face.
        forks: whether responses start from the states of their prompt.
    """

    cache_argument: str
    layer_idx: int
    layout: Layout | None = None
    forks = True

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Compute a packed row, [1, N, D], or with no layout what the layer itself computes."""
        layout, own = self.layout, super().forward
        kwargs.pop("layout", None)
        if layout is None:
            return own(hidden_states, **kwargs)
        if self.forks not in layout.plans:
            layout.plans[self.forks] = Plan.of(layout, self.forks)
        plan: Plan = layout.plans[self.forks]
        results, after = list[Tensor](), list[tuple[Tensor | None, ...]]()

        def compute(call: _Call, states: _States | None) -> None:
            tokens = pick(hidden_states[0], 0, call.source)
            batch = tokens.new_zeros(math.prod(call.shape), tokens.shape[1])
            batch = batch.index_copy(0, call.slots, tokens).unflatten(0, call.shape)
            cache = None if states is None else Cache([states] * (self.layer_idx + 1))
            out = own(batch, **(kwargs | {self.cache_argument: cache, "attention_mask": None}))
            results.append(out.flatten(0, 1).index_select(0, call.results))

        for call in plan.prompts:
            compute(call, states := _States())
            after.append(states.last())
        starts = [_after_zeros(of_prompts) for of_prompts in zip(*after, strict=True)]
        for call in plan.sequences:
            picks = call.starts
            compute(
                call,
                picks
                and _States(*(part if part is None else pick(part, 0, picks) for part in starts)),
            )
        return torch.cat(results).index_select(0, plan.order)[None]


def _after_zeros(states: Sequence[Tensor | None]) -> Tensor | None:
    """Return [1 + P, ...] states: zeros, as before a first token, and of P prompts, [1, ...]."""
    tensors = [part for part in states if part is not None]
    return torch.cat([torch.zeros_like(tensors[0]), *tensors]) if tensors else None


def pack_recurrent(model: nn.Module) -> list[PackedLayer]:
    """Let the recurrent layers of a model compute packed rows, and return them.

    The forward of what holds such a layer has to get the ``layout`` of a packed row as an argument.
    A layer keeps its weights and names; only its class becomes a subclass.
    """
    for parent in model.modules():
        for layer in parent.children():
            names = [name for name in _CACHES if name in signature(layer.forward).parameters]
            if names and any(isinstance(part, nn.Conv1d) for part in layer.children()):
                layer.__class__ = _packed_class(type(layer), names[0])
                parent.register_forward_pre_hook(_lay_out, with_kwargs=True)
    return [module for module in model.modules() if isinstance(module, PackedLayer)]


def is_attention_free(model: Any) -> bool:
    """Return whether the layers of a Hugging Face model are recurrent ones, after
    ``pack_recurrent``.
    """
    layers = sum(isinstance(module, PackedLayer) for module in model.modules())
    return layers == model.config.get_text_config().num_hidden_layers


@functools.cache
def _packed_class(kind: type[nn.Module], cache_argument: str) -> type[PackedLayer]:
    name = f"Packed{kind.__name__}"
    return type(name, (PackedLayer, kind), {"cache_argument": cache_argument})


def _lay_out(parent: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
    """Give a layer the layout of its holder, also if its holder is computed again."""
    for layer in parent.children():
        if isinstance(layer, PackedLayer):
            layer.layout = kwargs.get("layout")

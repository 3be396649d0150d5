"""LoRA adapters instead of full weights: only trained tensors are sent. An engine holds them beside
its base weights or, if it cannot, merges them into the weights of another copy.

To a kind of transfer they are named tensors like any others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from torchrl_grpo.weights.handle import Sender, Source, WeightHandle
from torchrl_grpo.weights.named import LoraDelta, TensorStream, merged, to_checkpoint
from torchrl_grpo.weights.receipts import Digests

BaseModel = Callable[[], nn.Module]


@dataclass(frozen=True)
class AdapterHandle(WeightHandle):
    """The weights of a base model with adapters added.

    Attributes:
        base: loads the base model on the CPU in the trainer's dtype. Hashable: each process calls
            it once.
        layers: parameter name and scaling of each adapter.
        matrices: A [r, in] and B [out, r] of each adapter, in the order of ``layers``.
    """

    base: BaseModel
    layers: tuple[tuple[str, float], ...]
    matrices: WeightHandle

    def weights(self) -> TensorStream:
        model = _loaded(self.base)
        base = {name: parameter.detach() for name, parameter in model.named_parameters()}
        deltas = self._deltas()
        for name in deltas:
            if name not in base:
                raise RuntimeError(
                    f"an adapter changes {name!r}, which is not among the {len(base)} base weights."
                )
        return to_checkpoint(
            model, ((name, merged(weight, deltas.get(name, []))) for name, weight in base.items())
        )

    def _deltas(self) -> dict[str, list[LoraDelta]]:
        """Return the updates that the adapters add to each parameter."""
        deltas: defaultdict[str, list[LoraDelta]] = defaultdict(list)
        # Copies, because the memory layout of operands may change the last bits of their product,
        # which must equal the trainer's.
        matrices = Digests().of(self.matrices.weights())
        copies = (matrix.to("cpu", copy=True) for _, matrix in matrices)
        for (name, scaling), a, b in zip(self.layers, copies, copies, strict=True):
            deltas[name].append(LoraDelta(a, b, scaling))
        return dict(deltas)


@lru_cache(maxsize=1)
def _loaded(base: BaseModel) -> nn.Module:
    return base()


class AdapterSender(Sender):
    """Sender of ``AdapterHandle``s.

    Args:
        carrier: sends the adapters' matrices; it must keep their dtype.
        base: see ``AdapterHandle``.
        dtype: dtype of the engine's weights; None for the base's.
    """

    def __init__(self, carrier: Sender, base: BaseModel, dtype: torch.dtype | None = None) -> None:
        self._carrier = carrier
        self._base = base
        self.dtype = dtype

    def _content(self, source: Source) -> Iterator[tuple[str, Any]]:
        return source.adapters()

    def pack(self, weights: Iterable[tuple[str, LoraDelta]], version: int) -> AdapterHandle:
        deltas = list(weights)
        layers = tuple((name, delta.scaling) for name, delta in deltas)
        matrices = [
            (f"{name}.{side}", matrix)
            for name, delta in deltas
            for side, matrix in (("A", delta.a), ("B", delta.b))
        ]
        carried = self._carrier.pack(matrices, version)
        handle = AdapterHandle(self._base, layers, carried)
        handle.note(receipt_s=carried.receipt_s)
        return handle

    def release(self, version: int) -> None:
        self._carrier.release(version)

    def close(self) -> None:
        self._carrier.close()

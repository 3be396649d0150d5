"""LoRA adapters instead of full weights: only the trained tensors are sent, and engines keep them
separate from their base weights.

To a kind of transfer they are named tensors like any others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.weights.handle import Source, WeightHandle
from torchrl_grpo.weights.named import LoraDelta, TensorStream
from torchrl_grpo.weights.object_store import ObjectSender


@dataclass(frozen=True)
class AdapterHandle(WeightHandle):
    """Handle for adapters, for an engine that runs their base model.

    Attributes:
        layers: parameter name and scaling of each adapter.
        matrices: A [r, in] and B [out, r] of each adapter, in the order of ``layers``.
    """

    layers: tuple[tuple[str, float], ...]
    matrices: WeightHandle

    def weights(self) -> TensorStream:
        """Return the matrices, as ``NAME.A`` and ``NAME.B``."""
        return self.matrices.weights()


class AdapterSender(ObjectSender):
    """Sender of ``AdapterHandle``s, in the adapters' own dtype."""

    def _content(self, source: Source) -> Iterator[tuple[str, Any]]:
        return source.adapters()

    def pack(self, weights: Iterable[tuple[str, LoraDelta]], version: int) -> AdapterHandle:
        deltas = list(weights)
        matrices = [
            (f"{name}.{side}", matrix)
            for name, delta in deltas
            for side, matrix in (("A", delta.a), ("B", delta.b))
        ]
        carried = super().pack(matrices, version)
        layers = tuple((name, delta.scaling) for name, delta in deltas)
        handle = AdapterHandle(layers, carried)
        handle.note(receipt=carried.receipt, receipt_s=carried.receipt_s)
        return handle

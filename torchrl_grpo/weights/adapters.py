"""LoRA adapters instead of full weights: only trained tensors are sent, to engines that hold them
beside their base weights.

To a kind of transfer they are named tensors like any others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.weights.handle import Sender, Source, WeightHandle
from torchrl_grpo.weights.named import LoraDelta, TensorStream


@dataclass(frozen=True)
class AdapterHandle(WeightHandle):
    """Adapters for an engine that was started with their base model.

    Attributes:
        layers: parameter name and scaling of each adapter.
        matrices: A [r, in] and B [out, r] of each adapter, in the order of ``layers``.
    """

    layers: tuple[tuple[str, float], ...]
    matrices: WeightHandle

    def weights(self) -> TensorStream:
        """Return the matrices, as ``NAME.A`` and ``NAME.B``."""
        return self.matrices.weights()


class AdapterSender(Sender):
    """Sender of ``AdapterHandle``s.

    Args:
        carrier: sends the adapters' matrices; it must keep their dtype.
    """

    def __init__(self, carrier: Sender) -> None:
        self._carrier = carrier

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
        handle = AdapterHandle(layers, carried)
        handle.note(receipt_s=carried.receipt_s)
        return handle

    def release(self, version: int) -> None:
        self._carrier.release(version)

    def close(self) -> None:
        self._carrier.close()

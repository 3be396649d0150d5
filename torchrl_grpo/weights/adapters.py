"""LoRA adapters instead of full weights: only trained tensors are sent, and each reader merges them
into the base weights.

To a kind of transfer they are named tensors like any others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from torchrl_grpo.weights.handle import Sender, Source, WeightHandle
from torchrl_grpo.weights.named import LoraDelta, NamedTensors, TensorStream, merged, to_checkpoint

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
        deltas = deltas_of(self.layers, self.matrices.weights(), torch.device("cpu"))
        for name in deltas:
            if name not in base:
                raise RuntimeError(
                    f"an adapter changes {name!r}, which is not among the {len(base)} base weights."
                )
        return to_checkpoint(
            model, ((name, merged(weight, deltas.get(name, []))) for name, weight in base.items())
        )


def deltas_of(
    layers: Sequence[tuple[str, float]],
    matrices: NamedTensors,
    device: torch.device,
) -> dict[str, list[LoraDelta]]:
    """Return the updates that adapters add to each parameter.

    Args:
        layers: parameter name and scaling of each adapter.
        matrices: A and B of each adapter, in the order of ``layers``.
        device: device to copy the matrices to.
    """
    deltas: defaultdict[str, list[LoraDelta]] = defaultdict(list)
    # Copies, because the memory layout of operands may change the last bits of their product, which
    # must equal the trainer's.
    copies = (matrix.to(device, copy=True) for _, matrix in matrices)
    for (name, scaling), a, b in zip(layers, copies, copies, strict=True):
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
    """

    def __init__(self, carrier: Sender, base: BaseModel) -> None:
        self._carrier = carrier
        self._base = base

    def _content(self, source: Source) -> Iterator[tuple[str, Any]]:
        return source.adapters()

    def pack(self, weights: Iterable[tuple[str, LoraDelta]], version: int) -> AdapterHandle:
        layers: list[tuple[str, float]] = []

        def matrices() -> TensorStream:
            for name, delta in weights:
                layers.append((name, delta.scaling))
                yield from ((f"{name}.A", delta.a), (f"{name}.B", delta.b))

        handle = self._carrier.pack(matrices(), version)
        return AdapterHandle(self._base, tuple(layers), handle)

    def release(self, version: int) -> None:
        self._carrier.release(version)

    def close(self) -> None:
        self._carrier.close()

"""LoRA adapters alone: what travels is what was trained, and each reader adds it to base weights of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from torchrl_grpo.weights.handle import ALONE, PackedTensor, Reader, Sender, Source, WeightHandle
from torchrl_grpo.weights.named import LoraDelta, merged

BaseWeights = Callable[[], Iterable[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Adapters(WeightHandle):
    """What adapters add to the weights of a base model, for Ray's object store to carry.

    Attributes:
        base: gives the named base weights in the trainer's dtype; hashable, because a process that reads asks it once.
        layers: of each adapter its weight's name, scaling, A [r, in] and B [out, r].
    """

    base: BaseWeights
    layers: tuple[tuple[str, float, PackedTensor, PackedTensor], ...]

    def weights(self, reader: Reader = ALONE) -> Iterator[tuple[str, Tensor]]:
        base = _loaded(self.base)
        deltas: defaultdict[str, list[LoraDelta]] = defaultdict(list)
        for name, scaling, a, b in self.layers:
            if name not in base:
                raise RuntimeError(f"an adapter changes {name!r}, which is not among the {len(base)} base weights.")
            deltas[name].append(LoraDelta(a.tensor(), b.tensor(), scaling))
        return ((name, merged(weight, deltas[name])) for name, weight in base.items())


@lru_cache(maxsize=1)
def _loaded(base: BaseWeights) -> dict[str, Tensor]:
    return dict(base())


class AdapterSender(Sender):
    """Sends ``Adapters``.

    Args:
        base: as in ``Adapters``.
    """

    def __init__(self, base: BaseWeights) -> None:
        self._base = base

    def _stream(self, source: Source) -> Iterator[tuple[str, Any]]:
        return source.adapters()

    def pack(self, weights: Iterable[tuple[str, LoraDelta]], version: int) -> Adapters:
        layers = [
            (name, delta.scaling, PackedTensor.pack(delta.a), PackedTensor.pack(delta.b)) for name, delta in weights
        ]
        return Adapters(self._base, tuple(layers))

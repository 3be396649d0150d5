"""Weights that travel as an object: through Ray's object store, which has one copy of it on each machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_grpo.weights.handle import ALONE, Named, Reader, Sender, WeightHandle


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as an array, which Ray shares between the processes of a machine without copying it.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        data: its bytes, because NumPy has no bfloat16.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    data: np.ndarray[Any, Any]

    @classmethod
    def pack(cls, tensor: Tensor, dtype: torch.dtype | None = None) -> PackedTensor:
        """Takes a tensor in its own or another dtype."""
        value = tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        return cls(tuple(value.shape), value.dtype, tensor_bytes(value))

    def tensor(self) -> Tensor:
        """A view, which must not be written to."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the memory is read-only, and nobody writes to it
            flat = torch.from_numpy(self.data)
        return flat.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class PackedWeights(WeightHandle):
    """The weights themselves.

    Attributes:
        tensors: by name.
    """

    tensors: tuple[tuple[str, PackedTensor], ...]

    def weights(self, reader: Reader = ALONE) -> Iterator[tuple[str, Tensor]]:
        return ((name, packed.tensor()) for name, packed in self.tensors)


class ObjectSender(Sender):
    """Sends ``PackedWeights``.

    Args:
        dtype: of the weights on their way, best the engine's; None keeps their own.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def pack(self, weights: Named, version: int) -> PackedWeights:
        return PackedWeights(tuple((name, PackedTensor.pack(weight, self._dtype)) for name, weight in weights))


def tensor_bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a contiguous CPU tensor, [number of bytes] uint8."""
    return tensor.reshape(-1).view(torch.uint8).numpy()

"""Weights as an object in Ray's object store, which has one copy per machine."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchrl_grpo.weights.handle import Sender, WeightHandle, on_host, tensor_bytes
from torchrl_grpo.weights.named import NamedTensors, TensorStream
from torchrl_grpo.weights.receipts import TensorsWithReceipt


@dataclass(frozen=True)
class PackedWeights(WeightHandle):
    """The weights themselves.

    Attributes:
        tensors: name, dtype, shape and bytes of each weight. Ray shares NumPy arrays between
            processes without copying them.
    """

    tensors: tuple[tuple[str, torch.dtype, torch.Size, np.ndarray[Any, Any]], ...]

    def weights(self) -> TensorStream:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the memory is read-only, and is never written to
            views = [
                (name, torch.from_numpy(data).view(dtype).view(shape))
                for name, dtype, shape, data in self.tensors
            ]
        return TensorsWithReceipt(views, self.receipt)


class ObjectSender(Sender):
    """Sender of ``PackedWeights``.

    Args:
        dtype: dtype of the weights in transit, ideally the engine's; None keeps their own.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def _pack(self, weights: NamedTensors, version: int) -> PackedWeights:
        values = ((name, on_host(weight, self.dtype)) for name, weight in weights)
        return PackedWeights(
            tuple((name, value.dtype, value.shape, tensor_bytes(value)) for name, value in values)
        )

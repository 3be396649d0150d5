"""The interface between the trainer, which sends weights, and the engines, which load them.

The trainer's ``Sender`` makes a ``WeightHandle`` for each version: a small object that knows how to
get the weights of that version. The driver gives the handle to the engines, and tells the sender
when nobody reads the version anymore. Until then its weights do not change: an engine that lags
behind needs no lock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from torchrl_grpo.weights.named import LoraDelta, NamedTensors, TensorStream
from torchrl_grpo.weights.receipts import Digests, Receipt

Updates = Iterator[dict[str, Any]]
Shapes = list[tuple[str, tuple[int, ...]]]
"""Name and shape of each weight, in order."""
Part = tuple[str, Shapes]
"""Layout of a flat tensor: its dtype, such as ``"float32"``, and its weights."""


class WeightHandle(ABC):
    """Access to the weights of one version.

    Attributes:
        receipt: receipt of the tensors that are sent; None if the reader computes it.
        receipt_s: seconds that the sender took to compute it.
        changes: whether training has changed the weights since the previous handle.
    """

    receipt: Receipt | None = None
    receipt_s: float = 0.0
    changes: bool = False

    def note(self, **values: Any) -> None:
        """Set attributes before the handle is sent."""
        vars(self).update(values)

    @abstractmethod
    def weights(self) -> TensorStream:
        """Return the weights by name. They may share memory: do not write to them.

        Raises:
            RuntimeError: the weights have been freed, or this process cannot read them.
        """


class TransferHandle(WeightHandle):
    """Weights that each vLLM worker receives through an engine of vLLM's weight transfer.

    Attributes:
        backend: that engine's name in vLLM's ``WeightTransferEngineFactory``.
    """

    backend: ClassVar[str]

    @property
    def layout(self) -> Shapes | None:
        """Name and shape of each weight; None if they come one by one and are checked elsewhere."""
        return None

    def init_info(self, workers: int) -> dict[str, Any] | None:
        """Return the init info for the engine of each worker; None if it is initialized already.

        Args:
            workers: number of this reader's processes that receive the weights.

        Raises:
            TransferRefusedError: this reader cannot get the weights. No worker was contacted.
        """
        return {}

    @abstractmethod
    def updates(self) -> Updates:
        """Yield the update infos, which consist of dicts, lists, strings, numbers and bytes."""

    def weights(self) -> TensorStream:
        raise RuntimeError(
            f"weights sent through {self.backend} can be received only by vLLM's workers."
        )


class Source(Protocol):
    """Source of weights: a ``PolicyTrainer``."""

    def weights(self, dtype: torch.dtype | None = None) -> TensorStream: ...

    def adapters(self) -> Iterator[tuple[str, LoraDelta]]: ...


class Sender:
    """Trainer's side. Each training rank has a sender; rank 0's makes the handles.

    Attributes:
        dtype: dtype of whole weights in transit, ideally the engine's; None keeps their own.
    """

    dtype: torch.dtype | None = None

    def send(self, source: Source, version: int, *, keep: bool = True) -> WeightHandle | None:
        """Make a handle of the current weights. They are gathered one at a time, so all ranks must
        call this.

        Args:
            source: has the weights.
            version: version of the weights.
            keep: whether this rank makes the handle. The others only take part in gathering, and
                return None.
        """
        weights = self._content(source)
        if keep:
            return self.pack(weights, version)
        deque(weights, maxlen=0)
        return None

    def _content(self, source: Source) -> Iterator[tuple[str, Any]]:
        return source.weights(self.dtype)

    def pack(self, weights: Iterable[tuple[str, Any]], version: int) -> WeightHandle:
        """Make a handle, with a receipt, for these weights, which may be generated one at a time."""
        digests = Digests()
        sent = ((name, weight.detach().to(self.dtype or weight.dtype)) for name, weight in weights)
        handle = self._pack(digests.of(sent), version)
        handle.note(receipt=digests.receipt(), receipt_s=digests.seconds)
        return handle

    def _pack(self, weights: TensorStream, version: int) -> WeightHandle:
        """Make a handle for weights that already have the dtype in which they are sent."""
        raise NotImplementedError(f"{type(self).__name__} must override pack or _pack.")

    def resend(self, version: int, reason: str) -> WeightHandle:
        """Make another handle of an unreleased version after the first one was refused. Later
        versions are sent the same way.

        Args:
            version: version of the weights.
            reason: reason for the refusal.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has one way to send weights, and it was refused: {reason}"
        )

    def release(self, version: int) -> None:
        """Free a version that nobody will read anymore."""

    def close(self) -> None:
        """Free all versions. May be called again."""


@dataclass(frozen=True)
class DirectHandle(WeightHandle):
    """The trainer's weights at the time they are read, for an engine in the same process.

    Attributes:
        read: returns the weights.
    """

    read: Callable[[], NamedTensors]

    def weights(self) -> TensorStream:
        return iter(self.read())


class DirectSender(Sender):
    """Sender of ``DirectHandle``s: nothing is copied or kept.

    Args:
        dtype: dtype to which the engine converts the weights; None to keep each weight's dtype.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def send(self, source: Source, version: int, *, keep: bool = True) -> WeightHandle:
        return self.handle(source.weights)

    def pack(self, weights: NamedTensors, version: int) -> WeightHandle:
        return self.handle(lambda: weights)

    def handle(self, read: Callable[[], NamedTensors]) -> WeightHandle:
        """Make a handle that calls ``read`` whenever the weights are read."""
        return DirectHandle(read)


PART_BYTES = 256 * 2**20


def in_parts(weights: NamedTensors, dtype: torch.dtype | None) -> Iterator[tuple[Tensor, Part]]:
    """Copy weights into flat tensors on their device: a few large tensors are faster to send than
    many small ones.

    Args:
        weights: may come one at a time.
        dtype: dtype of the flat tensors; None keeps each weight's own.

    Yields:
        a flat tensor of at most ``PART_BYTES``, or of a single larger weight, and its layout.
    """
    batch: list[tuple[str, Tensor]] = []

    def part() -> tuple[Tensor, Part]:
        flat = torch.cat([value.reshape(-1) for _, value in batch])
        return flat, (dtype_name(flat.dtype), [(name, tuple(value.shape)) for name, value in batch])

    for name, weight in weights:
        value = weight.detach().to(dtype or weight.dtype)
        full = sum(other.nbytes for _, other in batch) + value.nbytes > PART_BYTES
        if batch and (full or value.dtype != batch[0][1].dtype):
            yield part()
            batch.clear()
        batch.append((name, value))
    if batch:
        yield part()


def staged(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a weight in host memory, contiguous: from a GPU, a copy in pinned memory.

    Args:
        weight: a tensor on any device. Its device converts the dtype, because a copy between
            devices would convert it on the CPU.
        dtype: dtype of the result; None keeps the weight's own.
    """
    value = weight.detach().to(dtype or weight.dtype).contiguous()
    if not value.is_cuda:
        return value.cpu()
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value)


def on_host(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``staged(weight, dtype)`` in unpinned memory, for weights that are kept."""
    value = staged(weight, dtype)
    return value.clone() if value.is_pinned() else value


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a contiguous CPU tensor, [bytes] uint8: NumPy has no bfloat16."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def unpacked(flat: Tensor, part: Part) -> TensorStream:
    """Undo ``in_parts`` for one part: yield views of the flat tensor by name."""
    start = 0
    for name, shape in part[1]:
        end = start + math.prod(shape)
        yield name, flat[start:end].view(shape)
        start = end

"""The interface between the trainer, which sends weights, and the engines, which load them.

The trainer's ``Sender`` makes a ``WeightHandle`` for each version: a small object that says how to
get the weights of that version. Whoever drives the run gives the handle to the engines, and tells
the sender when nobody reads the version any more. Until then its weights stay as they are: an
engine that lags behind never sees them change, without a lock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from torchrl_grpo.weights.named import LoraDelta

Named = Iterable[tuple[str, Tensor]]
Part = tuple[str, list[tuple[str, tuple[int, ...]]]]
"""Layout of a flat tensor: its dtype, such as ``"float32"``, and name and shape of each weight, in
order.
"""


class WeightHandle(ABC):
    """Handle on the weights of one version."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by name. They may share memory with others: do not write to them.

        Raises:
            RuntimeError: the weights are gone, or this process cannot read them.
        """


class TransferHandle(WeightHandle):
    """Weights that each vLLM worker receives for itself, by an engine of vLLM's weight transfer.

    Attributes:
        backend: name of that engine in vLLM's ``WeightTransferEngineFactory``.
    """

    backend: ClassVar[str]

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...]]] | None:
        """Name and shape of each weight; None where they come one by one and are checked elsewhere."""
        return None

    def init_info(self, workers: int) -> dict[str, Any] | None:
        """Return what the engine of each worker is initialized with, None where that was done
        before.

        Args:
            workers: how many processes of this reader receive the weights.

        Raises:
            TransferRefusedError: these weights cannot be had here. No worker has heard of them.
        """
        return {}

    @abstractmethod
    def updates(self) -> Iterator[dict[str, Any]]:
        """Return the update infos, one after the other; dicts, lists, strings, numbers and bytes
        alone.
        """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        raise RuntimeError(
            f"weights that travel by {self.backend} are received by vLLM's workers alone."
        )


@dataclass(frozen=True)
class EitherHandle(WeightHandle):
    """The same weights by two paths: a fast one, which must first prove itself, and one that works
    everywhere.

    Attributes:
        slow: works everywhere.
        fast: is compared with it, and then takes its place.
    """

    slow: WeightHandle
    fast: TransferHandle

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.slow.weights()


class Source(Protocol):
    """Source of a sender's weights: a ``GRPOTrainer``."""

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def adapters(self) -> Iterator[tuple[str, LoraDelta]]: ...


class Sender(ABC):
    """The trainer's side. Each training rank has a sender; that of rank 0 makes the handles."""

    def send(self, source: Source, version: int, *, keep: bool = True) -> WeightHandle | None:
        """Makes a handle of the current weights. They are gathered one at a time, so all ranks must
        call this.

        Args:
            source: has the weights.
            version: of the weights.
            keep: whether this rank makes the handle. The others take part in gathering and return
                None.
        """
        weights = self._content(source)
        if keep:
            return self.pack(weights, version)
        for _ in weights:
            pass
        return None

    def _content(self, source: Source) -> Iterator[tuple[str, Any]]:
        return source.weights()

    @abstractmethod
    def pack(self, weights: Iterable[tuple[str, Any]], version: int) -> WeightHandle:
        """Makes a handle of these weights, which may come one at a time."""

    def resend(self, version: int, reason: str) -> WeightHandle:
        """Make another handle of an unreleased version, because the first one was refused.

        Args:
            version: of the weights.
            reason: of the refusal. Later versions are sent in the same way as this one.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has one way to send weights, and it was refused: {reason}"
        )

    def release(self, version: int) -> None:  # noqa: B027
        """Free a version that nobody reads or will read anymore."""

    def close(self) -> None:  # noqa: B027
        """Frees all versions. May be called again."""


@dataclass(frozen=True)
class DirectHandle(WeightHandle):
    """The trainer's current weights when they are read, for an engine in the same process.

    Attributes:
        read: gives the weights.
    """

    read: Callable[[], Named]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.read())


class DirectSender(Sender):
    """Sends ``DirectHandle``s: nothing is copied, and nothing is kept."""

    def send(self, source: Source, version: int, *, keep: bool = True) -> WeightHandle:
        return self.handle(source.weights)

    def pack(self, weights: Named, version: int) -> WeightHandle:
        return self.handle(lambda: weights)

    def handle(self, read: Callable[[], Named]) -> WeightHandle:
        """Makes a handle of the weights that ``read`` gives whenever they are asked for."""
        return DirectHandle(read)


PART_BYTES = 256 * 2**20


def in_parts(weights: Named, dtype: torch.dtype | None) -> Iterator[tuple[Tensor, Part]]:
    """Copies weights into flat tensors on their device: a few large ones are faster to send than
    many small ones.

    Args:
        weights: they may come one at a time.
        dtype: of the flat tensors; None keeps each weight's own.

    Yields:
        a flat tensor of at most ``PART_BYTES``, or of a single larger weight, and what lies in it.
    """
    values: list[Tensor] = []
    names: list[str] = []

    def part() -> tuple[Tensor, Part]:
        layout = [(name, tuple(value.shape)) for name, value in zip(names, values, strict=True)]
        return torch.cat([value.reshape(-1) for value in values]), (
            dtype_name(values[0].dtype),
            layout,
        )

    for name, weight in weights:
        value = weight.detach().to(dtype or weight.dtype)
        full = sum(other.nbytes for other in values) + value.nbytes > PART_BYTES
        if values and (full or value.dtype != values[0].dtype):
            yield part()
            values, names = [], []
        values.append(value)
        names.append(name)
    if values:
        yield part()


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a contiguous CPU tensor, [number of bytes] uint8: NumPy has no bfloat16."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def unpacked(flat: Tensor, part: Part) -> Iterator[tuple[str, Tensor]]:
    """Undoes ``in_parts`` for one part: views of the flat tensor."""
    start = 0
    for name, shape in part[1]:
        end = start + math.prod(shape)
        yield name, flat[start:end].view(shape)
        start = end

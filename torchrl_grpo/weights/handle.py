"""The interface between the trainer, which sends weights, and the engines, which load them.

The trainer's ``Sender`` makes a ``WeightHandle`` for each version: a small object that says how to get the weights of
that version. Whoever drives the run gives the handle to the engines, and tells the sender when nobody reads the version
any more. Until then its weights stay as they are: an engine that lags behind never sees them change, without a lock.
"""

from __future__ import annotations

import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchrl_grpo.weights.named import LoraDelta

Named = Iterable[tuple[str, Tensor]]
Part = tuple[str, list[tuple[str, tuple[int, ...]]]]
"""Layout of a flat tensor: its dtype, such as ``"float32"``, and name and shape of each weight, in order."""


@dataclass(frozen=True)
class Reader:
    """Reader of a handle: an engine, which may read with several processes.

    Attributes:
        name: of the engine. Each engine has another one, also an engine that replaces another.
        rank: of this process among those of the engine.
        size: how many they are.
    """

    name: str
    rank: int = 0
    size: int = 1


ALONE = Reader(uuid.uuid4().hex)
"""This process, reading for itself."""


class WeightHandle(ABC):
    """How to get the weights of one version."""

    @abstractmethod
    def weights(self, reader: Reader = ALONE) -> Iterator[tuple[str, Tensor]]:
        """The weights by name. They may share memory with others: do not write to them.

        Raises:
            RuntimeError: the weights are gone or did not come.
        """


class PlainHandle(WeightHandle):
    """A handle whose fields are strings, numbers, bytes and lists: it can be sent to vLLM's workers, who then read it.

    Attributes:
        parts: what lies in the flat tensors that the weights come in.
    """

    parts: Sequence[Part]

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of each weight."""
        return [entry for _, layout in self.parts for entry in layout]

    def plain(self) -> tuple[str, list[Any]]:
        """The name of the class and the values of its fields; see ``worker``."""
        return type(self).__name__, [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]

    def weights(self, reader: Reader = ALONE) -> Iterator[tuple[str, Tensor]]:
        sizes = [(sum(math.prod(shape) for _, shape in layout), getattr(torch, dtype)) for dtype, layout in self.parts]
        for flat, (_, layout) in zip(self.flats(sizes, reader), self.parts, strict=True):
            start = 0
            for name, shape in layout:
                end = start + math.prod(shape)
                yield name, flat[start:end].view(shape)
                start = end

    @abstractmethod
    def flats(self, sizes: Sequence[tuple[int, torch.dtype]], reader: Reader) -> Iterator[Tensor]:
        """The flat tensors, of these sizes and dtypes."""


class Source(Protocol):
    """Source of a sender's weights: a ``GRPOTrainer``."""

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def adapters(self) -> Iterator[tuple[str, LoraDelta]]: ...


class Sender(ABC):
    """The trainer's side. Each training rank has a sender; that of rank 0 makes the handles."""

    def send(self, source: Source, version: int, *, keep: bool = True) -> WeightHandle | None:
        """Makes a handle of the current weights. They are gathered one at a time, so all ranks must call this.

        Args:
            source: has the weights.
            version: of the weights.
            keep: whether this rank makes the handle. The others take part in gathering and return None.
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

    def release(self, version: int) -> None:  # noqa: B027
        """Frees a version that nobody reads or will read any more."""

    def close(self) -> None:  # noqa: B027
        """Frees all versions. May be called again."""


@dataclass(frozen=True)
class DirectHandle(WeightHandle):
    """The trainer's weights as they are when they are read, for an engine in the same process.

    Attributes:
        read: gives the weights.
    """

    read: Callable[[], Named]

    def weights(self, reader: Reader = ALONE) -> Iterator[tuple[str, Tensor]]:
        return iter(self.read())


class DirectSender(Sender):
    """Sends ``DirectHandle``s: nothing is copied, and nothing is kept."""

    def send(self, source: Source, version: int, *, keep: bool = True) -> DirectHandle:
        return DirectHandle(source.weights)

    def pack(self, weights: Named, version: int) -> DirectHandle:
        return DirectHandle(lambda: weights)


PART_BYTES = 256 * 2**20


def in_parts(weights: Named, dtype: torch.dtype | None) -> Iterator[tuple[Tensor, Part]]:
    """Copies weights into flat tensors on their device: a few large ones are faster to send than many small ones.

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
        return torch.cat([value.reshape(-1) for value in values]), (dtype_name(values[0].dtype), layout)

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

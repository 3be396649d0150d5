"""The interface between the trainer, which sends weights, and the engines, which load them.

The trainer's ``Sender`` makes a ``WeightHandle`` for each version: a small object that says how to get the weights of
that version. Whoever drives the run gives the handle to the engines, and tells the sender when nobody reads the version
any more. Until then its weights stay as they are: an engine that lags behind never sees them change, without a lock.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from torchrl_grpo.weights.named import LoraDelta

Named = Iterable[tuple[str, Tensor]]
Layout = list[tuple[str, tuple[int, ...]]]
"""Name and shape of each weight, in order."""
Parts = list[tuple[str, Layout]]
"""Weights in flat tensors: for each of these its dtype, such as ``"float32"``, and what lies in it, in order."""


@dataclass(frozen=True)
class Reader:
    """Who reads a handle: an engine, which may read with several processes.

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
        parts: what the weights are.
    """

    parts: Parts

    @property
    def layout(self) -> Layout:
        """What the weights are, without the parts."""
        return [entry for _, layout in self.parts for entry in layout]

    def plain(self) -> tuple[str, list[Any]]:
        """The name of the class and the values of its fields; see ``worker``."""
        return type(self).__name__, [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]


class Source(Protocol):
    """What a sender takes the weights from: a ``GRPOTrainer``."""

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


def in_parts(weights: Named, dtype: torch.dtype | None) -> Iterator[tuple[Tensor, Layout]]:
    """Copies weights into flat tensors on their device: a few large ones are faster to send than many small ones.

    Args:
        weights: they may come one at a time.
        dtype: of the flat tensors; None keeps each weight's own.

    Yields:
        a flat tensor of at most ``PART_BYTES``, or of a single larger weight, and what lies in it; see ``cut``.
    """
    values: list[Tensor] = []
    layout: Layout = []
    for name, weight in weights:
        value = weight.detach().to(dtype or weight.dtype)
        full = sum(other.nbytes for other in values) + value.nbytes > PART_BYTES
        if values and (full or value.dtype != values[0].dtype):
            yield torch.cat(values), layout
            values, layout = [], []
        values.append(value.reshape(-1))
        layout.append((name, tuple(value.shape)))
    if values:
        yield torch.cat(values), layout


def describe(parts: Iterable[tuple[Tensor, Layout]]) -> Parts:
    """What the flat tensors of ``in_parts`` are."""
    return [(dtype_name(flat.dtype), layout) for flat, layout in parts]


def cut(flat: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Cuts a flat tensor into the named weights."""
    start = 0
    for name, shape in layout:
        size = torch.Size(shape).numel()
        yield name, flat[start : start + size].view(shape)
        start += size


def numel(layout: Layout) -> int:
    """Length of the flat tensor that has this in it."""
    return sum(torch.Size(shape).numel() for _, shape in layout)


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")

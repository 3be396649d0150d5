"""What the trainer's side hands to an engine's side: a small object that says where the weights of one version are.

A ``Sender`` in the trainer makes a ``WeightHandle`` for each version; whoever drives the run gives it to the engines and
tells the sender when nobody reads that version any more. Until then it stays as it is, so a reader that lags behind
never sees weights change, and no lock is needed.
"""

from __future__ import annotations

import os
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchrl_grpo.weights.named import LoraDelta

Named = Iterable[tuple[str, Tensor]]
Layout = list[tuple[str, tuple[int, ...]]]
"""Name and shape of each weight, in order."""


@dataclass(frozen=True)
class Reader:
    """Who reads a handle: an engine, whose processes may read it together.

    Attributes:
        name: of the engine; no two engines have the same one, and none that is made again has its old one.
        rank: of this process among those that read.
        size: how many they are.
    """

    name: str
    rank: int = 0
    size: int = 1


ALONE = Reader(uuid.uuid4().hex)
"""This process, reading for itself."""


class WeightHandle(ABC):
    """Where the weights of one version are. It can be pickled."""

    @abstractmethod
    def weights(self, reader: Reader = ALONE) -> Iterator[tuple[str, Tensor]]:
        """The named weights; views of memory that must not be written to and that they hold.

        Raises:
            RuntimeError: they are gone, or could not be had.
        """


class PlainHandle(WeightHandle):
    """A handle of strings, numbers, bytes and lists, which vLLM's workers can be told of, and so read by themselves.

    Attributes:
        layout: what is in it.
    """

    layout: Layout

    def check(self) -> None:
        """Raises RuntimeError if it can be seen at once that the weights are gone."""

    def plain(self) -> tuple[str, list[Any]]:
        """Name of the kind and values of the fields; see ``worker``."""
        return type(self).__name__, [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]


class Source(Protocol):
    """What a sender takes the weights from: a ``GRPOTrainer``."""

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def adapters(self) -> Iterator[tuple[str, LoraDelta]]: ...


class Sender(ABC):
    """The trainer's side. Each rank of a trainer has one; that of rank 0 makes the handles."""

    def send(self, source: Source, version: int, *, keep: bool = True) -> WeightHandle | None:
        """Makes a handle of the current weights, which are gathered one at a time: all ranks must call it.

        Args:
            source: has the weights.
            version: of the weights.
            keep: whether this rank makes the handle; the others only take part in gathering, and return None.
        """
        weights = self._stream(source)
        if keep:
            return self.pack(weights, version)
        for _ in weights:
            pass
        return None

    def _stream(self, source: Source) -> Iterator[tuple[str, Any]]:
        return source.weights()

    @abstractmethod
    def pack(self, weights: Iterable[tuple[str, Any]], version: int) -> WeightHandle:
        """Makes a handle of the weights, which may come one at a time."""

    def release(self, version: int) -> None:  # noqa: B027
        """Frees a version that nobody reads or will read any more."""

    def close(self) -> None:  # noqa: B027
        """Frees all versions. May be called again."""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as an array, which Ray shares between the processes of a host without copying it.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        data: its bytes; NumPy has no bfloat16.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    data: np.ndarray[Any, Any]

    @classmethod
    def pack(cls, tensor: Tensor, dtype: torch.dtype | None = None) -> PackedTensor:
        """Takes a tensor in its own or another dtype."""
        value = tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        return cls(tuple(value.shape), value.dtype, _bytes(value))

    def tensor(self) -> Tensor:
        """A view, which must not be written to."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the memory is read-only, and nobody writes to it
            flat = torch.from_numpy(self.data)
        return flat.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class PackedWeights(WeightHandle):
    """The weights themselves, for Ray's object store to carry.

    Attributes:
        parts: the weights by name.
    """

    parts: tuple[tuple[str, PackedTensor], ...]

    @classmethod
    def pack(cls, weights: Named, dtype: torch.dtype | None) -> PackedWeights:
        """Takes weights, which may come one at a time; ``dtype`` None keeps theirs."""
        return cls(tuple((name, PackedTensor.pack(weight, dtype)) for name, weight in weights))

    def weights(self, reader: Reader = ALONE) -> Iterator[tuple[str, Tensor]]:
        return ((name, packed.tensor()) for name, packed in self.parts)


class ObjectSender(Sender):
    """Sends ``PackedWeights``.

    Args:
        dtype: in which the weights travel, best the engine's; None is their own.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def pack(self, weights: Named, version: int) -> PackedWeights:
        return PackedWeights.pack(weights, self._dtype)


@dataclass(frozen=True)
class SharedBlock(PlainHandle):
    """Weights in shared memory of this machine.

    Attributes:
        path: the block, as every process of this machine and user can open it.
        name: what must be found there, so that nothing else is taken for the block when its maker is gone.
        dtype: of all weights, such as ``"float32"``.
        layout: in the order in which the weights lie in the block.
    """

    path: str
    name: str
    dtype: str
    layout: Layout

    def check(self) -> None:
        if not os.path.exists(self.path) or self.name not in os.readlink(self.path):
            raise RuntimeError(f"the shared weights at {self.path} are gone: the process that made them dropped them.")

    def weights(self, reader: Reader = ALONE) -> Iterator[tuple[str, Tensor]]:
        self.check()
        size = sum(torch.Size(shape).numel() for _, shape in self.layout)
        flat = torch.from_file(self.path, shared=True, size=size, dtype=getattr(torch, self.dtype))
        return cut(flat, self.layout)


class SharedWeights:
    """Weights in a block of shared memory that any process of this machine can read through ``block``.

    The block has no name in any file system (it is a ``memfd``, Linux only): it can be opened as long as this object is
    open, and its memory is gone with the last process that uses it, however these processes end.

    Attributes:
        block: what the readers need.

    Args:
        weights: they may come one at a time.
        dtype: dtype in which the weights travel, best the engine's.

    Raises:
        OSError: there is not enough memory.

    Examples:
        >>> shared = SharedWeights([("norm", torch.ones(3))], torch.float32)
        >>> list(shared.block.weights())
        [('norm', tensor([1., 1., 1.]))]
        >>> shared.close()
    """

    def __init__(self, weights: Named, dtype: torch.dtype) -> None:
        name, layout = f"torchrl_grpo_weights_{uuid.uuid4().hex}", Layout()
        self._file = open(os.memfd_create(name), "wb")  # noqa: SIM115  closed by close
        try:
            # Written and not mapped: a lack of memory is an error here, and not a SIGBUS later.
            for weight_name, weight in weights:
                value = weight.detach().to("cpu", dtype).contiguous()
                self._file.write(_bytes(value).data)
                layout.append((weight_name, tuple(value.shape)))
            self._file.flush()
        except BaseException:
            self.close()
            raise
        self.block = SharedBlock(f"/proc/{os.getpid()}/fd/{self._file.fileno()}", name, dtype_name(dtype), layout)

    def close(self) -> None:
        """Lets nobody open the block any more; who has it open keeps it. May be called again."""
        self._file.close()


class SharedSender(Sender):
    """Sends ``SharedBlock``s, a new one for each version.

    Args:
        dtype: in which the weights travel, best the engine's.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept: dict[int, SharedWeights] = {}

    def pack(self, weights: Named, version: int) -> SharedBlock:
        self.release(version)
        self._kept[version] = SharedWeights(weights, self._dtype)
        return self._kept[version].block

    def release(self, version: int) -> None:
        if version in self._kept:
            self._kept.pop(version).close()

    def close(self) -> None:
        for version in list(self._kept):
            self.release(version)


@dataclass(frozen=True)
class WeightFile(PlainHandle):
    """Weights in a safetensors file.

    Attributes:
        path: absolute.
        layout: in any order.
    """

    path: str
    layout: Layout

    def check(self) -> None:
        if not os.path.exists(self.path):
            raise RuntimeError(
                f"the weights in {self.path} are gone, or the folder is not one that all machines of the run have: set "
                "hydra.run.dir to one, or use inference_model.weight_transfer=object_store."
            )

    def weights(self, reader: Reader = ALONE) -> Iterator[tuple[str, Tensor]]:
        from safetensors import safe_open

        self.check()
        file: Any = safe_open(self.path, "pt")  # maps the file, and so keeps it
        return ((name, file.get_tensor(name)) for name, _ in self.layout)


class FileSender(Sender):
    """Sends ``WeightFile``s.

    Args:
        folder: where they are written; made when it is needed.
        dtype: in which the weights travel, best the engine's.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype

    def pack(self, weights: Named, version: int) -> WeightFile:
        from safetensors.torch import save_file

        tensors = {name: weight.detach().to("cpu", self._dtype).contiguous() for name, weight in weights}
        path = self._path(version)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        save_file(tensors, unfinished)
        unfinished.replace(path)
        return WeightFile(str(path), [(name, tuple(tensor.shape)) for name, tensor in tensors.items()])

    def release(self, version: int) -> None:
        self._path(version).unlink(missing_ok=True)

    def _path(self, version: int) -> Path:
        return self._folder.absolute() / f"weights_{version:06d}.safetensors"


def check_layout(layout: Layout, expected: Mapping[str, Sequence[int]]) -> None:
    """Checks that weights are those of a model, each once.

    Args:
        layout: of the weights.
        expected: name to shape of the model's weights.

    Raises:
        RuntimeError: a name is unknown, missing or comes twice, or a shape differs.
    """
    seen: set[str] = set()
    for name, shape in layout:
        if name not in expected:
            raise RuntimeError(f"weight {name!r} is not among the {len(expected)} weights of the engine's model.")
        if name in seen:
            raise RuntimeError(f"weight {name!r} was sent twice in one update.")
        if tuple(shape) != tuple(expected[name]):
            raise RuntimeError(
                f"weight {name!r} has shape {list(shape)}, the engine's model has {list(expected[name])}."
            )
        seen.add(name)
    missing = [name for name in expected if name not in seen]
    if missing:
        raise RuntimeError(
            f"{len(missing)} of {len(expected)} weights are missing from the update, first {missing[:3]}."
        )


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


PART_BYTES = 256 * 2**20


def in_parts(weights: Named, dtype: torch.dtype) -> Iterator[tuple[Tensor, Layout]]:
    """Copies weights one after the other into flat tensors, where they are: few large ones instead of many small.

    Args:
        weights: they may come one at a time.
        dtype: of the flat tensors.

    Yields:
        a flat tensor of at most ``PART_BYTES``, unless a single weight is larger, and what lies in it; see ``cut``.
    """
    values: list[Tensor] = []
    layout: Layout = []
    for name, weight in weights:
        value = weight.detach().to(dtype)
        if layout and sum(other.nbytes for other in values) + value.nbytes > PART_BYTES:
            yield torch.cat(values), layout
            values, layout = [], []
        values.append(value.reshape(-1))
        layout.append((name, tuple(value.shape)))
    if layout:
        yield torch.cat(values), layout


def cut(flat: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Cuts a flat tensor into the named weights, in order."""
    start = 0
    for name, shape in layout:
        size = torch.Size(shape).numel()
        yield name, flat[start : start + size].view(shape)
        start += size


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a contiguous CPU tensor, [number of bytes] uint8."""
    return tensor.reshape(-1).view(torch.uint8).numpy()

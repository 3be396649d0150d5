"""Weights in the memory of the GPU that trainer and engine share, for the engine ``ipc`` of vLLM's
weight transfer.

They go in parts, each an allocation of its own that is exported once, in the form that vLLM calls
packed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from torchrl_grpo.compat.torch import release_shared_memory
from torchrl_grpo.weights.handle import (
    DirectHandle,
    DirectSender,
    EitherHandle,
    Named,
    Part,
    Sender,
    TransferHandle,
    WeightHandle,
    in_parts,
    unpacked,
)
from torchrl_grpo.weights.meeting import Meeting, connected, open_store


def exported(flat: Tensor, part: Part) -> dict[str, Any]:
    """Return the update info of a part, in plain values: see ``opened``.

    Args:
        flat: on the GPU, as ``in_parts`` gives it. It must stay as it is until the reader is done.
        part: what lies in it.
    """
    dtype, layout = part
    sizes = [view.nbytes for _, view in unpacked(flat, part)]
    torch.cuda.current_stream().synchronize()
    _, (_, _, _, offset, _, _, device, *memory) = reduce_tensor(flat.view(torch.uint8))
    return {
        "names": [name for name, _ in layout],
        "dtype_names": [dtype] * len(layout),
        "shapes": [list(shape) for _, shape in layout],
        "tensor_sizes": sizes,
        "ipc_handles": [
            str(torch.cuda.get_device_properties(device).uuid),
            flat.nbytes,
            offset,
            *memory,
        ],
    }


def opened(update: dict[str, Any]) -> dict[str, Any]:
    """Return an update info as vLLM's engine takes it: with the arguments of torch's
    ``rebuild_cuda_tensor``.
    """
    gpu, size, offset, *memory = update["ipc_handles"]
    tensor = (torch.Tensor, torch.Size([size]), (1,), offset)
    return update | {
        "ipc_handles": {gpu: (*tensor, torch.storage.TypedStorage, torch.uint8, 0, *memory)}
    }


def on_gpu(weights: Named) -> Iterator[tuple[str, Tensor]]:
    """Weights on the current GPU."""
    return ((name, weight.cuda()) for name, weight in weights)


@dataclass(frozen=True)
class IpcStream(TransferHandle):
    """The weights of a trainer in this process, part after part: one part at a time takes memory.

    Attributes:
        read: gives the weights.
        dtype: of the weights on their way.
    """

    backend = "ipc"

    read: Callable[[], Named]
    dtype: torch.dtype | None

    def init_info(self, workers: int) -> dict[str, Any]:
        return {"packed": True}

    def updates(self) -> Iterator[dict[str, Any]]:
        for flat, part in in_parts(on_gpu(self.read()), self.dtype):
            yield exported(flat, part)


class LocalSender(DirectSender):
    """Sends the weights to an engine on the trainer's GPU whose driver is in the trainer's process.

    Args:
        dtype: of the weights on their way, best the engine's.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._refused = False

    def handle(self, read: Callable[[], Named]) -> WeightHandle:
        self._direct = DirectHandle(read)
        return (
            self._direct
            if self._refused
            else EitherHandle(self._direct, IpcStream(read, self._dtype))
        )

    def resend(self, version: int, reason: str) -> WeightHandle:
        from torchrl import torchrl_logger  # slow, and vLLM's workers import this module

        torchrl_logger.warning(
            f"The engine takes its weights through the host from here on: {reason}."
        )
        self._refused = True
        return self._direct


@dataclass(frozen=True)
class IpcParts(TransferHandle):
    """Weights in buffers that another process of this machine keeps on its GPU.

    Attributes:
        meeting: where the reader says that it has opened them.
        version: of the weights.
        infos: of each buffer, see ``exported``.
    """

    backend = "ipc"

    meeting: Meeting
    version: int
    infos: Sequence[dict[str, Any]]

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        named = (
            (name, shape)
            for info in self.infos
            for name, shape in zip(info["names"], info["shapes"], strict=True)
        )
        return [(name, tuple(shape)) for name, shape in named]

    def init_info(self, workers: int) -> dict[str, Any]:
        connected(self.meeting).set(f"read/{self.version}", "1")
        return {"packed": True}

    def updates(self) -> Iterator[dict[str, Any]]:
        return iter(self.infos)


class IpcSender(Sender):
    """Sends ``IpcParts`` to one engine; a version takes the memory of the whole model on the GPU
    until it is released.

    Args:
        dtype: of the weights on their way, best the engine's; None keeps their own.
        host: address of this machine.
    """

    def __init__(self, dtype: torch.dtype | None, host: str) -> None:
        self.dtype = dtype
        self._store = open_store(host)
        self._meeting = Meeting(host, self._store.port, secrets.token_hex(32))
        self._kept: dict[int, tuple[list[tuple[Tensor, Part]], list[dict[str, Any]]]] = {}

    def pack(self, weights: Named, version: int) -> IpcParts:
        parts = list(in_parts(on_gpu(weights), self.dtype))
        infos = [exported(flat, part) for flat, part in parts]
        self._kept[version] = parts, infos
        return IpcParts(self._meeting, version, infos)

    def kept(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """The weights of a version that was not released, by name."""
        return (named for flat, part in self._kept[version][0] for named in unpacked(flat, part))

    def refuse(self, reason: str) -> None:
        """Do nothing: the only engine reads by itself."""

    def release(self, version: int) -> None:
        kept = self._kept.pop(version, None)
        if kept is None:
            return
        # Torch keeps memory that was shared until a reader has opened and closed it, once. Of a
        # version that was skipped, the reader's side is taken here; taken twice, the memory would
        # never be free.
        if not connected(self._meeting).check([f"read/{version}"]):
            for info in kept[1]:
                *_, counter, place, _, _ = info[
                    "ipc_handles"
                ]  # ref_counter_handle and _offset of rebuild_cuda_tensor
                release_shared_memory(counter, place)
        del kept
        torch.cuda.ipc_collect()

    def close(self) -> None:
        for version in list(self._kept):
            self.release(version)

"""Weights in the memory of the GPU that trainer and engine share, for the engine ``ipc`` of vLLM's
weight transfer.

They go in parts, each in an allocation of its own that is exported once, in the form that vLLM
calls packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from torchrl_grpo.compat.torch import release_shared_memory
from torchrl_grpo.weights.handle import (
    DirectHandle,
    DirectSender,
    Part,
    Shapes,
    TransferHandle,
    Updates,
    WeightHandle,
    in_parts,
    unpacked,
)
from torchrl_grpo.weights.named import NamedTensors, TensorStream
from torchrl_grpo.weights.receipts import Digests
from torchrl_grpo.weights.rendezvous import Rendezvous, RendezvousSender, connected


def exported(flat: Tensor, part: Part) -> dict[str, Any]:
    """Return the update info of a part in plain values, which ``opened`` turns into vLLM's.

    Args:
        flat: tensor on the GPU, from ``in_parts``. It must not change until the reader is done.
        part: layout of the tensor.
    """
    dtype, layout = part
    sizes = [view.nbytes for _, view in unpacked(flat, part)]
    torch.cuda.current_stream(flat.device).synchronize()
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
    """Return an update info in vLLM's form, with the arguments of ``rebuild_cuda_tensor``."""
    gpu, size, offset, *memory = update["ipc_handles"]
    tensor = (torch.Tensor, torch.Size([size]), (1,), offset)
    return update | {
        "ipc_handles": {gpu: (*tensor, torch.storage.TypedStorage, torch.uint8, 0, *memory)}
    }


def on_gpu(weights: NamedTensors) -> TensorStream:
    """Move weights to the current GPU, except those that are already on a GPU."""
    return ((name, weight if weight.is_cuda else weight.cuda()) for name, weight in weights)


@dataclass(frozen=True)
class IpcStream(DirectHandle, TransferHandle):
    """The weights of a trainer in this process. One part at a time takes memory.

    Attributes:
        dtype: dtype of the weights in transit.
    """

    backend = "ipc"

    dtype: torch.dtype | None

    def init_info(self, workers: int) -> dict[str, Any]:
        return {"packed": True}

    def updates(self) -> Updates:
        digests = Digests()
        for flat, part in in_parts(on_gpu(self.read()), self.dtype):
            for named in unpacked(flat, part):
                digests.add(*named)
            yield exported(flat, part)
        self.note(receipt=digests.receipt(), receipt_s=digests.seconds)


class LocalSender(DirectSender):
    """Sender to an engine on the trainer's GPU that is driven from the trainer's process.

    Args:
        dtype: dtype of the weights in transit, ideally the engine's.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__(dtype)
        self._refused = False

    def handle(self, read: Callable[[], NamedTensors]) -> WeightHandle:
        self._direct = DirectHandle(read)
        return self._direct if self._refused else IpcStream(read, self.dtype)

    def resend(self, version: int, reason: str) -> WeightHandle:
        from torchrl import torchrl_logger  # a slow import that vLLM's workers do not need

        torchrl_logger.warning(
            f"The engine takes its weights through the host from here on: {reason}."
        )
        self._refused = True
        return self._direct


@dataclass(frozen=True)
class IpcParts(TransferHandle):
    """Weights in buffers that another process of this machine keeps on its GPU.

    Attributes:
        rendezvous: where the reader reports that it opens them.
        version: version of the weights.
        infos: update info of each buffer, from ``exported``.
    """

    backend = "ipc"

    rendezvous: Rendezvous
    version: int
    infos: Sequence[dict[str, Any]]

    @property
    def layout(self) -> Shapes:
        return [
            (name, tuple(shape))
            for info in self.infos
            for name, shape in zip(info["names"], info["shapes"], strict=True)
        ]

    def init_info(self, workers: int) -> dict[str, Any]:
        connected(self.rendezvous).set(f"read/{self.version}", "1")
        return {"packed": True}

    def updates(self) -> Updates:
        return iter(self.infos)


class IpcSender(RendezvousSender):
    """Sender of ``IpcParts`` to one engine. Until it is released, a version takes the memory of the
    whole model on the GPU.
    """

    def __init__(self, dtype: torch.dtype | None, host: str) -> None:
        super().__init__(dtype, host)
        self._infos: dict[int, list[dict[str, Any]]] = {}

    def _pack(self, weights: NamedTensors, version: int) -> IpcParts:
        self._parts[version] = list(in_parts(on_gpu(weights), self.dtype))
        self._infos[version] = [exported(flat, part) for flat, part in self._parts[version]]
        return IpcParts(self._rendezvous, version, self._infos[version])

    def release(self, version: int) -> None:
        if version not in self._parts:
            return
        # Torch keeps exported memory until a reader has opened and closed it, exactly once. For a
        # skipped version, this does the reader's part. If it were done twice, the memory would
        # never be freed.
        parts = self._parts.pop(version)
        infos = self._infos.pop(version)
        if not connected(self._rendezvous).check([f"read/{version}"]):
            for info in infos:
                # ref_counter_handle and ref_counter_offset of rebuild_cuda_tensor
                *_, counter, offset, _, _ = info["ipc_handles"]
                release_shared_memory(counter, offset)
        del parts
        torch.cuda.ipc_collect()

    def close(self) -> None:
        for version in list(self._parts):
            self.release(version)

"""Weights in the memory of the GPU that trainer and engine share. Not run yet: there was no GPU to run it on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from torchrl_grpo.compat.torch import release_shared_memory
from torchrl_grpo.weights.handle import Named, Part, PlainHandle, Reader, Sender, in_parts


@dataclass(frozen=True)
class CudaBuffers(PlainHandle):
    """Weights in buffers that another process of this machine has on this process's GPU.

    Attributes:
        parts: what lies in each buffer.
        handles: of each buffer, what CUDA needs to open it.
    """

    parts: Sequence[Part]
    handles: list[list[Any]]

    def flats(self, sizes: Sequence[tuple[int, torch.dtype]], reader: Reader) -> Iterator[Tensor]:
        device = torch.cuda.current_device()
        for (size, dtype), (offset, *handle) in zip(sizes, self.handles, strict=True):
            storage = (torch.storage.TypedStorage, dtype, device)
            try:
                yield rebuild_cuda_tensor(torch.Tensor, torch.Size([size]), (1,), offset, *storage, *handle)
            except RuntimeError as error:
                raise RuntimeError(
                    f"the weights on the GPU could not be opened through CUDA IPC ({error}): use "
                    "inference_model.weight_transfer=object_store."
                ) from error


class CudaIpcSender(Sender):
    """Sends ``CudaBuffers``; a version takes the memory of the whole model on the GPU until it is released.

    Args:
        dtype: of the weights on their way, best the engine's; None keeps their own.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._kept: dict[int, tuple[list[Tensor], list[tuple[Any, Any]]]] = {}

    def pack(self, weights: Named, version: int) -> CudaBuffers:
        on_gpu = ((name, weight.cuda()) for name, weight in weights)
        parts = list(in_parts(on_gpu, self._dtype))
        handles, counters = [], []
        for flat, _ in parts:
            _, (_, _, _, offset, _, _, _, *handle) = reduce_tensor(flat)
            handles.append([offset, *handle])
            _, _, _, _, counter, place, _, _ = handle  # as rebuild_cuda_tensor names them: ref_counter_handle, _offset
            counters.append((counter, place))
        self._kept[version] = [flat for flat, _ in parts], counters
        return CudaBuffers([part for _, part in parts], handles)

    def release(self, version: int) -> None:
        kept = self._kept.pop(version, None)
        if kept is None:
            return
        # Torch keeps memory that was shared until a reader has opened and closed it. A version that was skipped has no
        # reader, so its side is taken here; where there was one, the count goes below 0, which is as good.
        for counter in kept[1]:
            release_shared_memory(*counter)
        del kept
        torch.cuda.ipc_collect()

    def close(self) -> None:
        for version in list(self._kept):
            self.release(version)

"""Choice of a run's weight transfer, and the sender of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrl_grpo.weights.adapters import AdapterSender
from torchrl_grpo.weights.handle import DirectSender, Sender
from torchrl_grpo.weights.ipc import IpcSender, LocalSender
from torchrl_grpo.weights.nccl import NcclSender
from torchrl_grpo.weights.object_store import ObjectSender


@dataclass(frozen=True)
class Transfer:
    """A run's weight transfer.

    Attributes:
        kind: ``direct`` or ``direct_ipc`` (an engine that is driven from the trainer's process),
            ``object_store``, ``nccl`` or ``ipc``.
        workers: number of processes of all engines together.
    """

    kind: str
    workers: int = 1

    @property
    def name(self) -> str:
        """The value of ``inference_model.weight_transfer`` that selects this kind."""
        return {"nccl": "broadcast", "ipc": "cuda_ipc"}.get(self.kind, "object_store")

    @property
    def together(self) -> bool:
        """Whether all engines receive a version at the same time."""
        return self.kind == "nccl"


def transfer_kind(
    requested: str,
    *,
    on_device: bool,
    trainer: torch.device,
    engines: Sequence[Sequence[torch.device]],
    colocated: bool,
    distributed: bool = True,
    adapters: bool = False,
    waits: bool = False,
) -> Transfer:
    """Return how weights reach the engines of a run.

    Only vLLM's workers can read GPU memory, and adapters are small: otherwise the object store
    carries the weights.

    Args:
        requested: ``object_store``, ``broadcast`` (nccl), ``cuda_ipc``, or ``auto``, the fastest
            that fits.
        on_device: whether the engines can read weights in GPU memory
            (``EngineKind.weights_on_device``).
        trainer: device of training rank 0.
        engines: devices of each engine.
        colocated: whether an engine shares the trainer's accelerator.
        distributed: whether trainer and engines are processes on Ray.
        adapters: whether only LoRA adapters are sent.
        waits: whether an engine finishes its running responses before it takes new weights, while
            training continues. If so, ``auto`` does not make several engines wait for each other.

    Raises:
        ValueError: the requested kind does not work there.
    """
    field = f"inference_model.weight_transfer={requested}"
    same_gpu = trainer.type == "cuda" and all(tuple(devices) == (trainer,) for devices in engines)
    if requested == "cuda_ipc" and not same_gpu:
        separate = trainer.type == "cuda" and not colocated
        raise ValueError(
            f"{field} needs trainer and engine on one GPU, but they are on {trainer} and "
            f"{', '.join(str(device) for devices in engines for device in devices)}: use "
            f"inference_model.weight_transfer={'broadcast' if separate else 'auto'}."
        )
    if requested == "broadcast" and colocated:
        raise ValueError(
            f"{field} needs trainer and engine on different GPUs, because nccl does not connect a "
            f"GPU with itself, but both are on {trainer}: use "
            f"inference_model.weight_transfer={'cuda_ipc' if same_gpu else 'auto'}."
        )
    fast = on_device and trainer.type == "cuda"
    if not distributed:
        return Transfer("direct_ipc" if fast and same_gpu and not adapters else "direct")
    if not fast or adapters or requested == "object_store":
        return Transfer("object_store")
    if same_gpu:
        return Transfer("ipc" if len(engines) == 1 else "object_store")
    if colocated or (requested == "auto" and waits and len(engines) > 1):
        return Transfer("object_store")
    return Transfer("nccl", workers=sum(map(len, engines)))


def make_sender(
    transfer: Transfer,
    *,
    dtype: torch.dtype | None,
    adapters: bool = False,
    host: str = "127.0.0.1",
) -> Sender:
    """Make the trainer's side of a weight transfer.

    Args:
        transfer: from ``transfer_kind``.
        dtype: dtype of whole weights in transit, ideally the engine's; None keeps their own.
        adapters: whether to send only a LoRA model's adapters, instead of whole weights with the
            adapters merged.
        host: address of this machine for the others.
    """
    if adapters:
        return AdapterSender(None)
    if transfer.kind == "direct":
        return DirectSender(dtype)
    if transfer.kind == "direct_ipc":
        return LocalSender(dtype)
    if transfer.kind == "object_store":
        return ObjectSender(dtype)
    if transfer.kind == "ipc":
        return IpcSender(dtype, host)
    return NcclSender(dtype, host, transfer.workers)

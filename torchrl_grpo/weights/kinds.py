"""Choice of a run's weight transfer, and the sender of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrl_grpo.weights.adapters import AdapterSender, BaseModel
from torchrl_grpo.weights.handle import DirectSender, EitherHandle, Named, Sender, WeightHandle
from torchrl_grpo.weights.ipc import IpcSender, LocalSender
from torchrl_grpo.weights.nccl import NcclSender
from torchrl_grpo.weights.object_store import ObjectSender


@dataclass(frozen=True)
class Transfer:
    """A run's weight transfer.

    Attributes:
        kind: ``direct`` or ``direct_ipc`` (an engine that is driven from the trainer's process),
            ``object_store``, ``nccl`` or ``ipc``.
        unverified: whether the kind was not asked for by name: it must show that it works, and the
            object store, or the way through the host, takes its place if it does not.
        workers: processes of all engines together.
    """

    kind: str
    unverified: bool = False
    workers: int = 1

    @property
    def name(self) -> str:
        """The value of ``inference_model.weight_transfer`` that asks for this kind."""
        return {"nccl": "broadcast", "ipc": "cuda_ipc"}.get(self.kind, "object_store")

    @property
    def together(self) -> bool:
        """Whether all engines take a version at the same time."""
        return self.kind == "nccl"


def transfer_kind(
    asked: str,
    *,
    on_device: bool,
    trainer: torch.device,
    engines: Sequence[Sequence[torch.device]],
    colocated: bool,
    distributed: bool = True,
    lora: bool = False,
    waits: bool = False,
) -> Transfer:
    """Return how weights reach the engines of a run.

    GPU memory is reached by vLLM's workers alone, and adapters are small: else it is the object
    store.

    Args:
        asked: ``object_store``, ``broadcast`` (nccl), ``cuda_ipc``, or ``auto``: the fastest that
            fits.
        on_device: whether the engines take weights that are in GPU memory
            (``EngineKind.weights_on_device``).
        trainer: the device of training rank 0.
        engines: the devices of each engine.
        colocated: whether an engine shares the trainer's accelerator.
        distributed: whether trainer and engines are processes on Ray.
        lora: whether adapters are sent.
        waits: whether an engine takes new weights only when the responses that it samples have
            ended, while training goes on: then several engines are not made to wait for each other
            unless that is asked for.

    Raises:
        ValueError: what was asked for does not work there.
    """
    field = f"inference_model.weight_transfer={asked}"
    same_gpu = trainer.type == "cuda" and all(tuple(devices) == (trainer,) for devices in engines)
    if asked == "cuda_ipc" and not same_gpu:
        raise ValueError(
            f"{field} needs trainer and engine on one GPU, and they are on {trainer} and "
            f"{', '.join(str(device) for devices in engines for device in devices)}: use "
            f"inference_model.weight_transfer={'broadcast' if trainer.type == 'cuda' and not colocated else 'auto'}."
        )
    if asked == "broadcast" and colocated:
        raise ValueError(
            f"{field} needs trainer and engine on different GPUs, because nccl does not connect a "
            f"GPU with itself, and both are on {trainer}: use "
            f"inference_model.weight_transfer={'cuda_ipc' if same_gpu else 'auto'}."
        )
    fast = on_device and trainer.type == "cuda"
    auto, workers = asked == "auto", sum(len(devices) for devices in engines)
    if not distributed:
        return Transfer("direct_ipc", True) if fast and same_gpu else Transfer("direct")
    if not fast or lora or asked == "object_store":
        return Transfer("object_store")
    if same_gpu:
        return Transfer("ipc", auto) if len(engines) == 1 else Transfer("object_store")
    if colocated or (auto and waits and len(engines) > 1):
        return Transfer("object_store")
    return Transfer("nccl", auto, workers)


class FastSender(Sender):
    """Sends weights on a fast path, or through the object store after a refusal.

    Args:
        fast: sends them in the fast way.
        unverified: whether the first handle has both ways, for an engine to compare.
    """

    def __init__(self, fast: NcclSender | IpcSender, *, unverified: bool) -> None:
        self._fast, self._unverified = fast, unverified
        self._store = ObjectSender(None)
        self._refused = False

    def pack(self, weights: Named, version: int) -> WeightHandle:
        if self._refused:
            return ObjectSender(self._fast.dtype).pack(weights, version)
        handle = self._fast.pack(weights, version)
        if not self._unverified:
            return handle
        self._unverified = False
        return EitherHandle(self._store.pack(self._fast.kept(version), version), handle)

    def resend(self, version: int, reason: str) -> WeightHandle:
        self._refused = True
        self._fast.refuse(reason)
        return self._store.pack(self._fast.kept(version), version)

    def release(self, version: int) -> None:
        self._fast.release(version)

    def close(self) -> None:
        self._fast.close()


def make_sender(
    transfer: Transfer,
    *,
    dtype: torch.dtype | None,
    lora_base: BaseModel | None = None,
    host: str = "127.0.0.1",
) -> Sender:
    """Make the trainer's side of a weight transfer.

    Args:
        transfer: as ``transfer_kind`` gives it.
        dtype: of whole weights on their way, best the engine's; None keeps their own.
        lora_base: gives the base model of a LoRA model (see ``AdapterHandle``): then its adapters
            are sent, and each reader adds them to the base weights. None sends whole weights, with
            any adapters merged. An engine that is driven from the trainer's process needs neither.
        host: address of this machine for the others.
    """
    if transfer.kind == "direct":
        return DirectSender()
    if transfer.kind == "direct_ipc":
        return LocalSender(dtype)
    if lora_base is not None:
        return AdapterSender(ObjectSender(None), lora_base)
    if transfer.kind == "object_store":
        return ObjectSender(dtype)
    nccl = transfer.kind == "nccl"
    fast = NcclSender(dtype, host, transfer.workers) if nccl else IpcSender(dtype, host)
    return FastSender(fast, unverified=transfer.unverified)

"""Which kind of transfer a run takes, and the sender of each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchrl_grpo.weights.adapters import AdapterSender, BaseModel
from torchrl_grpo.weights.broadcast import BroadcastSender
from torchrl_grpo.weights.cuda_ipc import CudaIpcSender
from torchrl_grpo.weights.handle import DirectSender, Sender
from torchrl_grpo.weights.object_store import ObjectSender


def transfer_kind(
    asked: str, *, trainer: torch.device, engines: Sequence[Sequence[torch.device]], colocated: bool
) -> str:
    """How weights reach the engines of a distributed run: ``object_store``, ``broadcast`` or ``cuda_ipc``.

    Args:
        asked: one of these, or ``auto``: the object store, also on GPUs, until the others have run on some.
        trainer: the device of training rank 0.
        engines: the devices of each engine.
        colocated: whether an engine shares the trainer's accelerator.

    Raises:
        ValueError: what was asked for does not work there.
    """
    field = f"inference_model.weight_transfer={asked}"
    same_gpu = trainer.type == "cuda" and all(tuple(devices) == (trainer,) for devices in engines)
    if asked == "cuda_ipc" and not same_gpu:
        raise ValueError(
            f"{field} needs trainer and engine on one GPU, and they are on {trainer} and "
            f"{', '.join(str(device) for devices in engines for device in devices)}: use "
            f"inference_model.weight_transfer={'broadcast' if trainer.type == 'cuda' else 'auto'}."
        )
    if asked == "broadcast" and colocated:
        raise ValueError(
            f"{field} needs trainer and engine on different GPUs, because nccl does not connect a GPU with itself, and "
            f"both are on {trainer}: use inference_model.weight_transfer=cuda_ipc."
        )
    return "object_store" if asked == "auto" else asked


def make_sender(
    kind: str,
    *,
    dtype: torch.dtype | None,
    lora_base: BaseModel | None = None,
    backend: str = "gloo",
    host: str = "127.0.0.1",
) -> Sender:
    """The trainer's side of a weight transfer.

    Args:
        kind: ``direct`` (an engine in the trainer's process), ``object_store``, ``broadcast`` or ``cuda_ipc``.
        dtype: of whole weights on their way, best the engine's; None keeps their own.
        lora_base: gives the base model of a LoRA model (see ``AdapterHandle``): then its adapters are sent, and each
            reader adds them to the base weights. None sends whole weights, with any adapters merged. ``direct`` needs
            neither.
        backend: of ``broadcast``: ``nccl`` or ``gloo``.
        host: of ``broadcast``: the name or address of this machine for the others.
    """
    sent = None if lora_base is not None else dtype
    senders: dict[str, Callable[[], Sender]] = {
        "direct": DirectSender,
        "object_store": lambda: ObjectSender(sent),
        "broadcast": lambda: BroadcastSender(sent, backend, host),
        "cuda_ipc": lambda: CudaIpcSender(sent),
    }
    sender = senders[kind]()
    return sender if lora_base is None or kind == "direct" else AdapterSender(sender, lora_base)

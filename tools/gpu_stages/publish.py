"""Time the transfer of new weights from the trainer's device to each kind of sender, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bench_train_step import make_model

from gpu_stages.common import Stage
from torchrl_grpo.generation import TransformersEngine
from torchrl_grpo.weights import named_weights
from torchrl_grpo.weights.handle import in_parts, staged
from torchrl_grpo.weights.ipc import IpcSender
from torchrl_grpo.weights.object_store import ObjectSender

DTYPE = torch.bfloat16


def main() -> None:
    """Run the stage."""
    stage = Stage()
    model = make_model("tiny" if stage.is_rehearsal else "qwen05", "float32", device=stage.device)
    copy = make_model("tiny" if stage.is_rehearsal else "qwen05", "bfloat16", device=stage.device)
    engine = TransformersEngine(copy)
    ways: dict[str, Callable[[], Any]] = {
        "engine of this process": lambda: engine.update_weights(named_weights(model), 1),
        "object store": lambda: ObjectSender(DTYPE).pack(named_weights(model), 1),
        "to the host, then to bfloat16": lambda: [
            weight.detach().cpu().to(DTYPE) for _, weight in named_weights(model)
        ],
        "to bfloat16, then to the host": lambda: [
            weight.detach().to(DTYPE).cpu() for _, weight in named_weights(model)
        ],
        "parts on the device": lambda: [
            flat.numel() for flat, _ in in_parts(named_weights(model), DTYPE)
        ],
    }
    if not stage.is_rehearsal:
        ways |= {
            "parts to pinned memory": lambda: [
                staged(flat) for flat, _ in in_parts(named_weights(model), DTYPE)
            ],
            "CUDA IPC": lambda: send_by_ipc(model),
        }
    gigabytes = sum(weight.numel() for _, weight in named_weights(model)) * DTYPE.itemsize / 1e9
    for name, way in ways.items():
        with stage.part(name) as figures:
            figures["s"] = stage.seconds(way, 3)
            figures["GB/s"] = gigabytes / figures["s"]
    stage.end()


def send_by_ipc(model: torch.nn.Module) -> None:
    """Publish a version for another process on this machine, and free it."""
    sender = IpcSender(DTYPE, "127.0.0.1")
    sender.pack(named_weights(model), 1)
    sender.release(1)
    sender.close()


if __name__ == "__main__":
    main()

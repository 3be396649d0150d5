"""Record the machine's hardware, and how fast it copies and multiplies."""

from __future__ import annotations

import inspect
import subprocess
from functools import partial
from importlib import import_module
from importlib.metadata import version

import torch
from accelerator import card

from gpu_stages.common import Stage

PACKAGES = ("torch", "transformers", "torchrl", "tensordict", "peft", "torchao", "datasets", "trl")
OPTIONAL = ("vllm", "ray", "trl")
MODULES = ("scripts", "assembly.run", "learner.step", "generation", "weights.kinds", "models.head")


def main() -> None:
    """Run the stage."""
    stage = Stage()
    with stage.part("versions") as figures:
        figures |= card(stage.device)
        for package in PACKAGES + OPTIONAL:
            try:
                figures[package] = version(package)
            except ImportError:
                figures[package] = None
        if not stage.is_rehearsal:
            query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"]
            figures["nvidia_smi"] = subprocess.check_output(query, text=True)
    with stage.part("imports"):
        for module in MODULES:
            import_module(f"torchrl_grpo.{module}")
    with stage.part("varlen_attention") as figures:
        varlen = import_module("torch.nn.attention.varlen")
        figures["signature"] = str(inspect.signature(varlen.varlen_attn))
    with stage.part("copies") as figures:
        measure_copies(stage, figures)
    with stage.part("products") as figures:
        size = 256 if stage.is_rehearsal else 8192
        for dtype in (torch.float32, torch.bfloat16):
            left, right = torch.randn(2, size, size, device=stage.device, dtype=dtype)
            seconds = stage.seconds(partial(torch.matmul, left, right))
            figures[f"{dtype} TFLOP/s"] = 2 * size**3 / seconds / 1e12
    stage.end()


def measure_copies(stage: Stage, figures: dict[str, float]) -> None:
    """Copy float32 between host and device, from pinned and pageable memory, and to bfloat16 on
    either side.
    """
    number = 2**20 if stage.is_rehearsal else 2**28
    on_device, pageable = torch.randn(number, device=stage.device), torch.randn(number)
    pinned = pageable if stage.is_rehearsal else torch.empty(number, pin_memory=True)
    half = torch.empty(number, dtype=torch.bfloat16, pin_memory=not stage.is_rehearsal)
    ways = {
        "to the device, pageable": lambda: on_device.copy_(pageable),
        "to the device, pinned": lambda: on_device.copy_(pinned, non_blocking=True),
        "to the host, pageable": lambda: pageable.copy_(on_device),
        "to the host, pinned": lambda: pinned.copy_(on_device, non_blocking=True),
        "to the host, then to bfloat16": lambda: on_device.cpu().bfloat16(),
        "to bfloat16, then to the host": lambda: on_device.bfloat16().cpu(),
        "to bfloat16, then to pinned": lambda: half.copy_(on_device.bfloat16(), non_blocking=True),
    }
    for name, copy in ways.items():
        figures[f"{name}, GB/s of float32"] = 4 * number / stage.seconds(copy, 3) / 1e9


if __name__ == "__main__":
    main()

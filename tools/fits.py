"""Compute the table of docs/devices.md: which models fit on how many GPUs of 80 GB, and with which
options.

    python tools/fits.py

It uses the simulation of ``python -m torchrl_grpo plan``: with two or more GPUs for the fastest
split; if there is none, and with one GPU, for whether the roles fit in turn.
"""

from __future__ import annotations

from contextlib import suppress

from torchrl_grpo.config import ConfigError, compose
from torchrl_grpo.extras.plan.command import parse, settings_of
from torchrl_grpo.extras.plan.splits import best_splits

MODELS = {
    "0.5B": "Qwen/Qwen2.5-0.5B", "1.5B": "Qwen/Qwen2.5-1.5B", "3B": "Qwen/Qwen2.5-3B", "7B": "Qwen/Qwen2.5-7B",
    "14B": "Qwen/Qwen2.5-14B", "32B": "Qwen/Qwen2.5-32B", "30B-A3B": "Qwen/Qwen3-30B-A3B",
}  # fmt: skip
DEVICES = (1, 2, 4, 8)
SIZES = (1, 2, 4)
JOB = (
    "inference_model.backend=vllm",
    "inference_model.dtype=bfloat16",
    "ref_model.dtype=bfloat16",
    "train.mixed_precision=bf16",
    "train_model.gradient_checkpointing=true",
    "inference_model.max_new_tokens=1024",
    "env.num_envs=64",
    "env.repeats=8",
)
WAYS = {
    "yes": (),
    "8-bit": (
        "train_model.dtype=bfloat16",
        "train.mixed_precision=full",
        "optimizer.name=adamw_8bit",
    ),
    "offload": ("train_model.cpu_offload=true",),
    "LoRA": (
        "train_model.lora.enabled=true",
        "train_model.dtype=bfloat16",
        "train.mixed_precision=full",
    ),
}
"""Additional options of the job; the first that fit are used."""


def answer(model: str, devices: int) -> str:
    """Return how a model fits on this number of devices."""
    for way, options in WAYS.items():
        for turns in (False, True):
            for size in SIZES:
                overrides = [
                    *JOB,
                    *options,
                    f"model.name={model}",
                    f"inference_model.tensor_parallel_size={size}",
                ]
                overrides += ["ref_model.sharded=true"] if turns and devices > 1 else []
                settings = settings_of(
                    compose("grpo_gsm8k", overrides), parse(["--prompt-tokens=256"])
                )
                parts = [way, *([f"TP {size}"] if size > 1 else [])]
                if turns and settings.in_turns(devices) is not None:
                    return ", ".join([*parts, *(["turns"] if devices > 1 else [])])
                if not turns and devices > 1:
                    with suppress(ConfigError):
                        split = best_splits(settings, devices)[0].split
                        return f"{', '.join(parts)} ({split.train}+{split.reference}+{split.inference})"
    return "no"


def main() -> None:
    """Print the table."""
    print(
        f"| model | {' | '.join(f'{devices} GPU' + 's' * (devices > 1) for devices in DEVICES)} |"
    )
    print(f"|{'---|' * (1 + len(DEVICES))}")
    for name, model in MODELS.items():
        print(
            f"| {name} | {' | '.join(answer(model, devices) for devices in DEVICES)} |", flush=True
        )


if __name__ == "__main__":
    main()

"""Which models fit on how many GPUs of 80 GB, and with which options: the table of docs/devices.md, computed.

    python tools/fits.py

From two GPUs on it asks what ``python -m torchrl_grpo.plan`` asks; on one, where the roles take turns, it counts with
the same model of memory: a training step beside the reference model, and an engine beside what rests between two steps.
"""

from __future__ import annotations

from torchrl_grpo.advice.plan.splits import Settings, best_splits
from torchrl_grpo.config import ConfigError, compose
from torchrl_grpo.scripts.plan import parse, settings_of

MODELS = {
    "0.5B": "Qwen/Qwen2.5-0.5B", "1.5B": "Qwen/Qwen2.5-1.5B", "3B": "Qwen/Qwen2.5-3B", "7B": "Qwen/Qwen2.5-7B",
    "14B": "Qwen/Qwen2.5-14B", "32B": "Qwen/Qwen2.5-32B", "30B-A3B": "Qwen/Qwen3-30B-A3B",
}  # fmt: skip
DEVICES = (1, 2, 4, 8)
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
    "offload": ("train_model.cpu_offload=true",),
    "LoRA": ("train_model.lora.enabled=true", "train_model.dtype=bfloat16", "train.mixed_precision=full"),
}
"""Options that the job has besides, the first ones that fit being taken."""


def on_one(settings: Settings) -> bool:
    """Whether the roles fit on one device together, taking turns."""
    work = settings.work
    train, reference = work.train_memory(1), work.reference_memory()
    engine = work.weight_bytes + work.group_memory()  # a group at a time at least
    return reference + max(train.peak, train.resting + engine) <= settings.room


def answer(model: str, devices: int) -> str:
    """Return how a model fits on so many devices."""
    for way, options in WAYS.items():
        for size in (1, 2, 4):
            overrides = [*JOB, *options, f"model.name={model}", f"inference_model.tensor_parallel_size={size}"]
            settings = settings_of(compose("grpo_gsm8k", overrides), parse(["--prompt-tokens=256"]))
            try:
                if devices == 1 and (size > 1 or not on_one(settings)):
                    continue
                split = best_splits(settings, devices)[0].split if devices > 1 else None
            except ConfigError:
                continue
            parts = [way, *([f"TP {size}"] if size > 1 else [])]
            return ", ".join(parts) + ("" if split is None else f" ({split.train}+{split.reference}+{split.inference})")
    return "no"


def main() -> None:
    """Prints the table."""
    print(f"| model | {' | '.join(f'{devices} GPU' + 's' * (devices > 1) for devices in DEVICES)} |")
    print(f"|{'---|' * (1 + len(DEVICES))}")
    for name, model in MODELS.items():
        print(f"| {name} | {' | '.join(answer(model, devices) for devices in DEVICES)} |", flush=True)


if __name__ == "__main__":
    main()

"""Compare the memory that each option saves in a training step with the figure in the error message
of a full device.

    python benchmarks/bench_memory.py                    # about 3 minutes on 2 idle cores
    python benchmarks/bench_memory.py --models 8M --only train.mixed_precision=bf16

A step has forward, loss, backward and AdamW, of a random float32 model (the shape of the starter,
or 8 million parameters in 6 layers of width 256), with 2 groups of 8, prompts and responses of 64:
1,152 tokens. With each option, model, optimizer and two steps are made twice, so that one-time
compilation and caches do not count. Reported are the process's peak growth the second time, and the
median CPU time of a step. The allocator is set to return freed memory at once: with glibc's
defaults the process keeps fragments that no option can predict.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import bench_train_step as train_step
import shapes
import torch
from bench_growth import BASE, make_batch
from machine import merge

from torchrl_grpo.extras.hints.memory import savings
from torchrl_grpo.learner.optimizer import make_optimizer
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models import loading
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives.grpo import GRPOLoss

PACKAGES = ("torch", "transformers", "torchrl", "torchao", "peft")
MODELS = {
    "starter": {
        "vocab_size": 261,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
    },
    "8M": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
    },
}
HEADS = {"starter": 4, "8M": 8}
SIZE = BASE | {"response": 64}
TOKENS = SIZE["groups"] * (SIZE["prompt"] + SIZE["group"] * SIZE["response"])
STEPS = 2
SINGLE = (
    f"train.micro_batch_tokens={TOKENS // 2}",
    f"train.micro_batch_tokens={TOKENS // 8}",
    "train_model.gradient_checkpointing=true",
    "train.mixed_precision=bf16",
    "train_model.lora.enabled=true",
    "optimizer.name=adamw_8bit",
)
# The last two save what parameters take: they are measured where activations take less, too.
PAIRS = tuple((SINGLE[1], name) for name in SINGLE[-2:])
KNOBS: dict[str, tuple[str, ...]] = {
    " ".join(knobs): knobs for knobs in (*((name,) for name in SINGLE), *PAIRS)
}
KNOBS = {"none": ()} | KNOBS | {"all of them": SINGLE}
MMAP_THRESHOLD = -3  # of mallopt
LARGE = 8192


def make_trainer(name: str, knobs: dict[str, str]) -> PolicyTrainer:
    """Return a trainer with these options of the config."""
    model: Any = train_step.make_model(name, "float32")
    if "train_model.lora.enabled" in knobs:
        model = loading.add_lora(model, r=16, alpha=32, target_modules="all-linear")
    if "train_model.gradient_checkpointing" in knobs:
        loading.enable_gradient_checkpointing(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = knobs.get("optimizer.name", "adamw")
    return PolicyTrainer(
        GRPOLoss(TokenScorer(model)),
        model,
        make_optimizer(trained, optimizer, lr=1e-6),
        optim_batch_size=SIZE["groups"] * SIZE["group"],
        micro_batch_tokens=int(knobs.get("train.micro_batch_tokens", TOKENS)),
        autocast_dtype=torch.bfloat16 if "train.mixed_precision" in knobs else None,
    )


def measure(name: str, names: tuple[str, ...], libc: ctypes.CDLL) -> dict[str, float]:
    """Return the process's peak growth in MiB with some options, the seconds of a step, and the MiB
    that the last option saves according to the message of a step with the others.
    """
    knobs = dict(knob.split("=") for knob in names)
    batch = train_step.ragged(make_batch(SIZE | {"vocabulary": MODELS[name]["vocab_size"]}), (1,))
    for _ in range(2):
        gc.collect()
        libc.malloc_trim(0)
        before, seconds = train_step.peak_mib(reset=True), []
        trainer = make_trainer(name, knobs)
        for _ in range(STEPS):
            start = time.process_time()
            trainer.train_step(batch)
            seconds.append(time.process_time() - start)
        figures = {"mib": train_step.peak_mib() - before, "cpu_s": statistics.median(seconds)}
        del trainer
    trainer = make_trainer(name, dict(knob.split("=") for knob in names[:-1]))
    trainer.train_step(batch)
    predicted = savings(loading.shape_of(trainer.model), trainer.setup())
    return figures | (
        {"said_mib": predicted[names[-1]] / 2**20} if names and names[-1] in predicted else {}
    )


def main() -> None:
    """Measure each option, print its figures and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", choices=MODELS, nargs="*", default=list(MODELS))
    parser.add_argument("--only", choices=KNOBS, nargs="*", default=list(KNOBS))
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).with_name("results") / "memory.json"
    )
    args = parser.parse_args()
    shapes.MODELS |= MODELS
    train_step.HEADS |= HEADS
    torch.set_num_threads(1)
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(MMAP_THRESHOLD, LARGE)
    for name in args.models:
        for knobs in args.only:
            figures = measure(name, KNOBS[knobs], libc)
            print(name, knobs, figures, flush=True)
            allocator = f"glibc's, which gives blocks of {LARGE} bytes and more back at once"
            merge({"allocator": allocator, f"{name} {knobs}": figures}, PACKAGES, args.output)


if __name__ == "__main__":
    main()

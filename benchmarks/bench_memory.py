"""What each knob saves of a training step's memory, measured, beside what the error message of a full device says.

    python benchmarks/bench_memory.py                    # about 3 minutes on 2 idle cores
    python benchmarks/bench_memory.py --only none train.mixed_precision=bf16

A step is that of a run: forward, loss, backward and AdamW, of a random float32 model of 8 million parameters (6 layers
of 256 numbers a token), with 2 groups of 8, prompts and responses of 64: 1,152 tokens. A knob is a process of its own,
which makes model, optimizer and two steps twice: what is compiled and cached the first time is not counted. Reported is
how much the process grows the second time, at most, and the median CPU time of a step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bench_train_step as train_step
import torch
from bench_growth import BASE, make_batch
from machine import merge

from torchrl_grpo.learner.optimizer import make_optimizer
from torchrl_grpo.learner.step import GRPOTrainer
from torchrl_grpo.models import loading
from torchrl_grpo.models.memory import savings, step_memory
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives.grpo import GRPOLoss

PACKAGES = ("torch", "transformers", "torchrl", "torchao", "peft")
MODEL = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
SIZE = BASE | {"response": 64, "vocabulary": MODEL["vocab_size"]}
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
KNOBS: dict[str, tuple[str, ...]] = {" ".join(knobs): knobs for knobs in (*((name,) for name in SINGLE), *PAIRS)}
KNOBS = {"none": ()} | KNOBS | {"all of them": SINGLE}


def make_trainer(knobs: dict[str, str]) -> GRPOTrainer:
    """A trainer with these options of the config."""
    train_step.MODELS["memory"], train_step.HEADS["memory"] = MODEL, 8
    model: Any = train_step.make_model("memory", "float32")
    if "train_model.lora.enabled" in knobs:
        model = loading.add_lora(model, r=16, alpha=32, target_modules="all-linear")
    if "train_model.gradient_checkpointing" in knobs:
        loading.enable_gradient_checkpointing(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    name: Any = knobs.get("optimizer.name", "adamw")
    return GRPOTrainer(
        GRPOLoss(TokenScorer(model)),
        model,
        make_optimizer(trained, name, lr=1e-6),
        optim_batch_size=SIZE["groups"] * SIZE["group"],
        micro_batch_tokens=int(knobs.get("train.micro_batch_tokens", TOKENS)),
        autocast_dtype=torch.bfloat16 if "train.mixed_precision" in knobs else None,
    )


def work(name: str, pipe: Connection) -> None:
    """A knob's process: MiB that it grows by at most, seconds of a step, and MiB that the message says of the knob."""
    knobs = dict(knob.split("=") for knob in KNOBS[name])
    trim = ctypes.CDLL("libc.so.6").malloc_trim
    torch.set_num_threads(1)
    batch = train_step.ragged(make_batch(SIZE), (1,))
    for _ in range(2):
        gc.collect()
        trim(0)
        before, seconds = train_step.peak_mib(reset=True), []
        trainer = make_trainer(knobs)
        for _ in range(STEPS):
            start = time.process_time()
            trainer.train_step(batch)
            seconds.append(time.process_time() - start)
        figures = {"mib": train_step.peak_mib() - before, "cpu_s": statistics.median(seconds)}
        del trainer
    trainer = make_trainer({})
    memory = step_memory(trainer.model, trainer.parameters, TOKENS, 4)
    off = {"checkpoints": False, "lora": False, "small_states": False}
    said = savings(memory, TOKENS, **off, full_precision=True, ranks=1)
    pipe.send(figures | ({"said_mib": said[name] / 2**20} if name in said else {}))


def measure(name: str) -> dict[str, float]:
    """The figures of a knob, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=work, args=(name, theirs), daemon=True)
    process.start()
    theirs.close()
    figures: dict[str, float] = pipe.recv()
    process.join()
    return figures


def main() -> None:
    """Measures each knob, prints its figures and keeps them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=KNOBS, nargs="*", default=list(KNOBS))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results") / "memory.json")
    args = parser.parse_args()
    for name in args.only:
        figures = measure(name)
        print(name, figures, flush=True)
        merge({name: figures}, PACKAGES, args.output)


if __name__ == "__main__":
    main()

"""Measure the growth of costs: of a training step with each of its sizes, of a group with their
number, of the driver with its samplers.

    python benchmarks/bench_growth.py                             # about 8 minutes on 2 idle cores
    python benchmarks/bench_growth.py --only response buffer

The training step is that of bench_train_step.py (forward, loss, backward) on a random float32 model
of width 128 with 2 layers, in CPU seconds of one thread. One size grows, the others stay at 2
groups of 8, prompts of 64, responses of 128, a vocabulary of 4,096 and 16,384 tokens per
micro-batch; with growing prompts or responses there is 1 group of 4. ``buffer`` and ``queue`` are
the bookkeeping of ``GroupBuffer`` and ``TaskQueue``: for a run of this many groups through a buffer
of 128 slots (``run``), and for a buffer with a slot for each of them (``held``). ``driver`` is a
real ``Rollouts`` on Ray with real samplers and sleeping engines: CPU seconds and memory of the
driver's process. bench_weight_sync.py covers weight syncs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import bench_train_step as train_step
import psutil
import shapes
import torch
from machine import report, surroundings
from torch import Tensor
from transformers import AutoTokenizer

from torchrl_grpo.collectors import RolloutCollector, Sampler
from torchrl_grpo.collectors.sampler import GroupReport, RolloutReport
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import Completion, Engine, OnFinished, SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.images import Prompt
from torchrl_grpo.runtime.staleness import GroupBuffer
from torchrl_grpo.runtime.tasks import TaskQueue
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks import ArithmeticTask
from torchrl_grpo.tasks.drawing import Drawing

PACKAGES = ("torch", "transformers", "tensordict", "torchrl", "ray")
LAYERS = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
BASE = {
    "groups": 2,
    "group": 8,
    "prompt": 64,
    "response": 128,
    "vocabulary": 4096,
    "micro_batch": 16_384,
}
LONG = {"groups": 1, "group": 4}
SWEEPS: dict[str, tuple[Sequence[int], dict[str, int]]] = {
    "response": ((128, 256, 512, 1024, 2048, 4096), LONG),
    "prompt": ((64, 256, 1024, 2048, 4096), LONG),
    "group": ((2, 4, 8, 16, 32, 64), {}),
    "vocabulary": ((1024, 4096, 16_384, 65_536, 152_064), {}),
    "micro_batch": ((512, 1024, 2048, 4096, 8192, 16_384), {"groups": 8, "group": 16}),
}
"""The values of each size, and the differences from BASE."""
COUNTS = (1_000, 10_000, 100_000)
SAMPLERS = (1, 2, 4, 8)
DRIVER_STEPS, WARM_UP = 60, 5
TASK, REPEATS = 2, 4  # groups in a task of the driver's, rows in a group


def make_batch(size: dict[str, int]) -> dict[str, Tensor]:
    """Return a group of full responses: tokens, mask, behavior log-probs and advantages."""
    torch.manual_seed(1)
    rows = size["groups"] * size["group"]
    prompts = torch.randint(
        2, size["vocabulary"], (size["groups"], size["prompt"])
    ).repeat_interleave(size["group"], 0)
    responses = torch.randint(2, size["vocabulary"], (rows, size["response"]))
    mask = torch.ones_like(responses, dtype=torch.bool)
    log_probs = torch.full(responses.shape, -float(torch.tensor(size["vocabulary"]).log()))
    advantage = torch.randn(rows)
    return {
        "tokens": torch.cat([prompts, responses], 1),
        "mask": mask,
        "log_probs": log_probs,
        "advantage": advantage,
    }


def work(name: str, repeats: int, pipe: Connection) -> None:
    """Run a sweep in this process: for each value, send the seconds, and the growth of the peak
    memory over the resident memory before the step.
    """
    values, changed = SWEEPS[name]
    trim = ctypes.CDLL("libc.so.6").malloc_trim
    torch.set_num_threads(1)
    for value in values:
        size = BASE | changed | {name: value}
        shapes.MODELS["growth"] = LAYERS | {"vocab_size": size["vocabulary"]}
        train_step.HEADS["growth"] = 4
        model, batch = train_step.make_model("growth", "float32"), make_batch(size)
        step = train_step.use_ours(model, batch, "", micro_batch_tokens=size["micro_batch"])
        gc.collect()
        trim(0)
        before, seconds = train_step.peak_mib(reset=True), []
        for _ in range(repeats + 1):
            start = time.process_time()
            step()
            model.zero_grad()
            seconds.append(time.process_time() - start)
        tokens = size["groups"] * (size["prompt"] + size["group"] * size["response"])
        row = {
            "tokens": tokens,
            "cpu_s": statistics.median(seconds[1:]),
            "mib": train_step.peak_mib() - before,
        }
        pipe.send({name: value} | row | {"us_per_token": 1e6 * row["cpu_s"] / tokens})
    pipe.send(None)


def sweep(name: str, repeats: int) -> list[dict[str, float]]:
    """Return the rows of one size, measured in a separate process."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=work, args=(name, repeats, theirs), daemon=True)
    process.start()
    theirs.close()
    rows = list(iter(pipe.recv, None))
    process.join()
    return rows


def pass_through(count: int, groups_per_batch: int, max_staleness: int) -> Callable[[], None]:
    """Pass this many groups through a ``GroupBuffer``, calling ``take`` after each of them as
    ``Rollouts`` does.
    """

    def go() -> None:
        buffer, drawn = GroupBuffer(groups_per_batch, max_staleness), 0
        while drawn < count:
            first, drawn = drawn, drawn + buffer.room
            for group in range(first, drawn):
                buffer.admit(group)
            for group in range(first, drawn):
                buffer.finish(group, buffer.version, None)
                if buffer.take() is not None:
                    buffer.publish(buffer.version + 1)

    return go


def queue_through(
    drawing: Drawing, count: int, groups_per_batch: int, max_staleness: int
) -> Callable[[], None]:
    """Do the same with a ``TaskQueue`` of tasks of one group each."""

    def go() -> None:
        buffer = GroupBuffer(groups_per_batch, max_staleness)
        queue = TaskQueue(drawing, buffer, task_groups=1, total_groups=count, group_size=8)
        done = 0
        while done < count:
            tasks = list(iter(queue.next_unplayed, None))
            for progress in tasks:
                assert progress is not None
                [group] = progress.task.groups
                report = RolloutReport((GroupReport(group, buffer.version),), 0.0, 0.0, None)
                queue.played(progress, report, [None])
                queue.finish(progress)
                if queue.take() is not None:
                    buffer.publish(buffer.version + 1)
            done += len(tasks)

    return go


def bookkeeping(kind: str) -> list[dict[str, float]]:
    """Return microseconds per group, for runs of this many groups and for buffers of that size."""
    rows = []
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    for count in COUNTS:
        row: dict[str, float] = {"groups": count}
        for name, batch in (("run", 64), ("held", count // 2)):
            if kind == "queue":
                env = LLMEnv(ArithmeticTask(2), tokenizer, num_envs=8, repeats=8)
                go = queue_through(env.drawing, count, batch, 1)
            else:
                go = pass_through(count, batch, 1)
            start = time.process_time()
            go()
            row[f"{name}_us_per_group"] = 1e6 * (time.process_time() - start) / count
        rows.append(row)
    return rows


class SleepingEngine(Engine):
    """Answers with one token after a pause."""

    def generate(
        self,
        prompts: Sequence[Tensor | Prompt],
        n: int,
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        time.sleep(0.02)
        return [
            [Completion(torch.tensor([5]), torch.zeros(1), "length") for _ in range(n)]
            for _ in prompts
        ]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.policy_version = version


def make_sampler() -> Sampler:
    """Return a sampler without a model, in its own process."""
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    engine, params = SleepingEngine(), SamplingParams(1)
    env = LLMEnv(ArithmeticTask(2), tokenizer, num_envs=TASK * REPEATS, repeats=REPEATS)

    def make_collector(groups: int) -> RolloutCollector:
        return RolloutCollector(env.with_rows(groups * REPEATS), GenerationPolicy(engine, params))

    return Sampler(engine, make_collector, None, groups_at_a_time=TASK)


def driver() -> list[dict[str, float]]:
    """Return the driver's CPU milliseconds per group and memory, for each number of samplers."""
    import ray

    from torchrl_grpo.runtime import cluster
    from torchrl_grpo.runtime.actors import make_seeded
    from torchrl_grpo.runtime.rollouts import Rollouts
    from torchrl_grpo.runtime.thread_driver import ThreadDriver
    from torchrl_grpo.runtime.workers import RayWorker
    from torchrl_grpo.weights import ObjectSender

    started, rows = cluster.start(), []
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    sender = ObjectSender(None)
    try:
        for samplers in SAMPLERS:
            groups = TASK * samplers  # in a batch
            env = LLMEnv(ArithmeticTask(2), tokenizer, num_envs=TASK * REPEATS, repeats=REPEATS)
            buffer = GroupBuffer(groups, 1)
            tasks = TaskQueue(
                env.drawing, buffer, task_groups=TASK, total_groups=10**9, group_size=REPEATS
            )
            places = [
                RayWorker(
                    f"sampler {index}",
                    partial(make_seeded, make_sampler, index),
                    {"num_cpus": 0},
                    1800.0,
                )
                for index in range(samplers)
            ]
            source = Rollouts(tasks, ThreadDriver(), samplers=places)
            source.start()
            source.wait_until_ready()
            publish = partial(
                lambda source, v: source.publish(
                    ray.put(sender.pack([("w", torch.zeros(1))], v)), v
                ),
                source,
            )
            publish(0)
            for version in range(1, DRIVER_STEPS + WARM_UP + 1):
                if version == WARM_UP + 1:
                    spent, at = time.process_time(), time.perf_counter()
                source.next_batch()
                publish(version)
            spent, seconds = time.process_time() - spent, time.perf_counter() - at
            row = {
                "samplers": samplers,
                "groups": groups * DRIVER_STEPS,
                "groups_per_s": groups * DRIVER_STEPS / seconds,
            }
            row |= {
                "cpu_ms_per_group": 1e3 * spent / row["groups"],
                "mib": psutil.Process().memory_info().rss / 2**20,
            }
            rows.append(row)
            source.close()
    finally:
        started.shutdown()
    return rows


def show(name: str, rows: Sequence[dict[str, float]]) -> None:
    """Print a table."""
    lines = ["".join(f"{column:>20}" for column in rows[0])]
    for row in rows:
        lines.append(
            "".join(
                f"{value:>20,}" if isinstance(value, int) else f"{value:20.4g}"
                for value in row.values()
            )
        )
    sys.stderr.write("\n".join([name, *lines, ""]) + "\n")
    sys.stderr.flush()


def main() -> None:
    """Measure, and print tables and JSON."""
    parts: dict[str, Callable[[], list[dict[str, float]]]] = {
        "buffer": partial(bookkeeping, "buffer"),
        "queue": partial(bookkeeping, "queue"),
        "driver": driver,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*SWEEPS, *parts], default=[*SWEEPS, *parts])
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed steps of each size, after a warm-up step"
    )
    parser.add_argument("--out", type=Path, help="file for the JSON, besides standard output")
    args = parser.parse_args()
    results = {}
    for name in args.only:
        results[name] = sweep(name, args.repeats) if name in SWEEPS else parts[name]()
        show(name, results[name])
    setting = {"base": BASE, "layers": LAYERS, "repeats": args.repeats}
    report(surroundings(PACKAGES) | {"setting": setting, "results": results}, args.out)


if __name__ == "__main__":
    main()

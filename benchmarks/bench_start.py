"""Measure the time from a command to its first step: wall and CPU seconds, and the longest silence.

    python benchmarks/bench_start.py
    python benchmarks/bench_start.py --only job help --repeats 5

Prints JSON. Each command runs until its first step, or to its end, in turn with the others. `cpu_s`
is user and system time of the command's process, without its actors.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from machine import report, surroundings

SCRIPTS = Path(__file__).resolve().parents[1] / "sota" / "grpo"
COMMANDS = {
    "help": ("grpo.py", "--help"),
    "misspelled key": ("grpo.py", "env.num_env=3"),
    "wrong type": ("grpo.py", "optimizer.lr=abc"),
    "contradiction": ("grpo.py", "train.max_staleness=1"),
    "default job": ("grpo.py", "--config-name", "grpo_arithmetic"),
    "asynchronous": ("grpo-async.py", "--config-name", "grpo_arithmetic"),
}


def run(script: str, *arguments: str) -> dict[str, float]:
    """Return seconds until the first line and until the end or the first step, the longest silence,
    and CPU seconds.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-u", str(SCRIPTS / script), *arguments],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        assert process.stdout is not None
        line_times = [start]
        for line in process.stdout:
            line_times.append(time.perf_counter())
            if line.startswith("step 1:"):
                break
        took = time.perf_counter() - start
        process.kill() if script == "grpo.py" else process.terminate()
        process.stdout.read()
        process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    silences = [later - earlier for earlier, later in pairwise(line_times)]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "first_line_s": silences[0],
        "done_s": took,
        "longest_silence_s": max(silences),
        "cpu_s": cpu,
    }


def main() -> None:
    """Run the commands in turn and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[""], help="commands with a name that contains one of these"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the JSON, besides standard output")
    args = parser.parse_args()
    chosen = [name for name in COMMANDS if any(part in name for part in args.only)]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for _ in range(args.repeats):
        for name in chosen:
            runs[name].append(run(*COMMANDS[name]))
    medians = {
        name: {key: round(statistics.median(one[key] for one in found), 2) for key in found[0]}
        for name, found in runs.items()
    }
    result = surroundings(("torch", "torchrl", "transformers", "ray")) | {
        "medians": medians,
        "runs": runs,
    }
    report(result, args.out)


if __name__ == "__main__":
    main()

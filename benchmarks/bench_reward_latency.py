"""Time a step with a reward that takes half a second per response, in both scripts, with and
without workers.

    python benchmarks/bench_reward_latency.py
    python benchmarks/bench_reward_latency.py --steps 20 --only workers

The reward is an ``async def`` that sleeps, like the call of a server, or an ordinary function that
sleeps. Without reward workers a batch is scored when it is complete; with them each response is
scored as soon as it is finished. ``grpo-async.py`` samples and trains meanwhile. It needs Ray and
takes about 8 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import surroundings

from torchrl_grpo.host.files import read_jsonl

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "tensordict", "torchrl", "ray")
LATENCY_S = 0.5
WARM_UP = 2  # steps
CASES = {
    "no workers, async def": ("asleep", 0, 1),
    "4 workers, async def": ("asleep", 4, 1),
    "4 workers, async def, staleness 3": ("asleep", 4, 3),
    "16 workers, def": ("sleep", 16, 1),
}
"""For each case the reward, its workers, and the staleness bound of ``grpo-async.py``."""


async def asleep(response: str, answer: str) -> float:
    """Return the reward after half a second, without blocking."""
    await asyncio.sleep(LATENCY_S)
    return float(response.strip().endswith(f"#### {answer}"))


def sleep(response: str, answer: str) -> float:
    """Return the reward after half a second, blocking the worker."""
    time.sleep(LATENCY_S)
    return float(response.strip().endswith(f"#### {answer}"))


def measure(script: str, reward: str, workers: int, staleness: int, steps: int) -> dict[str, Any]:
    """Return the seconds of the steps of one run, 64 responses each."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "env.num_envs=64",
            f"env.reward={Path(__file__).resolve()}:{reward}",
            f"env.reward_workers={workers}",
            f"train.total_dialog_turns={64 * (steps + WARM_UP)}",
            "train.checkpoint_frequency=0",
            "evaluation.num_prompts=0",
            "logging.tensorboard=false",
            f"hydra.run.dir={folder}",
        ]
        if script == "grpo-async.py":
            overrides.append(f"train.max_staleness={staleness}")
        command = [
            sys.executable,
            str(ROOT / "sota" / "grpo" / script),
            "--config-name",
            "grpo_arithmetic",
            *overrides,
        ]
        subprocess.run(
            command, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        rows = [row for row in read_jsonl(Path(folder) / "metrics.jsonl") if "time/step_s" in row][
            WARM_UP:
        ]
    seconds = sorted(row["time/step_s"] for row in rows)
    return {
        "step_s": statistics.median(seconds),
        "step_s_quartiles": [seconds[len(seconds) // 4], seconds[3 * len(seconds) // 4]],
        "steps": len(seconds),
        "staleness_max": max(row["staleness/max"] for row in rows),
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description="Time steps with a slow reward.")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each run")
    parser.add_argument("--only", default="", help="cases with a name that contains this")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "latency_s": LATENCY_S,
        "surroundings": surroundings(PACKAGES),
        "cases": {},
    }
    for name, (reward, workers, staleness) in CASES.items():
        if args.only in name:
            case = {
                s: measure(f"{s}.py", reward, workers, staleness, args.steps)
                for s in ("grpo", "grpo-async")
            }
            case["ratio"] = case["grpo"]["step_s"] / case["grpo-async"]["step_s"]
            results["cases"][name] = case
            print(name, json.dumps(case), flush=True)
    if args.output:
        args.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

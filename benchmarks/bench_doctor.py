"""Compare the seconds, disk and memory that a dry run predicts with those that the run takes.

python benchmarks/bench_doctor.py
python benchmarks/bench_doctor.py --only lora workers

Prints JSON. For each configuration, the dry run and then the run are separate processes. Seconds
are those until their end, memory is the sum of the peaks of all their processes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from machine import report, surroundings

SCRIPTS = Path(__file__).resolve().parents[1] / "sota" / "grpo"
UNITS = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
RUNS = {
    "default": ("grpo.py",),
    "lora": (
        "grpo.py",
        "train_model.lora.enabled=true",
        "optimizer.lr=1e-3",
        "train.total_dialog_turns=5120",
    ),
    "several steps a batch": (
        "grpo.py",
        "algo=dapo",
        "train.optim_batch_size=32",
        "train.total_dialog_turns=5120",
    ),
    "workers": (
        "grpo.py",
        "env.reward_workers=2",
        "train.total_dialog_turns=5120",
        "evaluation.frequency=0",
    ),
    "asynchronous": ("grpo-async.py", "train.total_dialog_turns=5120"),
    "no evaluation": (
        "grpo.py",
        "env.num_envs=256",
        "train.checkpoint_frequency=5",
        "evaluation.num_prompts=0",
    ),
}


def watched(*command: str, folder: Path) -> tuple[str, float, int]:
    """Return a command's output, its seconds, and the sum of its processes' peaks in bytes."""
    peaks: dict[tuple[int, float], int] = {}
    output, start = folder / "printed.txt", time.perf_counter()
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, stdout=file, stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "300"},
        )  # fmt: skip
        root = psutil.Process(process.pid)
        while process.poll() is None:
            for each in [root, *root.children(recursive=True)]:
                try:
                    match = re.search(
                        r"VmHWM:\s+(\d+) kB", Path(f"/proc/{each.pid}/status").read_text()
                    )
                    if match:  # else it has ended, and nobody has asked for its status
                        peaks[each.pid, each.create_time()] = 1024 * int(match.group(1))
                except (OSError, psutil.Error):  # it has ended
                    continue
            time.sleep(0.25)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {process.returncode}:\n{output.read_text()[-3000:]}"
        )
    return output.read_text(), seconds, sum(peaks.values())


def size_in(text: str, name: str) -> float:
    """Return the bytes of a row in a dry run's last table."""
    [(value, unit)] = re.findall(rf"^\s*{name}\s+([\d.e+]+) (\w+)", text, re.MULTILINE)
    return float(value) * UNITS[unit]


def compare(script: str, *arguments: str) -> dict[str, Any]:
    """Return a dry run's predictions, the run's figures, and the ratios."""
    command = (str(SCRIPTS / script), "--config-name", "grpo_arithmetic", *arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        printed, tried_s, _ = watched(*command, "dry_run=true", folder=folder)
        table = printed.partition("Forecast for the whole run")[2]
        [duration] = re.findall(r"^\s*time\s+([\d:]+)", table, re.MULTILINE)
        predicted = {
            "seconds": float(
                sum(int(part) * 60**power for power, part in enumerate(duration.split(":")[::-1]))
            ),
            "disk": size_in(table, "disk"),
            "memory": size_in(table, r"memory \(cpu\)"),
        }
        _, took_s, memory = watched(*command, f"hydra.run.dir={folder}/run", folder=folder)
        disk = sum(path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file())
    measured = {"seconds": took_s, "disk": float(disk), "memory": float(memory)}
    ratios = {name: round(predicted[name] / measured[name], 3) for name in measured}
    return {
        "dry_run_s": tried_s,
        "predicted": predicted,
        "measured": measured,
        "predicted_over_measured": ratios,
    }


def main() -> None:
    """Rehearse and make the runs in turn, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[""], help="runs with a name that contains one of these"
    )
    parser.add_argument("--out", type=Path, help="file for the JSON, besides standard output")
    args = parser.parse_args()
    chosen = [name for name in RUNS if any(part in name for part in args.only)]
    results = {name: compare(*RUNS[name]) for name in chosen}
    report(surroundings(("torch", "torchrl", "transformers", "ray")) | {"runs": results}, args.out)


if __name__ == "__main__":
    main()

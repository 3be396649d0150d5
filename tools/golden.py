"""Record the output of a set of small runs, and compare it with another commit's.

A refactoring must not change a number. This records the metrics (without times and memory), the
samples, the hashes of the exported weights, and the error messages of the bad inputs in
``tests/unit/test_bad_input.py``. The numbers depend on the machine, so record both sides on the
same one; records are not kept in the repository.

    python tools/golden.py record /tmp/before.json       # at one commit: about 6 minutes on 2 cores
    python tools/golden.py record /tmp/after.json        # at the other
    python tools/golden.py compare /tmp/before.json /tmp/after.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASE = ["--config-name", "grpo_arithmetic"]
TEN_STEPS = ["train.total_dialog_turns=1280"]
SUMS = [
    "env.dataset={sums}",
    "env.columns.answer=answer",
    "env.reward=gsm8k",
    "env.test_fraction=0.1",
]
RUNS: dict[str, tuple[str, list[str]]] = {
    **{f"seed_{seed}": ("grpo.py", [*BASE, *TEN_STEPS, f"seed={seed}"]) for seed in range(5)},
    "async": ("grpo-async.py", [*BASE, *TEN_STEPS, "seed=0", "train.max_staleness=0"]),
    "sft": (
        "grpo.py",
        [
            *BASE,
            *SUMS,
            "algo=sft",
            "env.columns.completion=solution",
            "inference_model.max_new_tokens=40",
            *TEN_STEPS,
        ],
    ),
    "distill": (
        "grpo.py",
        [*BASE, *TEN_STEPS, "algo=distill", "teacher.model={seed_0}/checkpoints/model"],
    ),
    "resumed": ("grpo.py", [*BASE, "train.total_dialog_turns=1920", "train.resume={seed_0}"]),
}
"""Scripts and overrides by name; ``{NAME}`` is the folder of an earlier run, ``{sums}`` a data set.
"""
UNSTABLE = ("time/", "throughput/", "memory/", "workers/")
"""Metrics that differ between two runs of the same code."""


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run one of ``RUNS`` and return its output."""
    script, overrides = RUNS[name]
    directory = folder / name
    folders = {other: folder / other for other in RUNS} | {"sums": folder / "sums.jsonl"}
    arguments = [override.format(**folders) for override in overrides]
    command = [
        sys.executable,
        str(ROOT / "sota" / "grpo" / script),
        *arguments,
        f"hydra.run.dir={directory}",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: row[key] for key in row if not key.startswith(UNSTABLE)} for row in rows]
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    weights = sorted((directory / "checkpoints" / "model").glob("*.safetensors"))
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in weights}
    return {"metrics": metrics, "samples": samples, "weights": hashes}


def messages() -> dict[str, str]:
    """Return the error message of each bad input, by override."""
    sys.path.insert(0, str(ROOT))
    import yaml

    from tests.unit import test_bad_input as inputs

    answers: dict[str, str] = {}
    for name, kind, value in inputs.VALUES:
        answers[f"{name} {kind} {value!r}"[:200]] = inputs.said_to((name, value))
    for keys in inputs.PAIRS:
        settings = [text.partition("=")[::2] for text in keys.split()]
        answers[keys] = inputs.said_to(*[(name, yaml.safe_load(value)) for name, value in settings])
    return answers


def record(names: Sequence[str]) -> dict[str, Any]:
    """Return everything to compare."""
    with tempfile.TemporaryDirectory() as temporary:
        result: dict[str, Any] = {}
        sums = subprocess.check_output(
            [sys.executable, str(ROOT / "examples" / "three_digit_sums.py")]
        )
        (Path(temporary) / "sums.jsonl").write_bytes(sums)
        for name in names:
            result[name] = run(name, Path(temporary))
            print(f"{name}: {len(result[name]['metrics'])} rows", file=sys.stderr, flush=True)
    result["messages"] = messages()
    return result


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Return a line for each different value; NaN equals NaN."""
    if type(before) is type(after) and isinstance(before, dict):
        keys = sorted(before.keys() | after.keys())
        pairs = [(f"{path}/{key}", before.get(key), after.get(key)) for key in keys]
    elif type(before) is type(after) and isinstance(before, list) and len(before) == len(after):
        pairs = [
            (f"{path}/{index}", *pair) for index, pair in enumerate(zip(before, after, strict=True))
        ]
    elif before == after or (before != before and after != after):
        return []
    else:
        return [f"{path}: {before!r} -> {after!r}"]
    return [line for name, old, new in pairs for line in differences(old, new, name)]


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        options.out.write_text(json.dumps(record(options.only), indent=1))
        return 0
    lines = differences(
        json.loads(options.before.read_text()), json.loads(options.after.read_text())
    )
    print("\n".join(lines) or "equal")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())

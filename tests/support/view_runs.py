"""Small handmade run folders in the format of a run, and the page's server on them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.configs import ROOT

CONFIG = """\
model: {name: starter}
env: {dataset: sums, repeats: 2}
optimizer: {lr: LR}
"""
HYDRA = "hydra: {runtime: {choices: {algo: grpo}}}\n"


def append(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    with (folder / name).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def metrics(step: int, reward: float = 0.5) -> dict[str, Any]:
    """Return the metrics row of a step."""
    times = {"time/step_s": 0.5, "time/train_s": 0.3, "time/generate_s": 0.1}
    rollout = {"rollout/sequences": 4, "rollout/reward_mean": reward, "rollout/accuracy": reward}
    return {"step": step, **rollout, "train/entropy": 1.0 / step, **times}


def tokens(text: str) -> dict[str, list[Any]]:
    """Return a token for each character; the policy did not sample those in brackets."""
    in_brackets = []
    inside = False
    for letter in text:
        inside = inside or letter == "["
        in_brackets.append(inside)
        inside = inside and letter != "]"
    log_probs = [None if is_outside else -0.25 for is_outside in in_brackets]
    trainer = [
        None if is_outside else -0.25 + 0.01 * at for at, is_outside in enumerate(in_brackets)
    ]
    return {
        "text": list(text),
        "log_prob": log_probs,
        "trainer": trainer,
        "reference": log_probs,
        "entropy": log_probs,
    }


def group(step: int, query: str, responses: Sequence[str], **others: Any) -> list[dict[str, Any]]:
    """Return the rows of a group, whose rewards are 0, 1, 0, 1, ..."""
    return [
        {
            "step": step,
            "split": "train",
            "query": query,
            "response": response,
            "reward": float(at % 2),
        }
        | {
            "correct": at % 2 == 1,
            "valid": True,
            "advantage": 2.0 * (at % 2) - 1,
            "parts": {"right": float(at % 2)},
        }
        | {
            "dataset": "sums",
            "group": step,
            "length": len(response),
            "finish_reason": "stop",
            "version": step - 1,
        }
        | {"staleness": 0, **others, "tokens": tokens(response)}
        for at, response in enumerate(responses)
    ]


def make_run(folder: Path, steps: int = 3, rate: str = "1e-4") -> Path:
    """Write a run that is still live: one group per step, and one test problem."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(CONFIG.replace("LR", rate))
    (folder / ".hydra" / "hydra.yaml").write_text(HYDRA)
    (folder / "environment.json").write_text(
        json.dumps({"python": "3.11", "packages": {"torch": "2.13"}})
    )
    append(
        folder,
        "metrics.jsonl",
        [{"step": 0, "eval/pass@1": 0.25}, *(metrics(step) for step in range(1, steps + 1))],
    )
    test = {
        "step": 0,
        "split": "test",
        "query": "1+1=",
        "response": "three",
        "reward": 0.0,
        "correct": False,
    }
    append(folder, "samples.jsonl", [test])
    for step in range(1, steps + 1):
        append(
            folder,
            "samples.jsonl",
            group(step, f"{step}+{step}=", [f"no {step}", f"#### {2 * step}"]),
        )
        spans = [
            ("sampler 0", "sample", 0.0, 1.0),
            ("trainer", "train", 1.0, 0.5),
            ("sampler 0", "restart", 1.2, 0.0),
        ]
        rows = [
            {"actor": a, "kind": k, "start": 1e9 + 2 * step + at, "seconds": s, "step": step}
            for a, k, at, s in spans
        ]
        append(folder, "timeline.jsonl", rows)
    return folder


def make_large(folder: Path, groups: int, steps: int = 1000) -> Path:
    """Write a run of this many groups of 8, with 32 tokens per response."""
    run = make_run(folder)
    rows = group(4, "QUERY", 8 * ["a response that is 32 characters"], group=-1)
    text = "".join(json.dumps(row) + "\n" for row in rows).replace('"step": 4', '"step": STEP')
    with (run / "samples.jsonl").open("a", encoding="utf-8") as file:
        for at in range(groups):
            step = str(4 + at * steps // groups)
            file.write(
                text.replace("STEP", step).replace("-1", str(at)).replace("QUERY", f"{at}+{at}=")
            )
    append(run, "metrics.jsonl", [metrics(step) for step in range(4, 4 + steps)])
    return run


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """Yield the address of the page on these runs, served like the command does."""
    command = [sys.executable, "-m", "torchrl_grpo", "view", *map(str, folders)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        match = re.fullmatch(
            r"Run dashboard: (http://127\.0\.0\.1:\d+/[\w-]{43}/)\n", process.stdout.readline()
        )
        assert match is not None
        yield match[1]
    finally:
        process.terminate()
        process.wait(timeout=300)


def flood_stderr(fd: int, folder: str, parent: int) -> None:
    """Write 4 MB to stderr in place of the dashboard's server."""
    for _ in range(40_000):
        print("x" * 99, file=sys.stderr)
    print("the end", file=sys.stderr)

"""The examples, run with the command lines in their own docstrings."""

from __future__ import annotations

import ast
import csv
import json
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import ROOT

SHORT = (
    "env.num_envs=16",
    "env.repeats=4",
    "train.total_dialog_turns=32",
    "evaluation.num_prompts=8",
    "evaluation.k=0",
    "hydra.run.dir=out",
)
EXAMPLES = (
    "my_data",
    "trl_reward",
    "verl_reward",
    "my_tasks",
    "my_tools",
    "my_agent",
    "my_tool_agent",
    "my_branches",
)


RUN_BY_DAY = ("my_data", "my_agent")


def command_of(name: str) -> list[str]:
    """Return the arguments of grpo.py in an example's docstring."""
    doc = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text())) or ""
    start = doc.index("python sota/grpo/grpo.py")
    lines = []
    for line in doc[start:].splitlines():
        lines.append(line.partition("  # ")[0].rstrip(" \\"))
        if not line.partition("  # ")[0].rstrip().endswith("\\"):
            break
    return shlex.split(" ".join(lines))[2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in RUN_BY_DAY else pytest.mark.nightly)
        for name in EXAMPLES
    ],
)
def test_an_example_s_own_command_line_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here: Callable[..., int]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    if name == "my_data":
        monkeypatch.setattr(sys, "argv", ["my_data.py", "sums.csv"])
        runpy.run_path(str(ROOT / "examples" / "my_data.py"), run_name="__main__")
        assert len(list(csv.reader((tmp_path / "sums.csv").open()))) == 1001
    assert run_here(ROOT / "sota" / "grpo" / "grpo.py", *command_of(name), *SHORT) == 0
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()
    ]
    assert (
        rows[-1]["step"] == 2
        and 0 <= rows[-1]["eval/pass@1"] <= 1
        and rows[-1]["rollout/invalid"] == 0
    )
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").open()]
    if name == "my_data":
        assert set(samples[-1]["parts"]) == {"exact_match/right", "exact_match/short"}
    if name == "my_tasks":
        assert any("\n" in sample["response"] for sample in samples)  # two turns


def test_the_example_that_writes_a_file_asks_for_its_name() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "my_data.py")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "usage: python examples/my_data.py FILE.csv\n")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 43

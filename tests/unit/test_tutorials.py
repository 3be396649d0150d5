"""The tutorials: all of their commands and code blocks run, except for commands that need GPUs."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks
from tests.support.configs import ROOT
from tests.support.documentation import TUTORIALS, Block, blocks, commands

ON_RAY = ("tutorials/async", "tutorials/devices")
BY_DAY = "tutorials/first_run"  # test_pages.py checks the commands of the others
ELSEWHERE = ("tutorials/loop",)  # tests/torchrl/test_torchrl_interop.py
SHORT = (
    "env.num_envs=16",
    "env.repeats=4",
    "train.total_dialog_turns=32",
    "evaluation.num_prompts=8",
    "evaluation.k=0",
    "logging.tensorboard=false",
)


def run_block(block: Block, variables: dict[str, Any]) -> None:
    """Run Python code and compare its output with the comments after ``print(...)``."""
    with redirect_stdout(io.StringIO()) as printed:
        exec(block.text, variables)
    if expected := re.findall(r"^print\(.*\)  # (.*)$", block.text, re.MULTILINE):
        assert printed.getvalue().splitlines() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=[pytest.mark.ray] * (n in ON_RAY) + [pytest.mark.nightly] * (n != BY_DAY)
        )
        for n in TUTORIALS
        if n not in ELSEWHERE
    ],
)
def test_a_tutorial_runs_as_it_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here: Callable[..., int]
) -> None:
    if name in ON_RAY:
        pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    variables: dict[str, Any] = {}
    for block in blocks(name):
        if block.language == "python" and not block.title:
            run_block(block, variables)
        for environment, words in (
            commands(block) if block.language == "bash" and "GPU" not in block.title else ()
        ):
            if words[0] != "python":
                continue
            if words[1].startswith("sota/"):
                sys.path += [str(tmp_path / environment["PYTHONPATH"])] if environment else []
                short = [one for one in SHORT if "algo=sft" not in words or "repeats" not in one]
                assert run_here(ROOT / words[1], *words[2:], *short) == 0, words
            else:
                environment = {"PYTHONPATH": str(ROOT), **environment}
                with forks.Popen(
                    [sys.executable, *words[1:]], env=os.environ | environment
                ) as process:
                    assert process.wait(600) == 0, words

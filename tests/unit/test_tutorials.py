"""The tutorials: every command and code block in them runs, and the files that they show are ours."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import ROOT
from tests.support.documentation import TUTORIALS, Block, blocks

NAMES = sorted(path.stem for path in TUTORIALS.glob("*.md"))
ON_RAY = ("async", "devices")
ELSEWHERE = ("loop",)  # tests/torchrl/test_torchrl_interop.py
SHORT = (
    "env.num_envs=16",
    "env.repeats=4",
    "train.total_dialog_turns=32",
    "evaluation.num_prompts=8",
    "evaluation.k=0",
    "logging.tensorboard=false",
)


def commands(block: Block) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The variables and the words of each command."""
    for line in block.text.replace("\\\n", " ").splitlines():
        for part in line.split(" && "):
            words = shlex.split(part)
            variables = dict(word.split("=", 1) for word in words[:1] if re.match(r"[A-Z]+=", word))
            yield variables, words[len(variables) :]


def run_block(block: Block, variables: dict[str, Any]) -> None:
    """Runs Python and compares what it prints with the comments behind ``print(...)``."""
    with redirect_stdout(io.StringIO()) as printed:
        exec(block.text, variables)
    if expected := re.findall(r"^print\(.*\)  # (.*)$", block.text, re.MULTILINE):
        assert printed.getvalue().splitlines() == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_files_that_a_tutorial_shows_are_those_that_there_are(name: str) -> None:
    for block in blocks(name):
        assert not block.title or block.text in (ROOT / block.title).read_text(encoding="utf-8"), block.title


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_tutorial_exist(name: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for block in blocks(name):
        for _, words in commands(block) if block.language == "bash" else ():
            assert words[0] in ("python", "make", "source"), words
            assert words[0] != "make" or words[1] in targets, words


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.ray if n in ON_RAY else ()) for n in NAMES if n not in ELSEWHERE]
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
        for environment, words in commands(block) if block.language == "bash" else ():
            if words[0] != "python":
                continue
            if words[1].startswith("sota/"):
                sys.path += [str(tmp_path / environment["PYTHONPATH"])] if environment else []
                assert run_here(ROOT / words[1], *words[2:], *SHORT) == 0, words
            else:
                environment = {"PYTHONPATH": str(ROOT), **environment}
                subprocess.run([sys.executable, *words[1:]], env=os.environ | environment, check=True, timeout=600)

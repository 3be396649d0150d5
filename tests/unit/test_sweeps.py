"""Sweeps as in docs/sweeps.md: Hydra's own launcher, joblib, submitit on this machine, and Optuna."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.configs import ROOT, last_of_each
from torchrl_grpo.config import ConfigError, check_command_line
from torchrl_grpo.extras.report.summary import objective, summarize

SYNC = ROOT / "sota" / "grpo" / "grpo.py"
SHORT = (
    "env.num_envs=16", "env.repeats=4", "train.total_dialog_turns=32", "evaluation.num_prompts=16", "evaluation.k=0",
    "logging.tensorboard=false", "hydra.sweep.dir=sweep",
)  # fmt: skip


def words_of(part: str) -> list[str]:
    """Return the words of the page's only command that contains this, from its first option on."""
    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    [line] = [line for line in re.findall(r"^python .*", text, re.MULTILINE) if part in line]
    return shlex.split(line)[2:]


def run(part: str, folder: Path) -> str:
    """Return the output of the page's command, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(SYNC), *last_of_each([*words_of(part), *SHORT])],
        cwd=folder, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Sweep page: sweep/sweep.html" in done.stdout
    return done.stdout


def jobs_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in (folder / "sweep").glob("*/metrics.jsonl"))


@pytest.mark.slow
def test_a_sweep_ends_with_its_page(run_here: Callable[..., int], tmp_path: Path) -> None:
    assert run_here(SYNC, *words_of("optimizer.lr=5e-5,1e-4"), *SHORT) == 0
    assert [path.name for path in jobs_in(tmp_path)] == ["0", "1", "2", "3"]
    page = (tmp_path / "sweep" / "sweep.html").read_text(encoding="utf-8")
    assert "in 2 runs" in page and page.count("/report.html") == 4


@pytest.mark.slow
def test_a_job_that_fails_leaves_the_others(
    run_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_here(SYNC, "--config-name", "grpo_arithmetic", "--multirun", *SHORT, "env.repeats=3,4")
        == 2
    )
    assert [path.name for path in jobs_in(tmp_path)] == ["1"]
    captured = capfd.readouterr()
    assert "sweep/0 failed: env.num_envs=16 must be a multiple of env.repeats=3" in captured.out
    assert "error: env.num_envs=16 must be a multiple of env.repeats=3" in captured.err
    assert "no step" in (tmp_path / "sweep" / "sweep.html").read_text(encoding="utf-8")


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_side_by_side_print_into_their_folders(launcher: str, tmp_path: Path) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    printed = run(launcher, tmp_path)
    assert [path.name for path in jobs_in(tmp_path)] == ["0", "1"]
    for job in jobs_in(tmp_path):
        assert "step 2: 32/32 sequences" in (job / "output.txt").read_text(encoding="utf-8")
    assert "sequences" not in printed


@pytest.mark.nightly
@pytest.mark.slow
def test_optuna_maximizes_the_last_test_accuracy(
    run_here: Callable[..., int], tmp_path: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    assert run_here(SYNC, *words_of("optuna"), *SHORT) == 0
    outcomes = [objective(summarize(path)) for path in jobs_in(tmp_path)]
    best = yaml.safe_load(
        (tmp_path / "sweep" / "optimization_results.yaml").read_text(encoding="utf-8")
    )
    assert len(outcomes) == 3 and best["best_value"] == max(outcomes)
    assert set(best["best_params"]) == {"algo", "optimizer.lr"}


def test_optuna_maximizes_unless_told_otherwise() -> None:
    assert check_command_line(["hydra/sweeper=optuna"]) == ["hydra.sweeper.direction=maximize"]
    assert check_command_line(["hydra/sweeper=optuna", "hydra.sweeper.direction=minimize"]) == []


def test_a_sweep_into_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.dir=.*/file/x must be a folder"):
        check_command_line([f"hydra.sweep.dir={tmp_path}/file/x"])

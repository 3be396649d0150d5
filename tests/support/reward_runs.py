"""A run whose reward workers are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.support.configs import compose_config
from tests.support.processes import command_line, worker_processes
from torchrl_grpo.assembly.run import build
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.reward_pool import RESTARTS, TIMED_OUT


def run(
    folder: Path, *overrides: str, kill: Callable[[Any], list[int]] | None, asynchronous: bool
) -> list[Any]:
    """Return the metrics of 4 steps; before the third, the processes that ``kill`` finds are
    killed.
    """
    settings = ("env.num_envs=16", "env.repeats=4", "optimizer.lr=1e-3", "evaluation.num_prompts=0")
    config = compose_config(
        *settings, "train.total_dialog_turns=64", "logging.tensorboard=false", *overrides
    )
    training_run = build(config, folder, asynchronous=asynchronous)
    real = training_run.learner.train_groups

    def train_groups(*groups: Any) -> dict[str, float]:
        if training_run.learner.version == 2 and kill is not None:
            for pid in kill(training_run):
                os.kill(pid, signal.SIGKILL)
        return real(*groups)

    training_run.learner.train_groups = train_groups  # type: ignore[method-assign]
    try:
        training_run.fit()
    finally:
        training_run.close()
    assert not [process for process in worker_processes() if "reward_pool" in command_line(process)]
    return read_jsonl(folder / "metrics.jsonl")


def own_workers(process: psutil.Process) -> list[int]:
    workers = [child.pid for child in process.children() if "reward_pool" in command_line(child)]
    assert len(workers) == 2
    return workers


def assert_killed_reward_workers_change_no_number(tmp_path: Path, asynchronous: bool) -> None:
    def kill(training_run: Any) -> list[int]:
        pid = training_run.rollouts.pids()["sampler 0"] if asynchronous else os.getpid()
        return own_workers(psutil.Process(pid))

    options = ["env.reward_workers=2"]
    if asynchronous:
        options += ["train.max_staleness=0", "policy.kl_coef=0"]
    expected = run(tmp_path / "a", *options[2:], kill=None, asynchronous=False)
    got = run(tmp_path / "b", *options, kill=kill, asynchronous=asynchronous)
    for name in (
        "train/loss",
        "train/grad_norm",
        "rollout/reward_mean",
        "rollout/accuracy",
        "rollout/invalid",
    ):
        assert [row.get(name) for row in got] == [row.get(name) for row in expected], name
    assert len({row["train/loss"] for row in got[1:]}) == 4
    assert [row[RESTARTS] for row in got[1:3]] == [0, 0]
    assert 1 <= got[4][RESTARTS] <= 2  # a worker without anything to score is not missed
    assert got[4][TIMED_OUT] == 0

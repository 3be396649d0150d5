"""The asynchronous run with vLLM's engines: one with two processes, and two that are killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import forks
from tests.support.configs import compose_config
from tests.support.processes import alive, worker_processes
from tests.support.scripts import ASYNC, SMALL, Script, rows_of
from torchrl_grpo.assembly.run import build

ray = pytest.importorskip("ray")


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.skipif(os.cpu_count() == 1, reason="needs 2 cores")
def test_a_replica_of_two_processes_has_the_trainers_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(forks.WITH_VLLM, "1")
    # By default vLLM expects a NUMA node for each process.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with Script(
        ASYNC, tmp_path, "inference_model.backend=vllm", "inference_model.num_devices=2", "policy.kl_coef=0",
        "inference_model.tensor_parallel_size=2", "evaluation.num_prompts=0",
        "train.total_dialog_turns=48",
    ) as running:  # fmt: skip
        running.wait()
    assert running.process.returncode == 0, running.printed()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["sync/receipt_s"] > 0  # both have the same weights
    assert running.left() == []


@pytest.mark.nightly
@pytest.mark.vllm
def test_a_killed_vllm_sampler_comes_back_and_loses_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill the actor first, then the engine's own process; weights keep arriving while sequences
    are sampled.
    """
    monkeypatch.setenv(forks.WITH_VLLM, "1")
    steps = 8
    config = compose_config(
        *SMALL, "inference_model.backend=vllm", "inference_model.in_flight=keep",
        "policy.kl_coef=0", f"train.total_dialog_turns={16 * steps}", "evaluation.num_prompts=0",
        "env.max_prompt_tokens=64", "optimizer.lr=1e-4",
    )  # fmt: skip
    training_run = build(config, tmp_path, asynchronous=True)
    trained = list[int]()
    real = training_run.learner.train_groups

    def train(*groups: Any) -> dict[str, float]:
        if training_run.learner.version in (2, 5):
            sampler = psutil.Process(training_run.rollouts.pids()["sampler 0"])
            [engine] = [p for p in sampler.children() if "EngineCore" in p.name()]
            (sampler if training_run.learner.version == 2 else engine).kill()
        trained.extend(group[0]["group_id"].item() for group in ray.get(list(groups)))
        return real(*groups)

    training_run.learner.train_groups = train  # type: ignore[method-assign]
    try:
        family = worker_processes()
        training_run.fit()
        family += worker_processes()
    finally:
        training_run.close()
    rows = rows_of(tmp_path)
    assert sorted(trained) == list(range(4 * steps))
    assert rows[-1]["workers/restarts_rollout"] == 2
    assert rows[-1]["sync/receipt_s"] > 0
    assert max(row["staleness/max"] for row in rows[1:]) <= 1
    assert rows[-1]["rollout/sequences"] == 16
    assert alive(family) == []

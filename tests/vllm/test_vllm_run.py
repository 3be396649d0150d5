"""A whole run on the real vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import torchrl_grpo.generation.vllm as vllm_module
from tests.support.configs import compose_config
from tests.support.models import response_log_probs
from tests.support.weights import mismatch
from torchrl_grpo.assembly import run as assembly
from torchrl_grpo.assembly.run import build
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.weights import Transfer, kinds
from torchrl_grpo.weights.ipc import LocalSender

SMALL = (
    "env.num_envs=16",
    "env.repeats=4",
    "train.total_dialog_turns=32",
    "evaluation.num_prompts=8",
    "evaluation.k=2",
    "logging.tensorboard=false",
)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_run_on_the_real_vllm_and_its_lora_export_loads_there(
    compiled: bool, tmp_path: Path
) -> None:
    """Weights arrive after each step (otherwise the check would end the run). At night vLLM
    compiles the model, and loads the exported one unchanged.
    """
    overrides = [
        "inference_model.backend=vllm",
        "train_model.lora.enabled=true",
        f"inference_model.enforce_eager={not compiled}",
    ]
    run = build(
        compose_config(*SMALL, *overrides, "optimizer.lr=1e-2", "env.max_prompt_tokens=64"),
        tmp_path,
    )
    try:
        run.fit()
    finally:
        run.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert max(row["train/kl_k3_to_inference"] for row in rows[1:]) < 1e-6
    assert rows[2]["train/kl_k3_to_ref"] > 1e-6  # the weights did change
    assert rows[2]["train/ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert (tmp_path / "checkpoints" / "checkpoint_000002").exists()
    if not compiled:
        return
    sampler = run.rollouts.samplers[0].part
    with vllm_module.VLLMEngine(
        str(tmp_path / "checkpoints" / "model"), max_model_len=128, enforce_eager=True
    ) as engine:
        prompts = sampler._take(1).base_env.prompts.first(4)
        score = response_log_probs(run.learner.trainer.model.merge_and_unload())
        assert mismatch(engine, score, prompts, SamplingParams(8))[1] < 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", ["", "hang"])
def test_a_run_takes_a_fast_way_or_loses_nothing_by_it(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files stand in for the memory of a GPU that trainer and engine share."""
    transfers = pytest.importorskip("tests.support.transfers")

    class Files(LocalSender):
        def handle(self, read: Any) -> Any:
            handle = super().handle(read)
            is_fast = handle is not self._direct
            return transfers.FileWeights(read, tmp_path, wrong) if is_fast else handle

    monkeypatch.setattr(vllm_module, "WORKER_EXTENSION", transfers.EXTENSION)
    monkeypatch.setattr(vllm_module, "TRIAL_S", 1.0 if wrong else 60.0)
    monkeypatch.setattr(kinds, "LocalSender", Files)
    monkeypatch.setattr(assembly, "transfer_kind", lambda *_, **__: Transfer("direct_ipc"))
    overrides = [
        "inference_model.backend=vllm",
        "optimizer.lr=1e-2",
    ]
    overrides += ["inference_model.enforce_eager=true", "env.max_prompt_tokens=64"]
    run = build(compose_config(*SMALL, *overrides), tmp_path / "run")
    try:
        run.fit()
        assert run.learner.sender._refused == bool(wrong)
    finally:
        run.close()
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert max(row["train/kl_k3_to_inference"] for row in rows[1:]) < 1e-6
    assert rows[2]["train/ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    messages = [
        record.getMessage()
        for record in caplog.records
        if "through the host" in record.getMessage()
    ]
    line = "The engine takes its weights through the host from here on: from_file: nothing arrived in 1 s."
    assert messages == [line] * bool(wrong)

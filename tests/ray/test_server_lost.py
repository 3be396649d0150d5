"""Servers that die, restart with their first weights, are updated by others, lie or are slow during
a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.configs import compose_config
from tests.support.models import response_log_probs
from tests.support.runs import SMALL, steps
from tests.support.sglang_stub import SGLangStub
from torchrl_grpo.assembly.run import build
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.starter import starter_path

ray = pytest.importorskip("ray")
pytest.importorskip("httpx2")


@pytest.mark.nightly
def test_each_group_is_trained_once_whatever_happens_to_the_servers(tmp_path: Path) -> None:
    first, second = (SGLangStub(str(starter_path())) for _ in range(2))

    def update_by_others() -> None:
        second.foreign = 1

    def lie() -> None:
        first.lies = 1

    def slow() -> None:
        first.slow_s = 0.5

    happens = {1: first.stop, 3: first.restart, 5: update_by_others, 6: lie, 7: slow}
    config = compose_config(
        *SMALL,
        steps(9),
        "policy.kl_coef=0",
        "inference_model.backend=server",
        f"inference_model.address=[{first.address},{second.address}]",
        "train.max_staleness=2",
    )
    training_run = build(config, tmp_path, asynchronous=True)
    trained: list[int] = []
    sampled: list[Any] = []
    real = training_run.learner.train_groups

    def train_groups(*groups: Any) -> dict[str, float]:
        for group in ray.get(list(groups)):
            trained.append(group[0]["group_id"].item())
            sampled.extend(group.unbind(0))
        metrics = real(*groups)
        happens.pop(training_run.learner.version, lambda: None)()
        return metrics

    training_run.learner.train_groups = train_groups  # type: ignore[method-assign]
    try:
        training_run.fit()
    finally:
        training_run.close()
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in row]
    assert sorted(trained) == list(range(9 * config.groups_per_batch))
    assert not happens and rows[-1]["workers/restarts_rollout"] >= 3
    assert max(row["staleness/max"] for row in rows) <= 2
    _check_log_probs(sampled, first.given | second.given)
    for server in (first, second):
        server.stop()


def _check_log_probs(sampled: Sequence[Any], weights: Mapping[int, Mapping[str, Any]]) -> None:
    """Check each response against the weights of its stated version, most of which are not the
    first.
    """
    stated = [int(sequence["policy_version"]) for sequence in sampled]
    assert len(set(stated)) >= 4
    for version in set(stated):
        model = AutoModelForCausalLM.from_pretrained(starter_path()).float().eval()
        model.load_state_dict(weights.get(version, {}), strict=False)
        rows = [sequence for sequence, its in zip(sampled, stated, strict=True) if its == version]
        tokens = [row["tokens", "full"] for row in rows]
        starts = [row["tokens", "prompt"].numel() for row in rows]
        wanted = response_log_probs(model)(tokens, starts)
        for row, start, log_probs in zip(rows, starts, wanted, strict=True):
            torch.testing.assert_close(
                row["log_probs", "full"][start:], log_probs, atol=2e-5, rtol=1e-4
            )

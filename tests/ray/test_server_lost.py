"""Servers that die, come back with their first weights, are updated by others and are slow, while a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import compose_config
from tests.support.runs import SMALL, steps
from tests.support.sglang_stub import SGLangStub
from torchrl_grpo.assembly.run import build
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.starter import starter_path

ray = pytest.importorskip("ray")
pytest.importorskip("httpx")


def test_each_group_is_trained_once_whatever_becomes_of_the_servers(tmp_path: Path) -> None:
    first, second = (SGLangStub(str(starter_path())) for _ in range(2))

    def update_by_others() -> None:
        second.foreign = 1

    def slow() -> None:
        first.slow_s = 0.5

    happens = {1: first.stop, 3: first.restart, 5: update_by_others, 7: slow}
    config = compose_config(
        *SMALL,
        steps(9),
        "policy.kl_coef=0",
        "inference_model.backend=server",
        f"inference_model.address=[{first.address},{second.address}]",
        "train.max_staleness=2",
    )
    made = build(config, tmp_path, asynchronous=True)
    trained: list[int] = []
    real = made.learner.train_groups

    def train_groups(*groups: Any) -> dict[str, float]:
        trained.extend(group[0]["group_id"].item() for group in ray.get(list(groups)))
        metrics = real(*groups)
        happens.pop(made.learner.version, lambda: None)()
        return metrics

    made.learner.train_groups = train_groups  # type: ignore[method-assign]
    try:
        made.fit()
    finally:
        made.close()
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in row]
    assert sorted(trained) == list(range(9 * config.groups_per_batch))
    assert not happens and rows[-1]["workers/restarts_rollout"] >= 2
    assert max(row["staleness/max"] for row in rows) <= 2
    fresh = [row for row in rows if row["staleness/max"] == 0]
    assert len(fresh) >= 2 and max(row["train/kl_k3_to_inference"] for row in fresh) < 1e-6
    for server in (first, second):
        server.stop()

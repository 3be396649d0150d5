"""``torchrl_grpo.train`` on Ray: a call's objects reach the actors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import torchrl_grpo
from torchrl_grpo.objectives import Surrogate

pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_function_and_a_loss_of_a_function_train_asynchronously(tmp_path: Path) -> None:
    class Doubled(Surrogate):
        def forward(self, t: Any) -> Any:
            return 2 * t["advantage"] * t["log_prob"]

    def right(response: str, answer: str) -> float:
        return float(response.strip().endswith(answer))

    result = torchrl_grpo.train(
        "grpo_arithmetic",
        dataset=[
            {"prompt": f"{a}+{b}=? #### n", "answer": str(a + b)}
            for a in range(10, 20)
            for b in range(10, 20)
        ],
        reward=right,
        loss=Doubled,
        asynchronous=True,
        folder=tmp_path / "run",
        overrides={
            "env.num_envs": 8,
            "env.repeats": 4,
            "train.total_steps": 2,
            "evaluation.num_prompts": 0,
            "logging.page": False,
        },
    )
    rows = result.metrics
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all("rollout/reward_mean" in row and "train/loss" in row for row in rows[1:])

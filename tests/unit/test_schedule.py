"""The learning rate over a run: its values, and that a resumed run has those of the uninterrupted one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.runs import at, differences, run, state_of, steps
from torchrl_grpo.host.files import read_jsonl
from torchrl_grpo.learner.schedule import learning_rate_factor


def test_cosine_has_its_closed_form_between_warm_up_and_floor() -> None:
    got = [learning_rate_factor(n, kind="cosine", warmup=4, total=14, floor=0.1) for n in range(16)]
    assert got[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert got[9] == pytest.approx(0.1 + 0.9 * 0.5)
    assert got[6] == pytest.approx(0.1 + 0.9 * (1 + math.cos(0.2 * math.pi)) / 2)
    assert got[14:] == [pytest.approx(0.1)] * 2


@pytest.mark.slow
def test_a_resumed_run_has_the_learning_rates_of_the_whole_one(tmp_path: Path) -> None:
    options = ("optimizer.schedule=cosine", "optimizer.warmup_steps=2", "optimizer.lr_floor=0.1", "policy.kl_coef=0")
    whole = run(tmp_path / "a", *options, "optimizer.lr=1e-3", steps(6), "train.checkpoint_frequency=3")
    rates = [row["train/lr"] for row in whole[1:]]
    expected = [5e-4, 1e-3, *(1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * n / 4)) / 2) for n in range(4))]
    assert rates == [pytest.approx(rate) for rate in expected]
    rest = run(tmp_path / "b", *options, "optimizer.lr=1e-3", steps(6), f"train.resume={at(tmp_path / 'a', 3)}")
    assert [row["train/lr"] for row in rest[1:]] == rates[3:]
    assert differences(state_of(at(tmp_path / "b", 6)), state_of(at(tmp_path / "a", 6))) == []
    assert [row["step"] for row in read_jsonl(tmp_path / "b" / "metrics.jsonl")] == [3, 4, 5, 6]

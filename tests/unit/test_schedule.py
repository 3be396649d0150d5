"""The learning rate over a run: its values, and their equality in a resumed run."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.configs import compose_config
from tests.support.runs import SMALL, at, differences, run, state_of, steps
from torchrl_grpo.assembly.run import build
from torchrl_grpo.extras.doctor.forecast import Measured, forecast
from torchrl_grpo.host.files import read_jsonl
from torchrl_grpo.learner.optimizer import learning_rate_factor
from torchrl_grpo.loop import Schedule


def test_cosine_has_its_closed_form_between_warm_up_and_floor() -> None:
    got = [learning_rate_factor(n, kind="cosine", warmup=4, total=14, floor=0.1) for n in range(16)]
    assert got[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert got[9] == pytest.approx(0.1 + 0.9 * 0.5)
    assert got[6] == pytest.approx(0.1 + 0.9 * (1 + math.cos(0.2 * math.pi)) / 2)
    assert got[14:] == [pytest.approx(0.1)] * 2


@pytest.mark.parametrize("done", range(12))
def test_the_schedule_counts_what_a_run_does_step_by_step(done: int) -> None:
    schedule = Schedule(11, evaluation_frequency=2, checkpoint_frequency=5, export_frequency=11)
    steps = range(done + 1, 12)
    assert schedule.left(done) == len(steps)
    assert schedule.checkpoints(done) == len(
        [step for step in steps if schedule.saves(step) or step == 11]
    )
    assert schedule.num_due(2, done) == len(
        [step for step in steps if schedule.evaluates(step) and step != 11]
    )
    assert (
        schedule.num_due(11, done) == len([step for step in steps if schedule.exports(step)]) == 0
    )
    assert Schedule(11).checkpoints(done) == (done < 11) and Schedule(11).num_due(0, done) == 0


@pytest.mark.slow
def test_a_dry_run_and_the_run_expect_the_same_files(tmp_path: Path) -> None:
    frequencies = (
        "train.checkpoint_frequency=2",
        "train.export_frequency=3",
        "train.keep_checkpoints=null",
    )
    config = compose_config(*SMALL, steps(5), *frequencies)
    with closing(build(config, tmp_path)) as started:
        expected = started.writes()
        measured = Measured(
            checkpoint_bytes=expected.checkpoint_bytes, model_bytes=expected.model_bytes
        )
        assert forecast(config, measured).writes == expected
        started.fit()
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    checkpoints = [name for name in names if name.startswith("checkpoint_")]
    assert len(checkpoints) == expected.checkpoints == 3
    assert len(names) - len(checkpoints) == expected.models == 2


@pytest.mark.slow
def test_a_resumed_run_has_the_learning_rates_of_the_whole_one(tmp_path: Path) -> None:
    options = (
        "optimizer.schedule=cosine",
        "optimizer.warmup_steps=2",
        "optimizer.lr_floor=0.1",
        "policy.kl_coef=0",
    )
    whole = run(
        tmp_path / "a", *options, "optimizer.lr=1e-3", steps(6), "train.checkpoint_frequency=3"
    )
    rates = [row["train/lr"] for row in whole[1:]]
    expected = [
        5e-4,
        1e-3,
        *(1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * n / 4)) / 2) for n in range(4)),
    ]
    assert rates == [pytest.approx(rate) for rate in expected]
    rest = run(
        tmp_path / "b",
        *options,
        "optimizer.lr=1e-3",
        steps(6),
        f"train.resume={at(tmp_path / 'a', 3)}",
    )
    assert [row["train/lr"] for row in rest[1:]] == rates[3:]
    assert differences(state_of(at(tmp_path / "b", 6)), state_of(at(tmp_path / "a", 6))) == []
    assert [row["step"] for row in read_jsonl(tmp_path / "b" / "metrics.jsonl")] == [3, 4, 5, 6]

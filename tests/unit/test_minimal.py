"""``sota/grpo/minimal.py`` implements the trainer's algorithm."""

from __future__ import annotations

import runpy
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.configs import ROOT, compose_config
from torchrl_grpo.assembly.run import build
from torchrl_grpo.host.files import read_jsonl

MINIMAL = ROOT / "sota" / "grpo" / "minimal.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "steps"), [(0, 5), pytest.param(3, 10, marks=pytest.mark.nightly)]
)
def test_minimal_prints_the_losses_of_the_trainer(seed: int, steps: int, tmp_path: Path) -> None:
    overrides = (
        "evaluation.num_prompts=0",
        "logging.tensorboard=false",
        f"train.total_dialog_turns={128 * steps}",
    )
    with closing(
        build(
            compose_config(*overrides, f"seed={seed}", "optimizer.lr=5e-5", "policy.kl_coef=0.01"),
            tmp_path,
        )
    ) as run:
        run.fit()
    expected = [
        row["train/loss"] for row in read_jsonl(tmp_path / "metrics.jsonl") if row["step"] > 0
    ]
    losses = runpy.run_path(str(MINIMAL))["train"](steps=steps, seed=seed)
    assert len(expected) == steps
    # The two sum terms of order 1 in a different order, with float32 rounding of 1e-7; the losses
    # are up to 2e-4.
    assert losses == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_minimal_stays_short() -> None:
    assert len(MINIMAL.read_text().splitlines()) <= 125

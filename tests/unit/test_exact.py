"""``inference_model.exact``: the engine's log-probs are the trainer's to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import run, steps

BF16 = "train.mixed_precision=bf16"
OTHERS = ("inference_model.temperature=0.7", "train_model.gradient_checkpointing=true")
KL = ("train/kl_k1_to_inference", "train/kl_k3_to_inference")


def kl_to_engine(folder: Path, *overrides: str) -> list[float]:
    rows = [row for row in run(folder, *overrides, steps(3)) if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    return [row[name] for row in rows for name in KL]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (BF16, *OTHERS),
        pytest.param((BF16,), marks=pytest.mark.nightly),
        pytest.param(OTHERS, marks=pytest.mark.nightly),
    ],
)
def test_on_policy_each_ratio_is_1_to_the_last_bit(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    assert kl_to_engine(tmp_path, "inference_model.exact=true", *overrides) == [0.0] * 6


@pytest.mark.slow
def test_without_it_the_ratio_has_rounding(tmp_path: Path) -> None:
    assert all(kl != 0 for kl in kl_to_engine(tmp_path))

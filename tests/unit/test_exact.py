"""``inference_model.exact``: the engine's log-probs are the trainer's to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.configs import compose_config
from tests.support.runs import SMALL, run, steps
from torchrl_grpo.errors import ConfigError

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
        ("train.mixed_precision=bf16",),
        ("inference_model.temperature=0.7", "train_model.gradient_checkpointing=true"),
    ],
)
def test_on_policy_each_ratio_is_1_to_the_last_bit(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    assert kl_to_engine(tmp_path, "inference_model.exact=true", *overrides) == [0.0] * 6


@pytest.mark.slow
def test_without_it_the_ratio_has_rounding(tmp_path: Path) -> None:
    assert all(kl != 0 for kl in kl_to_engine(tmp_path))


@pytest.mark.parametrize(
    ("override", "needs"),
    [
        (
            "inference_model.backend=vllm",
            "needs inference_model.backend=transformers, but it is vllm",
        ),
        (
            "inference_model.dtype=bfloat16",
            "needs inference_model.dtype=float32, but it is bfloat16",
        ),
        ("env.max_turns=2", "needs env.max_turns=1, but it is 2"),
        ("train_model.lora.enabled=true", "needs train_model.lora.enabled=false, but it is true"),
        ("train_model.num_devices=2", "needs train_model.num_devices=1, but it is 2"),
        ("train_model.devices=[0,1]", "needs train_model.devices="),
    ],
)
def test_what_cannot_be_exact_is_refused(override: str, needs: str) -> None:
    with pytest.raises(ConfigError, match=needs):
        compose_config(*SMALL, "inference_model.exact=true", override)

"""Value, gradient, and outputs of every preset and of further options in all forms of a batch, compared
with recorded numbers in float64: a refactoring must reproduce them.

``python -m tests.unit.test_golden_losses`` records them again. Say in the commit why they change.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from tests.support.configs import ROOT, compose_config
from tests.support.losses import Table, make_batch, total
from torchrl_grpo import keys
from torchrl_grpo.assembly.algorithm import make_loss
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.models.entries import pad
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.objectives.output import accumulate

RECORD = Path(__file__).parents[1] / "support" / "golden_losses.json"
PRESETS = sorted(path.stem for path in (ROOT / "config" / "algo").glob("*.yaml"))
OPTIONS: dict[str, dict[str, Any]] = {
    "terms": {
        "kl_to_ref_coeff": 0.3,
        "kl_to_inference_coeff": 0.2,
        "entropy_coeff": 0.05,
        "kl_bias_correction": True,
        "kl_estimator": "k2",
    },
    "dual_clip": {"dual_clip": 1.3, "ratio_level": "sequence_token", "kl_to_ref_coeff": 0.1},
    "truncate": {
        "proximal": "interpolated",
        "behaviour_weight": "truncate",
        "behaviour_level": "sequence",
        "behaviour_cap": 1.1,
        "behaviour_floor": 0.9,
    },
    "token_rules": {
        "proximal": "recomputed",
        "behaviour_weight": "mask",
        "rejection": {"token_ratio": (0.8, 1.3), "token_k3": 0.3, "dppo_kl": 0.02, "outlier": 3.0},
        "aggregation": "token_mean",
    },
    "sequence_rules": {
        "rejection": {
            "sequence_ratio": (0.3, 4.0),
            "geometric": (0.7, 1.4),
            "sequence_k3": 0.4,
            "off_policy": 0.1,
        },
        "kl_bias_correction": True,
        "kl_to_ref_coeff": 0.2,
        "ratio_level": "sequence",
    },
    "top_entropy": {"proximal": "recomputed", "top_entropy_quantile": 0.5, "entropy_coeff": 0.1},
    "kl_mask": {"kl_mask_threshold": 0.05, "kl_to_inference_coeff": 0.1},
    "teacher": {"teacher_coeff": 0.5, "teacher_clip": 0.8},
    "demonstrations": {"sft_coeff": 0.4, "entropy_coeff": 0.1},
}
FORMS = ("ragged", "padded", "samples", "invalid", "truncated", "empty", "token", "parts")


def rows_of(form: str) -> tuple[Tensor, list[TensorDict]]:
    """Return logits and sequences with all entries that an option may read."""
    logits, rows = make_batch(4, lengths=(6, 9, 4, 7, 5))
    generator = torch.Generator().manual_seed(5)
    for number, row in enumerate(rows):
        mask = row[keys.ASSISTANT_MASK]
        if form == "empty" and number == 2:
            mask.zero_()

        def random(scale: float, mask: Tensor = mask) -> Tensor:
            noise = torch.randn(len(mask), generator=generator, dtype=torch.float64)
            return torch.where(mask, noise * scale, 0.0)

        row[keys.PROX_LOG_PROBS] = row[keys.LOG_PROBS] + random(0.3)
        row[keys.TEACHER_LOG_PROBS] = row[keys.LOG_PROBS] + random(0.5)
        row[keys.PROX_ENTROPY] = random(1.0).abs()
        row[keys.DIVERGENCE] = random(1.0).abs()
        row[keys.STALENESS] = torch.tensor([number])
        row[keys.TRUNCATED] = torch.tensor([form == "truncated" and number % 2 == 0])
        row[keys.REWARD_VALID] = torch.tensor([form != "invalid" or number not in (1, 3)])
        row[keys.TEACHER_VALID] = torch.tensor([number != 1])
        row[keys.IS_DEMONSTRATION] = torch.tensor([number == 4])
        values = torch.Generator().manual_seed(number)
        for key in (keys.VALUE, keys.STATE_VALUE, keys.VALUE_TARGET):
            noise = torch.randn(len(mask), generator=values, dtype=torch.float64)
            row[key] = torch.where(mask, noise, 0.0)
        if form == "samples":
            row[keys.TRAJECTORY] = torch.tensor([number // 2])
        if form == "token":
            row[keys.ADVANTAGE] = random(1.0)
    return logits, rows


def padded(rows: list[TensorDict]) -> TensorDict:
    """Return the rows as one batch that is wider than the longest of them."""
    ragged = lazy_stack(rows)
    out = TensorDict({}, [len(rows)])
    for key in rows[0].keys(True, True):
        value = pad(ragged, key)
        wide = value.shape[1] > 1
        out[key] = torch.nn.functional.pad(value, (0, 2)) if wide else value
    return out


@cache
def config_of(preset: str, mask_truncated: bool) -> GRPOConfig:
    overrides = [f"algo={preset}", "train.epochs=2"]
    overrides += ["teacher.model=starter"] * (preset == "distill")
    overrides += ["policy.mask_truncated=true"] * mask_truncated
    return compose_config(*overrides)


def cases() -> dict[str, Callable[[Table, str], GRPOLoss]]:
    def of_preset(name: str) -> Callable[[Table, str], GRPOLoss]:
        return lambda actor, form: make_loss(config_of(name, form == "truncated"), actor)

    def of_options(settings: dict[str, Any]) -> Callable[[Table, str], GRPOLoss]:
        return lambda actor, form: GRPOLoss(actor, mask_truncated=form == "truncated", **settings)

    presets = {name: of_preset(name) for name in PRESETS}
    return presets | {name: of_options(settings) for name, settings in OPTIONS.items()}


def outputs(name: str, form: str) -> tuple[dict[str, float], Tensor]:
    """Return the outputs of a loss and the gradient of its logits."""
    logits, rows = rows_of(form)
    width = max(len(row[keys.FULL]) for row in rows) + 2
    logits = torch.nn.functional.pad(logits, (0, 0, 0, width - logits.shape[1]))
    loss = cases()[name](Table(logits), form)
    batch: TensorDictBase = padded(rows) if form in ("padded", "parts") else lazy_stack(rows)
    totals: dict[str, Tensor] = {}
    parts = loss.normalize(batch).split(2) if form == "parts" else [batch]
    for part in parts:
        accumulate(totals, loss(part))
    total(totals).backward()
    gradient = loss.actor_network.logits.grad
    if form == "parts":
        del totals["ESS"]  # of a part alone
    return {key: value.item() for key, value in sorted(totals.items())}, gradient


def summary(name: str, form: str) -> list[float]:
    """Return the loss, two projections of its gradient, and one of its outputs."""
    values, gradient = outputs(name, form)
    phases = torch.arange(gradient.numel(), dtype=torch.float64)
    flat = torch.tensor(list(values.values()), dtype=torch.float64)
    return [
        sum(value for key, value in values.items() if key.startswith("loss_")),
        float((gradient.flatten() * phases.cos()).sum()),
        float((gradient.flatten() * (2 * phases).sin()).sum()),
        float((flat * torch.arange(len(flat), dtype=torch.float64).cos()).sum()),
    ]


@pytest.mark.parametrize("name", cases())
def test_losses_equal_the_recorded_ones(name: str) -> None:
    record = json.loads(RECORD.read_text())[name]
    values, _ = outputs(name, "ragged")
    assert values == pytest.approx(record["outputs"], rel=1e-11, abs=1e-12)
    for form in FORMS:
        assert summary(name, form) == pytest.approx(record[form], rel=1e-11, abs=1e-12), form


def test_all_presets_are_recorded() -> None:
    assert set(json.loads(RECORD.read_text())) == set(cases())


def rounded(value: float) -> float:
    return float(f"{value:.13g}")


if __name__ == "__main__":
    recorded: dict[str, Any] = {}
    for case in cases():
        of_case: dict[str, Any] = {
            form: [rounded(value) for value in summary(case, form)] for form in FORMS
        }
        ragged, _ = outputs(case, "ragged")
        of_case["outputs"] = {key: rounded(value) for key, value in ragged.items()}
        recorded[case] = of_case
    lines = (f"{json.dumps(case)}: {json.dumps(value)}" for case, value in recorded.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")

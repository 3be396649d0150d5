"""Every algorithm as an executable specification: value and gradient against plain loops in float64, and by hand.

The loops here share no code with the package: one token at a time, scalar arithmetic, autograd on the logits alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.modules.llm import TransformersWrapper

from tests.support.configs import ROOT, SMALL, compose_config
from tests.support.losses import Table, Token, cispo, clip, make_batch, sapo, tokens_of, total
from torchrl_grpo import functional as F
from torchrl_grpo.assembly.algorithm import batch_transforms, make_loss
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.run import Run, build
from torchrl_grpo.config import ConfigError, check_command_line
from torchrl_grpo.models.scoring import WrapperScorer
from torchrl_grpo.objectives import (
    SAPO,
    CISPOLoss,
    GRPOLoss,
    SAPOLoss,
)
from torchrl_grpo.objectives.output import accumulate
from torchrl_grpo.weights.named import is_critic


def plain_loop(
    logits: Tensor,
    rows: list[TensorDict],
    objective: Token,
    *,
    level: str = "token",
    aggregation: str = "sequence_mean",
    length: int = 1,
    kl: str = "k3",
    kl_coeff: float = 0.0,
    kl_to_sample_coeff: float = 0.0,
    entropy_coeff: float = 0.0,
    proximal: str = "behaviour",
    bound: tuple[str, str, float] | None = None,
    floor: float = 0.0,
    reject: Callable[[list[float], list[float], list[float], list[float]], list[bool]]
    | None = None,
    mask_truncated: bool = False,
) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    counted = [row for row in rows if row["masks", "all_assistant_mask"].any()]
    if mask_truncated:
        counted = [row for row in counted if not row["next", "truncated"].item()]
    tokens_in_all = sum(int(row["masks", "all_assistant_mask"].sum()) for row in counted)
    loss = torch.zeros((), dtype=torch.float64)
    for row in counted:
        places = row["masks", "all_assistant_mask"].nonzero().flatten().tolist()
        log_probs, entropies, prox, weight = {}, {}, {}, {}
        for t in places:
            p = torch.softmax(logits[int(row["row"]), t], 0)
            log_probs[t] = torch.log(p[int(row["tokens", "full"][t])])
            entropies[t] = -sum(q * torch.log(q) for q in p)
            sample = row["log_probs", "full"][t].item()
            d = row["staleness"].item()
            prox[t] = {
                "behaviour": sample,
                "current": log_probs[t].item(),
                "recomputed": row["prox_log_probs", "full"][t].item(),
                "interpolated": (sample + d * log_probs[t].item()) / (d + 1),
            }[proximal]
        mean = sum(log_probs[t] - prox[t] for t in places) / len(places)
        for t in places:
            kind, over, cap = bound or ("none", "token", 1.0)
            exponents = [
                prox[u] - row["log_probs", "full"][u].item()
                for u in (places if over == "sequence" else [t])
            ]
            weight[t] = math.exp(sum(exponents))
            if weight[t] > cap and kind != "none":
                weight[t] = cap if kind == "truncate" else 0.0
            if weight[t] < floor:
                weight[t] = 0.0
            if kind == "none":
                weight[t] = 1.0
        if reject is not None:
            sampled = [row["log_probs", "full"][t].item() for t in places]
            current = [log_probs[t].item() for t in places]
            credit = row["advantage"].expand(len(row["log_probs", "full"]))[places].tolist()
            rejected = reject([prox[t] for t in places], current, sampled, credit)
            weight |= {t: 0.0 for t, out in zip(places, rejected, strict=True) if out}
        for t in places:
            cur = log_probs[t]
            if level == "token":
                ratio = torch.exp(cur - prox[t])
            elif level == "sequence":
                ratio = torch.exp(mean)
            else:
                ratio = torch.exp(mean.detach()) * torch.exp(cur) / torch.exp(cur.detach())
            advantage = row["advantage"]
            value = -weight[t] * objective(
                ratio, cur, advantage[t] if len(advantage) > 1 else advantage[0]
            )
            value = value - entropy_coeff * entropies[t]
            gap = cur - row["log_probs", "full"][t]
            value = (
                value
                + kl_to_sample_coeff
                * {"k1": gap, "k2": gap**2 / 2, "k3": torch.exp(-gap) + gap - 1}[kl]
            )
            ref = row["next", "ref_log_probs", "full"][t]
            value = value + kl_coeff * {
                "k1": cur - ref, "k2": (cur - ref) ** 2 / 2, "k3": torch.exp(ref - cur) - (ref - cur) - 1,
            }[kl]  # fmt: skip
            divisor = {
                "sequence_mean": len(places) * len(counted),
                "token_mean": tokens_in_all,
                "constant": length * len(counted),
            }[aggregation]
            loss = loss + value / divisor
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


CASES: dict[str, tuple[type[GRPOLoss], dict[str, Any], Token, dict[str, Any]]] = {
    "grpo": (GRPOLoss, {"kl_to_ref_coeff": 0.3}, clip(0.2, 0.2), {"kl_coeff": 0.3}),
    "dr_grpo": (
        GRPOLoss, {"aggregation": "constant", "constant_length": 7}, clip(0.2, 0.2),
        {"aggregation": "constant", "length": 7},
    ),
    "dapo": (
        GRPOLoss, {"aggregation": "token_mean", "clip_epsilon": (0.2, 0.28)}, clip(0.2, 0.28),
        {"aggregation": "token_mean"},
    ),
    "gspo": (GRPOLoss, {"ratio_level": "sequence", "clip_epsilon": 0.05}, clip(0.05, 0.05), {"level": "sequence"}),
    "gspo_token": (
        GRPOLoss, {"ratio_level": "sequence_token", "clip_epsilon": 0.05}, clip(0.05, 0.05),
        {"level": "sequence_token"},
    ),
    "cispo": (CISPOLoss, {"aggregation": "token_mean"}, cispo(1.0, 4.0), {"aggregation": "token_mean"}),
    "cispo_bounded": (CISPOLoss, {"clip_epsilon": (0.1, 0.1)}, cispo(0.1, 0.1), {}),
    "sapo": (SAPOLoss, {}, sapo(1.0, 1.05), {}),
    "sapo_hot": (SAPOLoss, {"tau_positive": 0.5, "tau_negative": 3.0}, sapo(0.5, 3.0), {}),
    "rloo": (
        GRPOLoss, {"aggregation": "constant", "constant_length": 1}, clip(0.2, 0.2), {"aggregation": "constant"},
    ),
    "dual_clip": (GRPOLoss, {"dual_clip": 1.3}, clip(0.2, 0.2, 1.3), {}),
    "reinforce_pp": (GRPOLoss, {"aggregation": "token_mean"}, clip(0.2, 0.2), {"aggregation": "token_mean"}),
    "decoupled_ppo": (
        GRPOLoss, {"proximal": "recomputed", "behaviour_weight": "mask", "behaviour_cap": 1.2}, clip(0.2, 0.2),
        {"proximal": "recomputed", "bound": ("mask", "token", 1.2)},
    ),
    "decoupled_ppo_interpolated": (
        GRPOLoss,
        {"proximal": "interpolated", "behaviour_weight": "mask", "behaviour_cap": 1.3, "clip_epsilon": 0.1},
        clip(0.1, 0.1), {"proximal": "interpolated", "bound": ("mask", "token", 1.3)},
    ),
    "decoupled_cispo": (
        CISPOLoss, {"proximal": "recomputed", "behaviour_weight": "truncate", "behaviour_cap": 1.2}, cispo(1.0, 4.0),
        {"proximal": "recomputed", "bound": ("truncate", "token", 1.2)},
    ),
    "decoupled_gspo": (
        GRPOLoss, {"proximal": "recomputed", "ratio_level": "sequence", "clip_epsilon": 0.05}, clip(0.05, 0.05),
        {"proximal": "recomputed", "level": "sequence"},
    ),
    "truncated_is_token": (
        GRPOLoss, {"proximal": "current", "behaviour_weight": "truncate", "behaviour_cap": 1.1}, clip(0.2, 0.2),
        {"proximal": "current", "bound": ("truncate", "token", 1.1)},
    ),
    "truncated_is_sequence": (
        GRPOLoss,
        {"proximal": "current", "behaviour_weight": "truncate", "behaviour_level": "sequence", "behaviour_cap": 0.8},
        clip(0.2, 0.2), {"proximal": "current", "bound": ("truncate", "sequence", 0.8)},
    ),
    "masked_is_token": (
        GRPOLoss, {"proximal": "current", "behaviour_weight": "mask", "behaviour_cap": 1.1}, clip(0.2, 0.2),
        {"proximal": "current", "bound": ("mask", "token", 1.1)},
    ),
    "masked_is_sequence": (
        GRPOLoss,
        {"proximal": "recomputed", "behaviour_weight": "mask", "behaviour_level": "sequence", "behaviour_cap": 0.8},
        clip(0.2, 0.2), {"proximal": "recomputed", "bound": ("mask", "sequence", 0.8)},
    ),
    "mask_truncated": (GRPOLoss, {"mask_truncated": True}, clip(0.2, 0.2), {"mask_truncated": True}),
    "mask_truncated_token_mean": (
        GRPOLoss, {"mask_truncated": True, "aggregation": "token_mean"}, clip(0.2, 0.2),
        {"mask_truncated": True, "aggregation": "token_mean"},
    ),
    "all_terms": (
        GRPOLoss, {"kl_to_ref_coeff": 0.3, "kl_to_inference_coeff": 0.2, "entropy_coeff": 0.1},
        clip(0.2, 0.2), {"kl_coeff": 0.3, "kl_to_sample_coeff": 0.2, "entropy_coeff": 0.1},
    ),
    "entropy": (GRPOLoss, {"entropy_coeff": 0.1}, clip(0.2, 0.2), {"entropy_coeff": 0.1}),
    "kl_to_inference": (
        GRPOLoss, {"kl_to_inference_coeff": 0.2, "kl_estimator": "k2"}, clip(0.2, 0.2),
        {"kl_to_sample_coeff": 0.2, "kl": "k2"},
    ),
    "kl_k1": (GRPOLoss, {"kl_to_ref_coeff": 0.5, "kl_estimator": "k1"}, clip(0.2, 0.2), {"kl": "k1", "kl_coeff": 0.5}),
    "kl_k2": (GRPOLoss, {"kl_to_ref_coeff": 0.5, "kl_estimator": "k2"}, clip(0.2, 0.2), {"kl": "k2", "kl_coeff": 0.5}),
}  # fmt: skip


def rich_batch(seed: int, token_level: bool = False) -> tuple[Tensor, list[TensorDict]]:
    """Return a random ragged batch with all entries that an option may read, and advantages per
    sequence or per token.
    """
    logits, rows = make_batch(seed)
    generator = torch.Generator().manual_seed(100 + seed)
    for i, row in enumerate(rows):
        sample = row["log_probs", "full"]
        noise = torch.randn(len(sample), generator=generator, dtype=torch.float64) * 0.3
        row["prox_log_probs", "full"] = torch.where(
            row["masks", "all_assistant_mask"], sample + noise, 0.0
        )
        row["staleness"] = torch.tensor([i])
        row["next", "truncated"] = torch.tensor([i == (seed + 1) % 4])
        if token_level:
            row["advantage"] = torch.randn(len(sample), generator=generator, dtype=torch.float64)
    return logits, rows


def at_night(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, *at_night(1, 2), 3])
@pytest.mark.parametrize("level", ["sequence_advantage", "token_advantage"])
def test_value_and_gradient_equal_a_plain_loop(name: str, seed: int, level: str) -> None:
    kind, settings, objective, loop = CASES[name]
    logits, rows = rich_batch(seed, level == "token_advantage")
    if seed == 3:
        rows[1]["masks", "all_assistant_mask"].zero_()
    loss = kind(Table(logits.clone()), **settings)
    out = total(loss(lazy_stack(rows)))
    out.backward()
    value, gradient = plain_loop(logits, rows, objective, **loop)
    torch.testing.assert_close(out.detach(), value)
    torch.testing.assert_close(loss.actor_network.logits.grad, gradient)


PER_TOKEN = (
    ("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full"), ("next", "ref_log_probs", "full"),
    ("prox_log_probs", "full"), "advantage",
)  # fmt: skip


def padded(rows: list[TensorDict], extra: int = 0) -> TensorDict:
    """Return the rows as one padded batch, wider than the longest by ``extra``, with nonzero
    padding.
    """
    ragged = lazy_stack(rows)
    data = TensorDict({}, [len(rows)])
    for key in PER_TOKEN:
        value = ragged.get(key, as_padded_tensor=True, padding_side="right")
        if value.shape[1] > 1 and extra:
            junk = 0 if key[0] == "masks" else math.nan if value.is_floating_point() else 3
            fill = torch.full((len(rows), extra), junk, dtype=value.dtype)
            value = torch.cat([value, fill], 1)
        data[key] = value
    for key in ("row", "staleness", ("next", "truncated")):
        data[key] = ragged[key]
    return data


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", ["sequence_advantage", "token_advantage"])
@pytest.mark.parametrize("split", [*at_night([4], [1, 3], [1, 1, 1, 1]), [2, 1, 1]])
def test_padding_order_and_micro_batches_change_nothing(
    name: str, level: str, split: list[int]
) -> None:
    """The gradient of a ragged batch equals that of its parts: shuffled, padded further, and
    accumulated.
    """
    kind, settings, _, _ = CASES[name]
    logits, rows = rich_batch(5, level == "token_advantage")
    logits = torch.cat([logits, torch.zeros(4, 3, 5, dtype=torch.float64)], 1)
    whole = kind(Table(logits.clone()), **settings)
    expected = whole(lazy_stack(rows))
    total(expected).backward()
    data = padded([rows[i] for i in (2, 0, 3, 1)], extra=3)
    parts = kind(Table(logits.clone()), **settings)
    parts.normalize(data)
    got = [parts(piece) for piece in data.split(split)]
    sum(total(out) for out in got).backward()
    torch.testing.assert_close(
        parts.actor_network.logits.grad, whole.actor_network.logits.grad, rtol=1e-12, atol=1e-14
    )
    totals: dict[str, Tensor] = {}
    for out in got:
        accumulate(totals, out)
    for metric in expected.keys():  # noqa: SIM118
        if metric != "ESS":
            torch.testing.assert_close(totals[metric], expected[metric], rtol=1e-6, atol=1e-9)


def one_row(ratios: list[float], advantage: float) -> TensorDict:
    """Return a sequence whose current policy is uniform over 2 tokens, so that cur = 1/2 and sample
    = 1 / (2 ratio).
    """
    log_probs = [0.0, *(math.log(0.5 / ratio) for ratio in ratios)]
    return TensorDict(
        {
            ("tokens", "full"): torch.zeros(len(log_probs), dtype=torch.int64),
            ("masks", "all_assistant_mask"): torch.arange(len(log_probs)) > 0,
            ("log_probs", "full"): torch.tensor(log_probs, dtype=torch.float64),
            "advantage": torch.tensor([advantage], dtype=torch.float64),
            "row": torch.tensor([0]),
            "staleness": torch.tensor([1]),
            ("next", "truncated"): torch.tensor([False]),
        }
    )


@pytest.mark.parametrize(
    ("name", "ratios", "advantage", "value"),
    [
        # (1 * 2 + min(1.5, 1.2) * 2) / 2 = 2.2
        ("grpo", [1.0, 1.5], 2.0, 2.2),
        # (1 * 2 + 1.2 * 2) / 7
        ("dr_grpo", [1.0, 1.5], 2.0, 4.4 / 7),
        # clip-higher: (1 + 1.28) / 2
        ("dapo", [1.0, 1.5], 1.0, 1.14),
        # sqrt(1 * 1.21) = 1.1, clipped at 1.05 for both tokens
        ("gspo", [1.0, 1.21], 1.0, 1.05),
        ("gspo_token", [1.0, 1.21], 1.0, 1.05),
        # weights 1 and 5 (6 is clipped), log-prob ln(1/2): (1 + 5) / 2 * ln(1/2)
        ("cispo", [1.0, 6.0], 1.0, 3 * math.log(0.5)),
        # 4 sigmoid(0) = 2 and 4 sigmoid(1) = 2.9242...
        ("sapo", [1.0, 2.0], 1.0, (2 + 4 / (1 + math.exp(-1))) / 2),
        # a sum over the tokens: -1 + max(-1.5 ...): pessimistic, no clip above for a negative advantage
        ("rloo", [1.0, 1.5], -1.0, -2.5),
        # -1.5 is bounded at 1.3 * -1: (-1 - 1.3) / 2
        ("dual_clip", [1.0, 1.5], -1.0, -1.15),
        # prox / sample = 1 and 1.25, the second above the cap of 1.2; cur / prox = 1 and 1.2: (1 * 1 + 0) / 2
        ("decoupled_ppo", [1.0, 1.5], 1.0, 0.5),
        # one version old: prox / sample = sqrt(1.44) = 1.2, below the cap of 1.3, and cur / prox = 1.2, clipped at 1.1:
        # (1 * 1 + 1.2 * 1.1) / 2
        ("decoupled_ppo_interpolated", [1.0, 1.44], 1.0, 1.16),
        # prox = cur: weights min(1, 1.1) and min(1.5, 1.1)
        ("truncated_is_token", [1.0, 1.5], 2.0, 2.1),
        # the product over the sequence, 0.5 * 1.5 = 0.75, is below the cap of 0.8: 0.75 * 2
        ("truncated_is_sequence", [0.5, 1.5], 2.0, 1.5),
        ("masked_is_token", [1.0, 1.5], 2.0, 1.0),
        # entropy ln 2 of two equally likely tokens
        ("entropy", [1.0, 1.0], 1.0, 1 + 0.1 * math.log(2)),
    ],
)
def test_objective_by_hand(name: str, ratios: list[float], advantage: float, value: float) -> None:
    """One sequence of two tokens, with the arithmetic beside each case. The reference is the
    current policy.
    """
    kind, settings, _, _ = CASES[name]
    row = one_row(ratios, advantage)
    row["next", "ref_log_probs", "full"] = torch.full((3,), math.log(0.5), dtype=torch.float64)
    # where it is used, the proximal policy has cur / prox = 1 and 1.2
    row["prox_log_probs", "full"] = torch.tensor(
        [0.0, math.log(0.5), math.log(0.5 / 1.2)], dtype=torch.float64
    )
    out = kind(Table(torch.zeros(1, 3, 2, dtype=torch.float64)), **settings)(lazy_stack([row]))
    assert total(out).item() == pytest.approx(-value)


def test_cispo_has_a_gradient_where_the_clipped_surrogate_has_none() -> None:
    """Without the stop-gradient on the clipped ratio, CISPO's gradient would be 0 where the clip binds."""
    row = one_row([6.0], 1.0)
    gradients = {}
    for kind in (GRPOLoss, CISPOLoss):
        loss = kind(Table(torch.zeros(1, 2, 2, dtype=torch.float64)))
        total(loss(lazy_stack([row]))).backward()
        gradients[kind] = loss.actor_network.logits.grad
    assert gradients[GRPOLoss].abs().max() == 0
    # -5 d log p(0) / d logits = -5 (1 - 1/2, -1/2)
    assert gradients[CISPOLoss][0, 1].tolist() == [-2.5, 2.5]


def test_sapo_equals_the_policy_gradient_on_policy() -> None:
    """At ratio 1 the gate's slope is 1: d(4/tau sigmoid(tau (r - 1)))/dr = 1."""
    ratio = torch.ones(1, dtype=torch.float64, requires_grad=True)
    for tau in (0.5, 1.0, 3.0):
        (slope,) = torch.autograd.grad(
            SAPO(tau, 9.0)(tokens_of(ratio=ratio, advantage=torch.ones(1))).sum(), ratio
        )
        assert slope.item() == pytest.approx(1.0)


@pytest.mark.parametrize("mean", ["group", "leave_one_out", "batch"])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero_whatever_the_baseline(mean: Any, std: Any) -> None:
    group = torch.arange(14) // 7
    for value in (0.1, 1 / 3, 1e6, -7.7):
        reward = torch.full((14,), value)
        got = F.group_advantage(reward, group, torch.ones(14) > 0, mean=mean, std=std)
        assert got.tolist() == [0.0] * 14


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (GRPOLoss, {"ratio_level": "word"}, "ratio_level='word' must be one of .*: use 'token'"),
        (
            GRPOLoss,
            {"behaviour_level": "word"},
            "behaviour_level='word' must be one of .*: use 'token'",
        ),
        (
            GRPOLoss,
            {"kl_to_inference_coeff": -1},
            "kl_to_inference_coeff=-1 must not be negative: use 0",
        ),
        (GRPOLoss, {"kl_to_ref_coeff": -1.0}, "kl_to_ref_coeff=-1.0 must not be negative"),
        (GRPOLoss, {"clip_epsilon": 1.1}, r"clip_epsilon=1\.1 must be .* with 0 <= low <= 1"),
        (GRPOLoss, {"clip_epsilon": (0.2, -0.1)}, r"clip_epsilon=\(0\.2, -0\.1\) must be a number"),
        (GRPOLoss, {"entropy_coeff": -1}, "entropy_coeff=-1 must not be negative: use 0"),
        (GRPOLoss, {"aggregation": "mean"}, "aggregation='mean' must be one of"),
        (GRPOLoss, {"kl_estimator": "k4"}, "kl_estimator='k4' must be one of"),
        (
            CISPOLoss,
            {"dual_clip": 3.0},
            r"dual_clip=3\.0 must be None with CISPOLoss.*: leave it out, or use GRPOLoss\.$",
        ),
        (SAPOLoss, {"dual_clip": 3.0}, r"dual_clip=3\.0 must be None with SAPOLoss"),
        (GRPOLoss, {"dual_clip": 1.0}, r"dual_clip=1\.0 must be above 1"),
        (GRPOLoss, {"proximal": "old"}, "proximal='old' must be one of"),
        (GRPOLoss, {"behaviour_weight": "clip"}, "behaviour_weight='clip' must be one of"),
        (
            GRPOLoss,
            {"behaviour_weight": "mask"},
            "proximal=behaviour makes every weight 1: use proximal=recom",
        ),
        (GRPOLoss, {"behaviour_cap": 0.0}, r"behaviour_cap=0\.0 must be above 0"),
        (GRPOLoss, {"constant_length": 0}, "constant_length=0 must be at least 1"),
        (
            GRPOLoss,
            {"aggregation": "constant"},
            "constant_length=None must be at least 1, .* aggregation='constant': use the longest response allowed",
        ),
        (
            SAPOLoss,
            {"tau_positive": 0.0},
            r"tau_positive=0\.0 must be above 0: use 1\.0",
        ),
        (SAPOLoss, {"tau_negative": 0.0}, r"tau_negative=0\.0 must be above 0"),
    ],
)
def test_values_out_of_range_are_refused(
    kind: type[GRPOLoss], settings: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(Table(torch.zeros(1, 1, 2)), **settings)


PRESETS = sorted(path.stem for path in (ROOT / "config" / "algo").glob("*.yaml"))
ELSEWHERE = ("sft", "distill", "gmpo", "vespo", "clip_cov", "kl_cov", "ppo")
"""Presets whose formula is in test_sft.py, test_teacher.py, test_sequence_losses.py (whole sequences),
test_token_roles.py (tokens selected from a batch) or test_critic.py."""


def build_preset(name: str, tmp_path: Path) -> Run:
    more = ["teacher.model=starter"] if name == "distill" else []
    if name == "sft":
        rows = [{"question": f"{i}+1=?", "answer": f"#### {i + 1}"} for i in range(20)]
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        columns = ["env.columns.completion=answer", "env.reward=gsm8k"]
        more = [f"env.dataset={tmp_path / 'data.jsonl'}", "env.difficulty=2", *columns]
    return build(compose_config(*SMALL, f"algo={name}", *more), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ELSEWHERE, "dapo"])
def test_what_a_preset_has_beside_its_loss(name: str, tmp_path: Path) -> None:
    """The others have their formula above; the loss of each is in test_golden_losses.py."""
    run = build_preset(name, tmp_path)
    run.close()
    transforms = dict(run.learner.transforms)
    others = {"sft": "none", "distill": "none", "ppo": "batch"}
    baseline = (others.get(name, "group"),) * 2
    assert (transforms["advantage"].mean, transforms["advantage"].std) == baseline
    assert ("shaping" in transforms) == (name in ("dapo", "ppo"))
    assert ("values" in transforms) == (name == "ppo")
    # Ten rollouts of 16 dialogs are 40 groups of 4.
    assert run.rollouts.tasks._most_played == (40 if name == "dapo" else None)


CLIPS = {
    "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "gspo_token": (3e-4, 4e-4), "cispo": (1.0, 4.0), "gpg": (0.0, 0.0),
    "gmpo": (0.4, 0.4), "luspo": (2e-3, 2.5e-3), "dppo_tv": (1.0, 1e9),
}  # fmt: skip
WEIGHTS = {
    "decoupled_ppo": ("mask", "token", 5.0),
    "icepop": ("mask", "token", 5.0),
    "geo_mask": ("truncate", "token", 2.0),
}


@pytest.mark.parametrize("name", PRESETS)
def test_bounds_of_a_preset_that_few_ratios_reach(name: str) -> None:
    teacher = ["teacher.model=starter"] if name == "distill" else []
    loss = make_loss(compose_config(f"algo={name}", *teacher), Table(torch.zeros(1, 1, 2)))
    bounds = (loss.clip_epsilon_low.item(), loss.clip_epsilon_high.item())
    assert bounds == pytest.approx(CLIPS.get(name, (0.2, 0.2)))
    weight = (loss.behaviour_weight, loss.behaviour_level, loss.behaviour_cap)
    assert weight == WEIGHTS.get(name, ("none", "token", 5.0))
    assert (loss.dual_clip, loss.mask_truncated, loss.kl_to_inference_coeff) == (None, False, 0.0)


# Each of the others differs from one of these in a formula that a test above checks by hand.
TRAINED_BY_DAY = ("grpo", "gspo", "dapo", "sft")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in TRAINED_BY_DAY else pytest.mark.nightly)
        for name in PRESETS
    ],
)
def test_a_preset_trains(name: str, tmp_path: Path) -> None:
    run = build_preset(name, tmp_path)
    before = _copy(run.learner.trainer.model)
    try:
        run.fit()
    finally:
        run.close()
    assert (run.learner.trainer.version, run.learner.trainer.optim_steps) == (2, 4)
    moved = [
        (value - before[name]).abs().max()
        for name, value in run.learner.trainer.model.named_parameters()
        if not is_critic(name)
    ]
    assert 0 < max(moved) < 1e-2


@pytest.mark.slow
def test_one_optimizer_step_a_batch_needs_no_forward_pass_for_proximal(tmp_path: Path) -> None:
    run = build(compose_config(*SMALL, "algo=decoupled_ppo", "train.optim_batch_size=16"), tmp_path)
    try:
        assert run.learner.trainer.loss.proximal == "current"
    finally:
        run.close()


@pytest.mark.slow
def test_the_reference_model_is_refreshed_every_n_steps(tmp_path: Path) -> None:
    """The reference starts with the initial weights; from step 2 on it has those of step 2, before
    the engine does.
    """
    overrides = ["ref_model.refresh_every=2", "train.total_dialog_turns=48", "policy.kl_coef=0.01"]
    run = build(compose_config(*SMALL, *overrides), tmp_path)
    reference, trained = (
        run.rollouts.references[0].part.scoring.scorer.model,
        run.learner.trainer.model,
    )
    weights = {0: _copy(trained)}
    seen: dict[int, dict[str, Tensor]] = {}
    train, send = run.learner.train_groups, run.rollouts.publish

    def publish(sent: Any, version: int) -> None:
        seen[version] = _copy(reference)
        send(sent, version)

    def spy(*groups: TensorDictBase) -> dict[str, float]:
        assert all(
            torch.equal(seen[run.learner.version][name], value)
            for name, value in _copy(reference).items()
        )
        out = train(*groups)
        weights[run.learner.version] = _copy(trained)
        return out

    run.learner.train_groups, run.rollouts.publish = spy, publish  # type: ignore[method-assign]
    try:
        run.fit()
    finally:
        run.close()
    for version, source in {0: 0, 1: 0, 2: 2}.items():
        for name, value in weights[source].items():
            assert torch.equal(seen[version][name], value)
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def _copy(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["my_algorithm.", "examples/my_algorithm.py:"])
def test_a_custom_loss_and_advantage_are_found_by_name(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(ROOT)
    overrides = [
        f"policy.loss._target_={form}Reinforce",
        f"policy.advantage._target_={form}RankAdvantage",
    ]
    check_command_line(overrides)
    run = build(compose_config(*SMALL, *overrides), tmp_path)
    seen: list[Tensor] = []
    train_batch = run.learner.trainer.train_batch
    run.learner.trainer.train_batch = lambda batch: (
        seen.append(batch["advantage"]),
        train_batch(batch),
    )[1]  # type: ignore
    try:
        run.fit()
    finally:
        run.close()
    assert type(run.learner.trainer.loss.objective).__name__ == "Reinforce"
    assert {value for batch in seen for value in batch.flatten().tolist()} <= {-1.0, 0.0, 1.0}
    assert any(batch.abs().max() == 1 for batch in seen)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "policy.loss._target_=nowhere.Loss",
            r"policy\.loss\._target_=nowhere\.Loss must be in a module that can be imported[\s\S]*file\.py",
        ),
        (
            "policy.loss._target_=nowhere.py:Loss",
            r"policy\.loss\._target_=.*nowhere\.py:Loss must name a file that exists",
        ),
        (
            "policy.loss._target_=torch.nn.Linear",
            r"_target_=torch\.nn\.Linear must be a subclass of GRPOLoss or Surrogate: .* other parts \(",
        ),
        (
            f"policy.loss._target_={ROOT}/examples/my_algorithm.py:Reinforced",
            r"my_algorithm\.py:Reinforced must name a class .*use one of \['Reinforce', 'RankAdvantage'\]",
        ),
        (
            "policy.advantage._target_=torch.nn.Linear",
            r"policy\.advantage\._target_=torch\.nn\.Linear must be a subclass of Group",
        ),
    ],
)
def test_a_bad_name_is_refused_before_anything_loads(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(compose_config(*SMALL, override))


def test_the_bounds_of_a_surrogate_are_those_of_the_config() -> None:
    surrogate = "policy.loss._target_=torchrl_grpo.objectives.Clip"
    prepare(compose_config(*SMALL, surrogate, "policy.clip_epsilon=[0.2,0.28]"))
    with pytest.raises(ConfigError, match=r"policy\.loss\.high=0\.28 must be left out, .*clip_eps"):
        prepare(compose_config(*SMALL, surrogate, "+policy.loss.high=0.28"))


def one_token(reference: bool = True) -> TensorDict:
    """Return a sequence of one sampled token: cur 1/2, sample 1/4, ref 1/8, prox 1/3, one version
    old.
    """
    row = one_row([2.0], 1.0)
    row["prox_log_probs", "full"] = torch.tensor([0.0, math.log(1 / 3)], dtype=torch.float64)
    if reference:
        row["next", "ref_log_probs", "full"] = torch.tensor(
            [0.0, math.log(1 / 8)], dtype=torch.float64
        )
    return row


@pytest.mark.parametrize("normalized", [False, True])
def test_metrics_of_a_single_token_by_hand(normalized: bool) -> None:
    """k1 = ln(cur / other), k3 = other / cur - 1 + ln(cur / other), each counted once."""
    batch = lazy_stack([one_token()])
    loss = GRPOLoss(Table(torch.zeros(1, 2, 2, dtype=torch.float64)))
    if normalized:
        loss.normalize(batch)
        assert batch["loss", "num_tokens"].tolist() == [[1]]
    out = loss(batch)
    expected = {
        "objective": 1.2, "ratio_mean": 2.0, "ratio_square_mean": 4.0, "clip_fraction_low": 0.0,
        "clip_fraction_high": 1.0, "ESS": 1.0, "entropy": math.log(2), "kl_k1_to_inference": math.log(2),
        "kl_k3_to_inference": 0.5 - 1 + math.log(2), "kl_k1_to_ref": math.log(4),
        "kl_k3_to_ref": 0.25 - 1 + math.log(4), "loss_objective": -1.2,
        "clip_fraction": 1.0, "kl_approx": -math.log(2), "kl_to_inference": 0.5 - 1 + math.log(2),
        "kl_to_ref": 0.25 - 1 + math.log(4),
    }  # fmt: skip
    assert {name: value.item() for name, value in out.items()} == pytest.approx(expected)


def test_reference_log_probs_without_a_weight_are_a_metric_and_no_loss() -> None:
    loss = GRPOLoss(Table(torch.zeros(1, 2, 2, dtype=torch.float64)))
    assert {"kl_k1_to_ref", "loss_kl_to_ref"} & set(loss(lazy_stack([one_token()])).keys()) == {
        "kl_k1_to_ref"
    }
    assert not {"kl_k1_to_ref", "loss_kl_to_ref"} & set(
        loss(lazy_stack([one_token(reference=False)])).keys()
    )


@pytest.mark.parametrize(
    ("level", "bound", "cap", "mean", "capped"),
    [
        # prox / sample = 1/2 and 3/2 on the two tokens
        ("token", "truncate", 2.0, 1.0, 0.0),
        ("token", "truncate", 1.2, 0.85, 0.5),
        ("token", "mask", 1.2, 0.25, 0.5),
        # 3/4 for the sequence
        ("sequence", "truncate", 2.0, 0.75, 0.0),
        ("sequence", "truncate", 0.6, 0.6, 1.0),
        ("sequence", "mask", 0.6, 0.0, 1.0),
    ],
)
def test_metrics_of_the_behaviour_weight_by_hand(
    level: Any, bound: Any, cap: float, mean: float, capped: float
) -> None:
    row = one_row([1.0, 1.0], 1.0)
    row["prox_log_probs", "full"] = torch.tensor(
        [0.0, math.log(0.25), math.log(0.75)], dtype=torch.float64
    )
    settings: dict[str, Any] = {
        "behaviour_weight": bound,
        "behaviour_level": level,
        "behaviour_cap": cap,
    }
    loss = GRPOLoss(
        Table(torch.zeros(1, 3, 2, dtype=torch.float64)), proximal="recomputed", **settings
    )
    out = loss(lazy_stack([row]))
    assert set(out.keys()) == set(loss.out_keys)
    assert (out["behaviour_weight"].item(), out["behaviour_capped"].item()) == pytest.approx(
        (mean, capped)
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_advantage_outside_the_mask_may_be_anything(value: float) -> None:
    logits, rows = rich_batch(0, token_level=True)
    expected = total(GRPOLoss(Table(logits))(lazy_stack(rows)))
    for row in rows:
        row["advantage"] = torch.where(row["masks", "all_assistant_mask"], row["advantage"], value)
    assert total(GRPOLoss(Table(logits))(lazy_stack(rows))).item() == expected.item()


@pytest.mark.parametrize("extra", [{}, {"tau_positive": 0.5, "tau_negative": 0.5}])
def test_sapo_passes_the_other_settings_on(extra: dict[str, float]) -> None:
    loss = SAPOLoss(
        Table(torch.zeros(1, 1, 2)), clip_epsilon=0.3, aggregation="token_mean", **extra
    )
    assert loss.clip_epsilon_low.item() == pytest.approx(0.3)
    assert (loss.aggregation, loss.tau_positive, loss.tau_negative) == (
        "token_mean", extra.get("tau_positive", 1.0), extra.get("tau_negative", 1.05),
    )  # fmt: skip


def mean_and_std(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def standardized(rewards: list[list[float]], scale: bool = True) -> list[list[list[float]]]:
    """Return (r - mean) / (std + 1e-6) of its group for each sequence, as a list of one number."""
    out = []
    for group in rewards:
        mean, std = mean_and_std(group)
        out.append(
            [[(reward - mean) / (std + 1e-6) if scale else reward - mean] for reward in group]
        )
    return out


def leave_one_out(rewards: list[list[float]]) -> list[list[list[float]]]:
    return [
        [[group[i] - sum(group[:i] + group[i + 1 :]) / (len(group) - 1)] for i in range(len(group))]
        for group in rewards
    ]


def geometric(low: float, high: float) -> Callable[..., list[bool]]:
    def reject(
        prox: list[float], current: list[float], sampled: list[float], credit: list[float]
    ) -> list[bool]:
        mean = sum(p - s for p, s in zip(prox, sampled, strict=True)) / len(prox)
        return [not low <= math.exp(mean) <= high] * len(prox)

    return reject  # fmt: skip


def moved_further(most: float) -> Callable[..., list[bool]]:
    def reject(
        prox: list[float], current: list[float], sampled: list[float], credit: list[float]
    ) -> list[bool]:
        changes = [math.exp(c) - math.exp(s) for c, s in zip(current, sampled, strict=True)]
        return [change * a > most * abs(a) for change, a in zip(changes, credit, strict=True)]

    return reject  # fmt: skip


# The papers in plain Python: the advantages, and the settings of the loop over the tokens.
SPECIFICATIONS: dict[str, tuple[str, Token, dict[str, Any]]] = {
    "grpo": ("standardized", clip(0.2, 0.2), {"kl": "k3", "kl_coeff": 0.01}),
    "dr_grpo": ("centered", clip(0.2, 0.2), {"aggregation": "constant", "length": 32}),
    "dapo": ("standardized_overlong", clip(0.2, 0.28), {"aggregation": "token_mean"}),
    "gspo": ("standardized", clip(3e-4, 4e-4), {"level": "sequence", "proximal": "recomputed"}),
    "gspo_token": ("standardized", clip(3e-4, 4e-4), {"level": "sequence_token", "proximal": "recomputed"}),
    "cispo": ("standardized", cispo(1.0, 4.0), {"aggregation": "token_mean"}),
    "sapo": ("standardized", sapo(1.0, 1.05), {}),
    "rloo": ("leave_one_out_kl", clip(0.2, 0.2), {"aggregation": "constant"}),
    "reinforce_pp": ("returns_kl", clip(0.2, 0.2), {"aggregation": "token_mean"}),
    "decoupled_ppo": (
        "standardized", clip(0.2, 0.2),
        {"aggregation": "token_mean", "proximal": "recomputed", "bound": ("mask", "token", 5.0)},
    ),
    "icepop": (
        "standardized", clip(0.2, 0.2),
        {"aggregation": "token_mean", "proximal": "recomputed", "bound": ("mask", "token", 5.0), "floor": 0.5},
    ),
    "geo_mask": (
        "standardized", clip(0.2, 0.2),
        {"aggregation": "token_mean", "proximal": "recomputed", "bound": ("truncate", "token", 2.0),
         "reject": geometric(0.99, 1.01)},
    ),
    "max_rl": ("max_rl", clip(0.2, 0.2), {"aggregation": "token_mean"}),
    "pass_at_k": ("lead", clip(0.2, 0.2), {"aggregation": "token_mean"}),
    "opo": ("length_weighted", clip(0.2, 0.2), {"aggregation": "token_mean"}),
    "gpg": ("nonzero", cispo(0.0, 0.0), {"aggregation": "token_mean"}),
    "luspo": (
        "standardized", clip(2e-3, 2.5e-3),
        {"level": "sequence", "proximal": "recomputed", "aggregation": "constant"},
    ),
    "dppo_tv": ("centered", clip(1.0, 1e9), {"aggregation": "token_mean", "reject": moved_further(0.2)}),
}  # fmt: skip


def advantages_by_loop(kind: str, rows: list[TensorDict]) -> list[list[float]]:
    """Return one number or one per token for each row. Rows 0 to 3 are the first group, 4 to 7 the
    second.
    """
    rewards = [row["next", "reward"].item() for row in rows]
    sampled = [row["masks", "all_assistant_mask"].nonzero().flatten().tolist() for row in rows]
    gaps = [
        (row["log_probs", "full"] - row["next", "ref_log_probs", "full"]).tolist() for row in rows
    ]
    if kind == "standardized_overlong":  # a fifth of 32 tokens, 6, before 32
        rewards = [
            r + min(0.0, max(-1.0, (26 - len(places)) / 6))
            for r, places in zip(rewards, sampled, strict=True)
        ]
    if kind == "leave_one_out_kl":
        rewards = [
            r - 0.01 * sum(gap[t] for t in places)
            for r, gap, places in zip(rewards, gaps, sampled, strict=True)
        ]
    if kind == "returns_kl":
        returns = [{t: r - 0.01 * sum(gap[u] for u in places if u >= t) for t in places}
                   for r, gap, places in zip(rewards, gaps, sampled, strict=True)]  # fmt: skip
        mean, std = mean_and_std([value for row in returns for value in row.values()])
        return [[(values[t] - mean) / (std + 1e-6) if t in values else 0.0 for t in range(len(row["row_width"]))]
                for values, row in zip(returns, rows, strict=True)]  # fmt: skip
    groups = [rewards[:4], rewards[4:]]
    if kind == "max_rl":
        means = [sum(group) / 4 for group in groups]
        return [[(r - means[i // 4]) / (means[i // 4] + 1e-6)] for i, r in enumerate(rewards)]
    if kind == "lead":
        leads = []
        for group in groups:
            best, second = sorted(group, reverse=True)[:2]
            std = mean_and_std(group)[1] + 1e-6
            leads += [[(best - second) / std if r == best else 0.0] for r in group]
        return leads
    if kind == "length_weighted":
        totals = [
            sum(len(sampled[i]) * rewards[i] for i in group) / sum(len(sampled[i]) for i in group)
            for group in (range(4), range(4, 8))
        ]
        return [[r - totals[i // 4]] for i, r in enumerate(rewards)]
    if kind == "nonzero":
        share = sum(r != 0 for r in rewards) / len(rewards)
        return [[(r - sum(groups[i // 4]) / 4) / share] for i, r in enumerate(rewards)]
    advantages = (
        leave_one_out(groups)
        if kind == "leave_one_out_kl"
        else standardized(groups, kind != "centered")
    )
    return [values for group in advantages for values in group]


@pytest.mark.parametrize("name", SPECIFICATIONS)
@pytest.mark.parametrize("seed", [0, *at_night(1, 2)])
def test_the_gradient_of_each_preset_equals_its_formula_by_loop(name: str, seed: int) -> None:
    """From the rewards of two groups to value and gradient, the composed yaml must equal plain
    Python.
    """
    kind, objective, loop = SPECIFICATIONS[name]
    logits, rows = rich_batch(seed)
    more_logits, more = make_batch(seed + 50, (34, 5, 8, 12))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.cat([torch.nn.functional.pad(logits, (0, 0, 0, 25)), more_logits])
    for i, row in enumerate(more):
        row["row"] = torch.tensor([4 + i])
        row["prox_log_probs", "full"] = row["log_probs", "full"] + 0.1
        row["staleness"], row["next", "truncated"] = torch.tensor([0]), torch.tensor([False])
    more[0]["masks", "all_assistant_mask"][1:] = (
        True  # 33 tokens, all of them sampled: longer than the limit
    )
    rows += more
    for i, row in enumerate(rows):
        del row["advantage"]
        row["next", "reward"] = (
            torch.randint(0, 2, (1,), generator=generator).float() if i % 4 else torch.tensor([0.5])
        )
        if name == "pass_at_k":
            row["next", "reward"] = torch.tensor([float((i * 3 + seed) % 8)])
        if name == "geo_mask" and i % 2:  # the others are rejected
            row["prox_log_probs", "full"] = row["log_probs", "full"] + 0.005
        row["group_id"] = torch.tensor([i // 4])
        row["row_width"] = torch.zeros(len(row["tokens", "full"]))
    config = compose_config(
        f"algo={name}", "env.num_envs=8", "env.repeats=4", "train.optim_batch_size=4"
    )
    batch = lazy_stack([row.clone() for row in rows])
    for _, transform in batch_transforms(config):
        batch = transform(batch)
    loss = make_loss(config, Table(logits.clone()))
    out = total(loss(batch))
    out.backward()
    for row, advantage in zip(rows, advantages_by_loop(kind, rows), strict=True):
        row["advantage"] = torch.tensor(advantage, dtype=torch.float64)
    value, gradient = plain_loop(logits, rows, objective, **loop)
    torch.testing.assert_close(
        out.detach(), value, rtol=1e-5, atol=1e-6
    )  # the advantage is float32
    torch.testing.assert_close(loss.actor_network.logits.grad, gradient, rtol=1e-5, atol=1e-6)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
@pytest.mark.parametrize("steps", [1, 4])
def test_by_default_tokens_are_weighed_by_their_ratio_to_the_engine(
    backend: str, steps: int
) -> None:
    """The batch has the engine's log-probs: importance sampling from it, bounded by the clip."""
    sizes = ("env.num_envs=8", "env.repeats=4", f"train.optim_batch_size={8 // steps}")
    config = compose_config(f"inference_model.backend={backend}", "policy.kl_coef=0", *sizes)
    assert (config.policy.proximal, config.policy.behaviour_weight) == ("behaviour", "none")
    loss = make_loss(config, Table(torch.zeros(1, 1, 2)))
    assert (loss.proximal, loss.behaviour_weight) == ("behaviour", "none")


def test_every_preset_has_a_specification() -> None:
    assert set(SPECIFICATIONS) == set(PRESETS) - set(ELSEWHERE)


def test_a_sequence_without_a_valid_reward_has_no_effect_in_the_loss() -> None:
    """Neither its objective, KL and entropy nor its share of the denominator."""
    logits, rows = rich_batch(1)
    settings: dict[str, Any] = {"kl_to_ref_coeff": 0.3, "entropy_coeff": 0.1}
    for i, row in enumerate(rows):
        row["reward_valid"] = torch.tensor([i != 2])
    loss = GRPOLoss(Table(logits.clone()), **settings)
    total(loss(lazy_stack(rows))).backward()
    others = GRPOLoss(Table(logits.clone()), **settings)
    total(others(lazy_stack([row for i, row in enumerate(rows) if i != 2]))).backward()
    torch.testing.assert_close(
        loss.actor_network.logits.grad, others.actor_network.logits.grad, rtol=1e-12, atol=0
    )
    assert loss.actor_network.logits.grad[2].abs().max() == 0


def test_staleness_may_be_that_of_each_token() -> None:
    logits, rows = rich_batch(2)
    for row in rows:
        row["staleness"] = torch.arange(len(row["tokens", "full"])) % 3
    got = total(GRPOLoss(Table(logits), proximal="interpolated")(lazy_stack(rows)))
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        places = row["masks", "all_assistant_mask"].nonzero().flatten().tolist()
        for t in places:
            cur = logits[int(row["row"]), t].log_softmax(0)[row["tokens", "full"][t]]
            sample = row["log_probs", "full"][t]
            d = t % 3
            ratio = torch.exp(cur - (sample + d * cur) / (d + 1))
            loss -= clip(0.2, 0.2)(ratio, cur, row["advantage"][0]) / len(places) / len(rows)
    torch.testing.assert_close(got.detach(), loss)


def test_cispos_clip_fractions_count_the_weights_at_a_bound() -> None:
    loss = CISPOLoss(Table(torch.zeros(1, 6, 2, dtype=torch.float64)), clip_epsilon=(0.5, 4.0))
    out = loss(lazy_stack([one_row([5.5, 5.1, 0.4, 1.2, 4.5], -1.0)]))
    assert (out["clip_fraction_low"].item(), out["clip_fraction_high"].item()) == pytest.approx(
        (0.2, 0.4)
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_reward_is_an_error_unless_marked_invalid(value: float) -> None:
    reward = torch.tensor([1.0, 0.0, value, 0.0])
    group = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"reward must be finite .* 1 values .*: mark them as invalid"
    ):
        F.group_advantage(reward, group, torch.ones(4, dtype=torch.bool))
    got = F.group_advantage(reward, group, torch.tensor([True, True, False, True]), std="none")
    torch.testing.assert_close(got, torch.tensor([2 / 3, -1 / 3, 0.0, -1 / 3]))


@pytest.mark.parametrize(
    "overrides",
    [
        ["algo=sapo", "policy.loss._target_=torchrl_grpo.objectives.GRPOLoss"],
        ["+policy.loss.dual_clip=3"],
        ["+policy.loss.no_such_argument=3"],
        ["+policy.advantage.no_such_argument=3"],
    ],
)
def test_arguments_that_are_not_taken_are_refused_before_anything_loads(
    overrides: list[str],
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"policy\.(loss|advantage)=\{.*\} must be _target_.*: leave out policy\.",
    ):
        prepare(compose_config(*SMALL, *overrides))


@pytest.mark.parametrize("clip_epsilon", [(0.0, 0.0), (1.0, 0.0), 0.0])
def test_clip_bounds_may_lie_at_the_ends_of_their_ranges(clip_epsilon: Any) -> None:
    loss = GRPOLoss(Table(torch.zeros(1, 1, 2)), clip_epsilon=clip_epsilon)
    low, high = clip_epsilon if isinstance(clip_epsilon, tuple) else (clip_epsilon, clip_epsilon)
    assert (loss.clip_epsilon_low.item(), loss.clip_epsilon_high.item()) == (low, high)
    assert (loss.constant_length, loss.behaviour_cap) == (None, 5.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [
        (0.5, -1.0, 1, 0),
        (0.5, 0.0, 0, 0),
        (0.5, 0.5, 0, 0),
        (2.0, 0.5, 0, 1),
        (2.0, 0.0, 0, 0),
        (2.0, -1.0, 0, 0),
    ],
)
def test_a_token_counts_as_clipped_where_the_clip_takes_its_gradient(
    ratio: float, advantage: float, low: int, high: int
) -> None:
    out = GRPOLoss(Table(torch.zeros(1, 2, 2, dtype=torch.float64)))(
        lazy_stack([one_row([ratio], advantage)])
    )
    assert (out["clip_fraction_low"].item(), out["clip_fraction_high"].item()) == (low, high)


def test_a_torchrl_wrapper_lends_its_model_to_a_scorer(tokenizer: Any, tiny_model: Any) -> None:
    wrapper = TransformersWrapper(
        tiny_model, tokenizer=tokenizer, input_mode="tokens", generate=False, return_log_probs=True
    )
    scorer = GRPOLoss(wrapper).actor_network
    assert isinstance(scorer, WrapperScorer)
    assert scorer.model is wrapper.model

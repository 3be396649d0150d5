"""Corrections for the mismatch of sampling and training: every rule by hand in float64, and in the
loss.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from tensordict import lazy_stack
from torch import Tensor

from tests.support.configs import compose_config
from tests.support.losses import Table, make_batch, tokens_of, total
from torchrl_grpo import functional as F
from torchrl_grpo.assembly.algorithm import make_loss
from torchrl_grpo.checks import Rejection, check_rejection
from torchrl_grpo.config import ConfigError
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.objectives.off_policy import Mismatch
from torchrl_grpo.objectives.output import LARGEST_RATIO, accumulate

MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
SAMPLE = torch.tensor(
    [[0.5, 0.5, 0.9], [0.4, 0.2, 0.1], [0.8, 0.9, 0.9], [0.5, 0.5, 0.5]], dtype=torch.float64
)
TRAINER = torch.tensor(
    [[0.4, 0.75, 0.1], [0.1, 0.4, 0.2], [0.8, 0.1, 0.1], [0.1, 0.9, 0.1]], dtype=torch.float64
)
CURRENT = torch.tensor(
    [[0.6, 0.9, 0.1], [0.3, 0.1, 0.1], [0.2, 0.1, 0.1], [0.1, 0.9, 0.1]], dtype=torch.float64
)
ADVANTAGE = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], dtype=torch.float64).expand(4, 3)
# Ratios of trainer to sampling policy: 0.8 and 1.5; 0.25, 2 and 2; 1. Products 1.2, 1 and 1.
# k3 of a ratio is ratio - 1 - log(ratio).


def mismatch(
    trainer: Tensor, current: Tensor, sample: Tensor, advantage: Tensor, *sizes: int
) -> Mismatch:
    values = {"log_prob": current, "sample_log_prob": sample, "advantage": advantage}
    return Mismatch(tokens_of(*sizes, **values), trainer)


@pytest.mark.parametrize(
    ("rule", "bounds", "rejected"),
    [
        ("token_ratio", (0.5, 1.9), [[0, 0], [1, 1, 1], [0]]),
        ("token_ratio", (0.2, 1.4), [[0, 1], [0, 1, 1], [0]]),
        ("token_ratio", (0.8 - 1e-9, 1.5 + 1e-9), [[0, 0], [1, 1, 1], [0]]),
        # k3: 0.023 and 0.095; 0.636, 0.307 and 0.307; 0
        ("token_k3", (0.0, 0.3), [[0, 0], [1, 1, 1], [0]]),
        ("token_k3", (0.0, 0.31), [[0, 0], [1, 0, 0], [0]]),
        ("sequence_ratio", (0.9, 1.1), [[1, 1], [0, 0, 0], [0]]),
        ("sequence_ratio", (0.0, 1.21), [[0, 0], [0, 0, 0], [0]]),
        # sqrt(1.2) = 1.095; 1; 1
        ("geometric", (0.5, 1.09), [[1, 1], [0, 0, 0], [0]]),
        ("geometric", (0.5, 1.1), [[0, 0], [0, 0, 0], [0]]),
        # means of k3: 0.0589; 0.4167; 0
        ("sequence_k3", (0.0, 0.058), [[1, 1], [1, 1, 1], [0]]),
        ("sequence_k3", (0.0, 0.0595), [[0, 0], [1, 1, 1], [0]]),
        ("outlier", (0.5, 3.0), [[0, 0], [1, 1, 1], [0]]),
        ("outlier", (0.2, 1.4), [[1, 1], [1, 1, 1], [0]]),
        # of the current policy: log(4/3) + log(2) + log(1), over 3, is 0.327; log(4) is 1.386
        ("off_policy", (0.0, 0.32), [[0, 0], [1, 1, 1], [1]]),
        ("off_policy", (0.0, 0.33), [[0, 0], [0, 0, 0], [1]]),
        # it has moved up by 0.1 and 0.4, down by 0.1, 0.1 and 0, down by 0.6
        ("dppo_tv", (0.15, 0.3), [[0, 1], [0, 0, 0], [1]]),
        ("dppo_tv", (0.05, 0.5), [[0, 0], [1, 1, 0], [1]]),
        # KL of (0.5 | 0.6) is 0.0204, of (0.5 | 0.9) 0.511, of (0.4 | 0.3) 0.0226, of (0.2 | 0.1) 0.0444,
        # of (0.8 | 0.2) 0.832
        ("dppo_kl", (0.0226, 0.5), [[0, 1], [0, 1, 0], [1]]),
        ("dppo_kl", (0.045, 0.52), [[0, 0], [0, 0, 0], [1]]),
        ("dppo_kl", (0.9, 0.0203), [[1, 1], [0, 0, 0], [0]]),
    ],
)
def test_rejections_by_hand(
    rule: Any, bounds: tuple[float, float], rejected: list[list[int]]
) -> None:
    sizes = MASK.sum(1).tolist()
    log_probs = (probs.log()[MASK] for probs in (TRAINER, CURRENT, SAMPLE))
    got = getattr(mismatch(*log_probs, ADVANTAGE[MASK], *sizes), rule)(*bounds)
    parts = got.split(sizes)
    assert [part.int().tolist() for part in parts] == [*rejected, []]


def test_tokens_against_their_advantage_stay_with_dppo() -> None:
    """Such tokens have a positive advantage and a probability that fell far, or the opposite."""
    sample = torch.tensor([0.9, 0.1]).log()
    current = torch.tensor([0.1, 0.9]).log()
    advantage = torch.tensor([1.0, -1.0])
    gap = mismatch(current, current, sample, advantage)
    assert not gap.dppo_tv(0.01, 0.01).any()
    assert not gap.dppo_kl(0.01, 0.01).any()
    gap = mismatch(current, current, sample, -advantage)
    assert gap.dppo_tv(0.01, 0.01).all()
    assert gap.dppo_kl(0.01, 0.01).all()


def test_what_is_at_a_bound_and_an_advantage_of_0_are_kept() -> None:
    sample = torch.tensor([0.5]).log()
    current = torch.zeros(1)
    one = torch.ones(1)
    gap = mismatch(sample, current, sample, one)
    for rule in ("token_ratio", "sequence_ratio", "geometric", "outlier"):
        assert not getattr(gap, rule)(1.0, 1.0).any()
    assert not gap.dppo_tv(0.5, 0.5).any()
    assert not mismatch(sample, current, sample, 0 * one).dppo_tv(0.1, 0.1).any()
    back = mismatch(sample, -one, -0.5 * one, -one)
    assert not back.off_policy(0.0, 0.5).any()
    assert back.off_policy(0.0, 0.4).all()
    back = mismatch(sample, -one, -0.5 * one, 0 * one)
    assert not back.off_policy(0.0, 0.4).any()
    assert not back.dppo_kl(0.0, 0.0).any()


def test_each_rule_of_rejection_is_a_method() -> None:
    assert all(callable(getattr(Mismatch, rule)) for rule in get_args(Rejection))


@pytest.mark.parametrize(
    ("bound", "weights"),
    [("truncate", [0.7, 0.7, 1.0, 1.5]), ("mask", [0.0, 0.7, 1.0, 0.0])],
)
def test_a_weight_has_a_lower_bound_too(bound: Any, weights: list[float]) -> None:
    log_ratio = torch.tensor([0.25, 0.7, 1.0, 2.0], dtype=torch.float64).log()
    got = F.bounded_weight(log_ratio, bound, 1.5, 0.7)
    torch.testing.assert_close(got, torch.tensor(weights, dtype=torch.float64))


def test_bounds_of_a_number() -> None:
    got = check_rejection(
        {"geometric": 2, "outlier": [1e-4, 100], "dppo_tv": 0.2, "dppo_kl": (0.1, 0.3), "off_policy": 0.5}
    )  # fmt: skip
    assert got == {
        "geometric": (0.5, 2.0),
        "outlier": (1e-4, 100.0),
        "dppo_tv": (0.2, 0.2),
        "dppo_kl": (0.1, 0.3),
        "off_policy": (0.0, 0.5),
    }
    assert check_rejection(None) == {}


@pytest.mark.parametrize(
    ("rejection", "key"),
    [
        ("{nope: 1}", "policy.rejection.nope"),
        ("{geometric: 0.5}", "policy.rejection.geometric"),
        ("{geometric: [1.1, 2]}", "policy.rejection.geometric"),
        ("{geometric: [0.5, 0.9]}", "policy.rejection.geometric"),
        ("{outlier: true}", "policy.rejection.outlier"),
        ("{outlier: [0.5, 1, 2]}", "policy.rejection.outlier"),
        ("{outlier: [-0.5, 2]}", "policy.rejection.outlier"),
        ("{off_policy: [0, 1]}", "policy.rejection.off_policy"),
        ("{sequence_k3: 0}", "policy.rejection.sequence_k3"),
        ("{dppo_tv: x}", "policy.rejection.dppo_tv"),
        ("3", "policy.rejection"),
    ],
)
def test_bad_rejections_are_refused_by_their_key(rejection: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        compose_config(f"policy.rejection={rejection}")


def test_a_floor_above_the_cap_is_refused() -> None:
    bounds = ("policy.behaviour_cap=2", "policy.behaviour_floor=3")
    with pytest.raises(ConfigError, match=r"policy\.behaviour_floor"):
        compose_config("algo=icepop", *bounds)
    logits, _ = make_batch(0)
    with pytest.raises(ValueError, match="behaviour_floor"):
        GRPOLoss(Table(logits), behaviour_floor=6.0)


def batch_of(seed: int, lengths: tuple[int, ...] = (9, 9, 4, 12)) -> tuple[Tensor, Any]:
    logits, rows = make_batch(seed, lengths)
    generator = torch.Generator().manual_seed(seed)
    for row in rows:
        sample = row["log_probs", "full"]
        noise = torch.randn(len(sample), generator=generator, dtype=torch.float64)
        row["prox_log_probs", "full"] = sample + 0.3 * noise
    rows[2]["masks", "all_assistant_mask"].zero_()
    return logits, lazy_stack(rows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("proximal", ["behaviour", "recomputed"])
def test_what_is_rejected_leaves_the_objective_alone(seed: int, proximal: Any) -> None:
    """Value and gradient are those with an advantage of 0; the divisor and the KL term stay."""
    logits, batch = batch_of(seed)
    rejection = {"token_ratio": [0.6, 1.5], "geometric": 1.15, "off_policy": 0.15}
    settings: dict[str, Any] = {"proximal": proximal, "kl_to_ref_coeff": 0.3}
    loss = GRPOLoss(Table(logits.clone()), rejection=rejection, **settings)
    out = loss(batch)
    total(out).backward()

    plain = GRPOLoss(Table(logits.clone()), **settings)
    scored = plain.actor_network(batch.copy())
    mask = batch.get(("masks", "all_assistant_mask"), as_padded_tensor=True)
    sample = batch.get(("log_probs", "full"), as_padded_tensor=True)
    current = scored.get(("cur_log_probs", "full")).detach()
    recomputed = batch.get(("prox_log_probs", "full"), as_padded_tensor=True)
    trainer = current if proximal == "behaviour" else recomputed
    advantage = batch["advantage"].expand_as(current).clone()
    removed = 0
    rejected = torch.zeros_like(mask)
    for row in range(len(batch)):
        places = mask[row].nonzero().flatten().tolist()
        gaps = {t: (trainer[row, t] - sample[row, t]).item() for t in places}
        drift = [(sample[row, t] - current[row, t]).item() for t in places]
        mean = sum(gaps.values()) / max(1, len(places))
        bad = [t for t in places if not 0.6 <= math.exp(gaps[t]) <= 1.5]
        stale = advantage[row, 0] < 0 and bool(drift) and sum(drift) / len(drift) > 0.15
        if stale or not 1 / 1.15 <= math.exp(mean) <= 1.15:
            bad = places
        rejected[row, bad] = True
        removed += bool(places) and bad == places
    batch["advantage"] = torch.where(rejected, 0.0, advantage).unsqueeze(-1)
    expected = plain(batch)
    total(expected).backward()
    torch.testing.assert_close(total(out), total(expected))
    torch.testing.assert_close(loss.actor_network.logits.grad, plain.actor_network.logits.grad)
    assert 0 < rejected.sum() < mask.sum()
    assert out["rejected_tokens"].item() == pytest.approx((rejected.sum() / mask.sum()).item())
    assert out["rejected_sequences"].item() == pytest.approx(removed / 3)
    assert set(out.keys()) == set(loss.out_keys) | {"kl_to_inference"} & set(out.keys())


@pytest.mark.parametrize("staleness", [0.0, 3.0])
def test_mismatch_with_interpolated_log_probs_is_the_trainers(staleness: float) -> None:
    logits, rows = make_batch(3)
    for row in rows:
        row["staleness"] = torch.tensor([staleness])
    outs = [
        GRPOLoss(Table(logits), proximal=proximal, rejection={"token_ratio": 1.2})(lazy_stack(rows))
        for proximal in ("behaviour", "interpolated")
    ]
    names = [name for name in outs[0].keys() if name.startswith(("mismatch", "rejected"))]  # noqa: SIM118
    assert outs[0]["mismatch_k3"] > 0 and outs[0]["rejected_tokens"] > 0
    assert all(torch.equal(outs[0][name], outs[1][name]) for name in names)


def test_metrics_of_the_mismatch_by_hand() -> None:
    logits, _ = make_batch(0)
    loss = GRPOLoss(Table(logits), rejection={"outlier": 1.9})
    out = loss(with_mismatch(loss))
    ratios = [0.8, 1.5, 0.25, 2.0, 2.0, 1.0]
    k1 = sum(-math.log(ratio) for ratio in ratios) / 6
    expected = {
        "mismatch_k1": k1,
        "mismatch_k3": sum(ratio - 1 for ratio in ratios) / 6 + k1,
        "mismatch_chi2": sum(ratio**2 for ratio in ratios) / 6 - 1,
        "mismatch_ppl_gap": -math.log(1.2) / 2 / 3,  # the others are 0
        LARGEST_RATIO: 2.0,
        "rejected_tokens": 0.5,
        "rejected_tokens_outlier": 0.5,
        "rejected_sequences": 1 / 3,
        "rejected_sequences_outlier": 1 / 3,
    }
    assert {name: out[name].item() for name in expected} == pytest.approx(expected, abs=1e-12)


def with_mismatch(loss: GRPOLoss) -> Any:
    """Give a loss an actor with the trainer's log-probs; return the batch."""
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule

    loss.actor_network = TensorDictModule(
        lambda tokens: (TRAINER.log(), torch.zeros_like(TRAINER)),
        in_keys=[("tokens", "full")],
        out_keys=[("cur_log_probs", "full"), ("entropy", "full")],
    )
    return TensorDict(
        {
            ("tokens", "full"): torch.zeros(4, 3, dtype=torch.long),
            ("masks", "all_assistant_mask"): MASK,
            ("log_probs", "full"): SAMPLE.log(),
            "advantage": ADVANTAGE[:, :1],
        },
        [4],
    )


@pytest.mark.parametrize("weight", ["none", "mask"])
def test_metrics_of_micro_batches_add_up_to_those_of_the_batch(weight: Any) -> None:
    logits, batch = batch_of(1, (7, 7, 7, 7))
    settings: dict[str, Any] = {"behaviour_weight": weight, "behaviour_cap": 1.2}
    loss = GRPOLoss(Table(logits), proximal="recomputed", rejection={"geometric": 1.1}, **settings)
    whole = loss(batch)
    parts: dict[str, Tensor] = {}
    for part in loss.normalize(batch.contiguous()).split(1):
        accumulate(parts, loss(part))
    for name in loss.out_keys:
        if name.startswith(("mismatch", "rejected", "loss")):
            torch.testing.assert_close(parts[name], whole[name], msg=name)
    assert whole["rejected_sequences"] > 0


@pytest.mark.parametrize(
    ("algo", "rejection", "weight"),
    [
        ("icepop", {}, ("recomputed", "mask", "token", 0.5, 5.0)),
        ("geo_mask", {"geometric": (0.99, 1.01)}, ("recomputed", "truncate", "token", 0.0, 2.0)),
        ("dppo_tv", {"dppo_tv": (0.2, 0.2)}, ("behaviour", "none", "token", 0.0, 5.0)),
    ],
)
def test_presets_of_corrections(algo: str, rejection: Any, weight: tuple[Any, ...]) -> None:
    config = compose_config(f"algo={algo}", "train.epochs=2")
    loss = make_loss(config, Table(make_batch(0)[0]))
    got = (loss.proximal, loss.behaviour_weight, loss.behaviour_level)
    assert (*got, loss.behaviour_floor, loss.behaviour_cap) == weight
    assert loss.rejection == rejection

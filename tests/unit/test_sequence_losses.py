"""GMPO, VESPO and the unbiased KL: value and gradient compared with plain loops in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from tests.support.configs import compose_config
from tests.support.losses import Table, make_batch, tokens_of, total
from torchrl_grpo.assembly.algorithm import make_loss
from torchrl_grpo.config import ConfigError
from torchrl_grpo.models.segments import Segments
from torchrl_grpo.objectives import GMPO, VESPO, GMPOLoss, GRPOLoss, Surrogate, Tokens, VESPOLoss


def gmpo(log_ratios: list[Tensor], log_probs: list[Tensor], advantage: float) -> Tensor:
    most = torch.tensor(0.3 if advantage > 0 else -0.2, dtype=torch.float64)
    kept = [
        most if (value > most if advantage > 0 else value < most) else value for value in log_ratios
    ]
    return advantage * torch.exp(sum(kept) / len(kept))


def vespo(log_ratios: list[Tensor], log_probs: list[Tensor], advantage: float) -> Tensor:
    """Return the mean over its tokens; the batch's average is over sequences here."""
    k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    weight = math.exp(sum(value.item() for value in log_ratios))
    gate = weight**k * math.exp(decay * (1 - weight))
    return gate * advantage * sum(log_probs) / len(log_probs)


def by_loop(logits: Tensor, rows: list[TensorDict], objective: Any) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        places = row["masks", "all_assistant_mask"].nonzero().flatten().tolist()
        log_p = logits[int(row["row"])].log_softmax(-1)
        log_probs = [log_p[t, int(row["tokens", "full"][t])] for t in places]
        sampled = [row["log_probs", "full"][t] for t in places]
        gaps = [cur - old for cur, old in zip(log_probs, sampled, strict=True)]
        loss = loss - objective(gaps, log_probs, row["advantage"].item()) / len(rows)
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("kind", "settings", "objective"),
    [(GMPOLoss, {"clip_epsilon": (0.2, 0.3)}, gmpo), (VESPOLoss, {}, vespo)],
)
def test_losses_of_whole_sequences_equal_plain_loops(
    kind: type[GRPOLoss], settings: Any, objective: Any, seed: int
) -> None:
    logits, rows = make_batch(seed)
    loss = kind(Table(logits.clone()), **settings)
    out = total(loss(lazy_stack(rows)))
    out.backward()
    value, gradient = by_loop(logits, rows, objective)
    torch.testing.assert_close(out.detach(), value)
    torch.testing.assert_close(loss.actor_network.logits.grad, gradient)


def test_the_sequence_losses_by_hand() -> None:
    """Ratios 2 and 1/4, and 8 of another sequence: with A = 1 clipped at e^0.4."""
    ratio = torch.tensor([2.0, 0.25, 8.0], dtype=torch.float64)
    one = torch.ones_like(ratio)

    def first(objective: Surrogate, advantage: float, scale: float = 1.0) -> float:
        values = {"ratio": scale * ratio, "advantage": advantage * one, "log_prob": one}
        return objective(tokens_of(2, 1, **values))[0].item()

    assert first(GMPO(), 1.0) == pytest.approx(math.exp(0.4 / 2) * 0.5)
    assert first(GMPO(), -1.0) == pytest.approx(-math.exp(-0.4 / 2) * math.sqrt(2))
    assert first(VESPO(), 1.0) == pytest.approx(0.25 * math.exp(1.5))  # W = 1/2
    assert first(VESPO(), -1.0) == pytest.approx(-0.125 * math.exp(1.0))
    assert first(VESPO(), 1.0, 1e9) == 0.0


def test_clipped_log_ratios_are_counted() -> None:
    loss = GMPOLoss(Table(make_batch(0)[0]))
    ratio = torch.tensor([1.4, 1.5, 0.6, 0.7])
    values = {"ratio": ratio, "advantage": torch.tensor([1.0, 1.0, -1.0, -1.0])}
    low, high = loss.objective.clipped(Tokens(values, Segments.of([4])))
    assert high.tolist() == [False, True, False, False]
    assert low.tolist() == [False, False, True, False]


@pytest.mark.parametrize("kind", [GMPOLoss, VESPOLoss])
def test_a_loss_with_its_own_bound_refuses_another(kind: type[GRPOLoss]) -> None:
    with pytest.raises(ValueError, match="dual_clip"):
        kind(Table(make_batch(0)[0]), dual_clip=3.0)


@pytest.mark.parametrize("name", ["k_positive", "k_negative", "lambda_positive", "lambda_negative"])
def test_exponents_of_vespo_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        VESPOLoss(Table(make_batch(0)[0]), **{name: 0.0})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_unbiased_kl_is_the_ratio_times_the_estimate(seed: int, level: Any) -> None:
    logits, rows = make_batch(seed)
    settings: dict[str, Any] = {"ratio_level": level, "kl_to_ref_coeff": 0.3}
    loss = GRPOLoss(Table(logits.clone()), kl_bias_correction=True, **settings)
    out = loss(lazy_stack(rows))["loss_kl_to_ref"]
    out.backward()

    logits = logits.clone().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for row in rows:
        places = row["masks", "all_assistant_mask"].nonzero().flatten().tolist()
        log_p = logits[int(row["row"])].log_softmax(-1)
        current = [log_p[t, int(row["tokens", "full"][t])] for t in places]
        gaps = [c - row["log_probs", "full"][t] for c, t in zip(current, places, strict=True)]
        mean = sum(gaps) / len(gaps)
        for value, gap, t in zip(current, gaps, places, strict=True):
            away = row["next", "ref_log_probs", "full"][t] - value
            ratio = torch.exp(gap if level == "token" else mean)
            expected = expected + 0.3 * ratio * (torch.exp(away) - away - 1) / len(places) / 4
    expected.backward()
    torch.testing.assert_close(out.detach(), expected.detach())
    torch.testing.assert_close(loss.actor_network.logits.grad, logits.grad)


@pytest.mark.parametrize("more", ["policy.kl_coef=0", "policy.kl_in_reward=true"])
def test_an_unbiased_kl_needs_a_kl_in_the_loss(more: str) -> None:
    with pytest.raises(ConfigError, match=r"policy\.kl_bias_correction"):
        compose_config("policy.kl_bias_correction=true", more)
    config = compose_config("policy.kl_bias_correction=true", "policy.kl_coef=0.1")
    assert make_loss(config, Table(make_batch(0)[0])).kl_bias_correction

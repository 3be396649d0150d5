"""Properties of the pure functions that hold for every input, tested with hypothesis.

``tests/unit/test_functional.py`` tests their values by hand, and
``tests/unit/test_group_advantage.py`` those of group advantages.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.losses import Table, padded, rows_of, tokens_of
from torchrl_grpo import functional as F
from torchrl_grpo.objectives import CISPO, SAPO, GRPOLoss
from torchrl_grpo.objectives.tokens import token_weights

junk = st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
small = st.floats(-3, 3)
advantages = st.floats(-5, 5)
ratios = st.floats(1e-3, 1e3)
clips = st.floats(0, 0.9)


def column(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1)


@st.composite
def masks(draw: Any, *, empty_rows: bool = True) -> Tensor:
    """Draw masks [N, T] with at least one True."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    least = 0 if empty_rows else 1
    row = st.lists(st.booleans(), min_size=width, max_size=width).filter(
        lambda values: sum(values) >= least
    )
    mask = torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))
    assume(bool(mask.any()))
    return mask


def filled(mask: Tensor, data: Any, inside: Any = small, outside: Any = junk) -> Tensor:
    """Return [N, T] in float64 with other values outside of the mask."""
    values = [data.draw(inside if keep else outside) for keep in mask.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view(mask.shape)


# Reductions


@given(masks(), st.integers(1, 9))
def test_token_weights_add_up(mask: Tensor, length: int) -> None:
    """The sum is 1 for a mean over sequences or tokens, and the number of tokens over the constant
    for a sum.
    """
    sequences, tokens = int(mask.any(-1).sum()), int(mask.sum())
    rows = rows_of(mask)
    sequence_mean, token_mean, constant = (
        padded(mask, token_weights(rows, aggregation, constant_length=length))
        for aggregation in ("sequence_mean", "token_mean", "constant")
    )
    assert sequence_mean.sum().item() == pytest.approx(1, rel=1e-5)
    assert token_mean.sum().item() == pytest.approx(1, rel=1e-5)
    assert constant.sum().item() == pytest.approx(tokens / length / sequences, rel=1e-5)
    for weights in (sequence_mean, token_mean, constant):
        assert weights.shape == mask.shape and weights.dtype == torch.float32
        assert ((weights > 0) == mask).all()
    # Each sequence has the same weight, or each token has.
    assert sequence_mean.sum(-1)[mask.any(-1)].tolist() == pytest.approx(
        [1 / sequences] * sequences, rel=1e-5
    )
    assert token_mean[mask].tolist() == pytest.approx([1 / tokens] * tokens, rel=1e-5)
    assert constant[mask].tolist() == pytest.approx([1 / length / sequences] * tokens, rel=1e-5)


# KL estimators

vocabularies = st.integers(2, 8).flatmap(
    lambda size: st.tuples(*[st.lists(small, min_size=size, max_size=size)] * 2)
)


@given(vocabularies)
def test_expected_over_a_vocabulary_k1_and_k3_are_the_kl(
    logits: tuple[list[float], list[float]],
) -> None:
    log_p, log_q = (torch.tensor(values, dtype=torch.float64).log_softmax(0) for values in logits)
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
    for estimate in (F.kl_k1, F.kl_k3):
        assert (log_p.exp() * estimate(log_p, log_q)).sum().item() == pytest.approx(
            kl.item(), abs=1e-9
        )


@given(vocabularies)
def test_expected_gradients_of_the_kl_estimators(logits: tuple[list[float], list[float]]) -> None:
    """At samples of p, as a loss: k1's is 0, k2's that of KL(p || q), k3's that of KL(q || p)."""
    raw = torch.tensor(logits[0], dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor(logits[1], dtype=torch.float64).log_softmax(0)

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, raw)[0]

    log_p = raw.log_softmax(0)
    sampled = log_p.detach().exp()
    forward = gradient((log_p.exp() * (log_p - log_q)).sum())
    log_p = raw.log_softmax(0)
    backward = gradient((log_q.exp() * (log_q - log_p)).sum())
    for name, expected in {"k1": torch.zeros_like(forward), "k2": forward, "k3": backward}.items():
        got = gradient((sampled * F.KL_ESTIMATORS[name](raw.log_softmax(0), log_q)).sum())
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


@given(st.floats(-60, 0), st.floats(-60, 0))
def test_kl_estimators_are_0_at_equality_and_finite_far_from_it(a: float, b: float) -> None:
    log_p, log_q = column([a]), column([b])
    for estimate in F.KL_ESTIMATORS.values():
        assert estimate(log_p, log_p).item() == 0
    assert 0 <= F.kl_k3(log_p, log_q).item() + 1e-12 <= math.exp(20)
    assert F.kl_k1(log_p, log_q).item() == -F.kl_k1(log_q, log_p).item() == a - b
    assert F.kl_k2(log_p, log_q).item() == F.kl_k2(log_q, log_p).item() >= 0


# Objectives


@given(st.floats(-60, 0), st.floats(-60, 0))
def test_importance_ratios_are_inverse_to_one_another_and_bounded(a: float, b: float) -> None:
    forth = F.importance_ratio(column([a]), column([b])).item()
    back = F.importance_ratio(column([b]), column([a])).item()
    assert forth * back == pytest.approx(1)
    assert forth == pytest.approx(math.exp(max(-20, min(20, a - b))))


@given(ratios, advantages, clips, st.floats(1.01, 5))
def test_dual_clip_bounds_the_objective_of_a_negative_advantage_alone(
    ratio: float, value: float, clip: float, bound: float
) -> None:
    plain, bounded = (
        GRPOLoss(Table(torch.zeros(1, 1, 2)), clip_epsilon=clip, dual_clip=dual)
        for dual in (None, bound)
    )
    zero = torch.zeros(1, dtype=torch.float64)
    advantage = zero + value
    values = {"log_prob": zero + math.log(ratio), "sample_log_prob": zero, "entropy": zero}
    values |= {"advantage": advantage, "weights": zero + 1, "token_roles": zero == 0}
    surrogate, got = (
        loss.of_tokens(tokens_of(**values))["objective"].item() for loss in (plain, bounded)
    )
    assert got == (surrogate if value >= 0 else max(surrogate, (bound * advantage).item()))


@given(ratios, st.floats(-10, 0), advantages, st.floats(0, 1), st.floats(0, 4))
def test_cispos_gradient_is_its_bounded_weight_times_the_advantage(
    ratio: float, log_prob: float, value: float, low: float, high: float
) -> None:
    """The gradient is the same if the weight is at a bound, and none of it goes through the ratio."""
    r = column([ratio]).requires_grad_()
    p = column([log_prob]).requires_grad_()
    t = tokens_of(ratio=r, log_prob=p, advantage=column([value]))
    objective = CISPO(low, high).double()(t)
    through_ratio, through_log_prob = torch.autograd.grad(
        objective.sum(), (r, p), allow_unused=True
    )
    weight = max(1 - low, min(1 + high, ratio))
    assert objective.item() == pytest.approx(weight * value * log_prob)
    assert through_ratio is None
    assert through_log_prob.item() == pytest.approx(weight * value)


@given(ratios, advantages, st.floats(0.1, 5), st.floats(0.1, 5))
def test_sapos_slope_is_the_advantage_at_ratio_1_and_smaller_elsewhere(
    ratio: float, value: float, positive: float, negative: float
) -> None:
    tau = positive if value > 0 else negative

    def slope(at: float) -> float:
        r = column([at]).requires_grad_()
        return torch.autograd.grad(
            SAPO(positive, negative)(tokens_of(ratio=r, advantage=column([value]))).sum(), r
        )[0].item()

    sigmoid = 1 / (1 + math.exp(-min(tau * (ratio - 1), 700)))
    assert slope(1.0) == pytest.approx(value, rel=1e-12)
    assert slope(ratio) == pytest.approx(4 * sigmoid * (1 - sigmoid) * value, rel=1e-9, abs=1e-12)
    assert abs(slope(ratio)) <= abs(value) + 1e-12


@given(masks(), small, st.data())
def test_a_sequences_log_ratio_is_its_mean_over_its_own_tokens(
    mask: Tensor, shift: float, data: Any
) -> None:
    values = filled(mask, data)
    rows = rows_of(mask)
    got = rows.mean(values[mask])
    for row, keep, mean in zip(values, mask, got.tolist(), strict=True):
        inside = row[keep].tolist()
        assert mean == pytest.approx(math.fsum(inside) / len(inside) if inside else 0.0, abs=1e-12)
    moved = rows.mean((values + shift)[mask]) - got
    assert moved.tolist() == pytest.approx([shift * float(keep.any()) for keep in mask], abs=1e-12)

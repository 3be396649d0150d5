"""The pure maths, against hand computations, closed forms and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.losses import tokens_of
from torchrl_grpo import functional as F
from torchrl_grpo.objectives import Clip


def test_kl_estimators_by_hand() -> None:
    """p = 0.5, q = 0.25: k1 = ln 2; k2 = (ln 2)^2 / 2; k3 = 1/2 - 1 + ln 2."""
    log_p = torch.tensor(0.5).log()
    log_q = torch.tensor(0.25).log()
    torch.testing.assert_close(F.kl_k1(log_p, log_q), torch.tensor(math.log(2)))
    torch.testing.assert_close(F.kl_k2(log_p, log_q), torch.tensor(math.log(2) ** 2 / 2))
    torch.testing.assert_close(F.kl_k3(log_p, log_q), torch.tensor(0.5 - 1 + math.log(2)))


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.5, 2.0, 2.56, 0.0),  # clipped above at 1.28
        (1.5, -2.0, -3.0, -2.0),  # pessimistic: no clip for a negative advantage above 1
        (0.5, -2.0, -1.6, 0.0),  # clipped below at 0.8
        (0.5, 2.0, 1.0, 2.0),
        (1.2, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate_and_its_gradient_by_hand(
    ratio: float, advantage: float, value: float, slope: float
) -> None:
    r = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    out = Clip(0.2, 0.28)(tokens_of(ratio=r, advantage=advantages))
    out.sum().backward()
    assert out.item() == pytest.approx(value)
    assert r.grad is not None
    assert r.grad.item() == pytest.approx(slope)


def test_effective_sample_size_of_equal_and_of_single_weights() -> None:
    equal = torch.full((8,), 3.0)
    single = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0])
    assert F.effective_sample_size(equal.mean(), equal.square().mean()).item() == pytest.approx(1.0)
    assert F.effective_sample_size(single.mean(), single.square().mean()).item() == pytest.approx(
        1 / 8
    )


@pytest.mark.parametrize(
    ("mean", "std"), [("median", "group"), ("group", "median"), ("median", "median")]
)
def test_an_unknown_baseline_or_scale_is_refused_with_the_choices(mean: str, std: str) -> None:
    message = (
        rf"mean='{mean}' must be one of \('group', .*'none'\) and std='{std}' one of "
        rf"\('group', .*: use 'group' for"
    )
    with pytest.raises(ValueError, match=message):
        F.group_advantage(torch.ones(2), torch.zeros(2), torch.ones(2) > 0, mean=mean, std=std)  # type: ignore[arg-type]


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    """Rewards 0 and 2: mean 1, standard deviation sqrt(2), so 1 / (sqrt(2) + 0.5)."""
    got = F.group_advantage(torch.tensor([0.0, 2.0]), torch.zeros(2), torch.ones(2) > 0, eps=0.5)
    expected = 1 / (2**0.5 + 0.5)
    torch.testing.assert_close(got, torch.tensor([-expected, expected]))


def test_advantages_of_large_rewards_are_computed_in_float64() -> None:
    """In float32 the mean of these rewards is off by 2/3, because 2^24 + 4/3 is not representable."""
    reward = torch.tensor([2.0**24, 2.0**24 + 2, 2.0**24 + 2])
    got = F.group_advantage(reward, torch.zeros(3), torch.ones(3) > 0, std="none")
    torch.testing.assert_close(got, torch.tensor([-4 / 3, 2 / 3, 2 / 3]))


def test_dynamic_lengths_of_int_type_do_not_round_the_overlong_penalty() -> None:
    """(100 - 7 - 95) / 7 = -2/7, from an int64 length."""
    got = F.overlong_penalty(torch.tensor([95]), 100, 7)
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(-2 / 7, abs=1e-12)


def test_absurd_log_ratios_are_clamped_on_both_sides() -> None:
    far = torch.tensor([100.0, -100.0], dtype=torch.float64)
    zero = torch.zeros_like(far)
    most = F.MAX_LOG_RATIO
    k3 = F.kl_k3(zero, far).tolist()
    assert k3 == pytest.approx([math.exp(most) - 1 - most, math.exp(-most) - 1 + most])
    weight = F.bounded_weight(far, "truncate", math.inf).tolist()
    assert weight == pytest.approx([math.exp(most), math.exp(-most)], rel=1e-12)


def test_a_weight_at_the_cap_is_kept() -> None:
    one = F.bounded_weight(torch.zeros(1), "mask", 1.0)
    assert one.tolist() == [1.0]


def test_a_head_of_16_bits_gives_float32_as_wide_as_its_device_can():
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.bfloat16) for shape in ((3, 8), (5, 8), (5,))
    )
    got = F.head_logits(hidden, weight, bias)
    assert got.dtype == torch.float32
    assert torch.equal(
        got, torch.nn.functional.linear(hidden, weight, bias).float()
    )  # a CPU rounds to 16 bits
    assert F.head_logits(hidden.double(), weight.double()).dtype == torch.float64
    hidden, weight, bias = (
        hidden.to("meta"),
        weight.to("meta"),
        bias.to("meta"),
    )  # for a GPU; it has shapes and dtypes
    with _Products() as products:
        got = F.head_logits(hidden, weight, bias)
    assert (got.dtype, got.shape) == (torch.float32, (3, 5))
    assert products.dtypes == [torch.float32]  # it is not rounded and then widened


class _Products(TorchDispatchMode):
    """Record the output dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.dtypes.append(out.dtype)
        return out

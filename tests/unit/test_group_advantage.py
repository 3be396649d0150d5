"""``group_advantage``: by hand, and every baseline with every scale against a plain loop in exact
fractions.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_grpo import functional as F
from torchrl_grpo.checks import AdvantageMean, AdvantageStd
from torchrl_grpo.transforms.advantage import GroupAdvantage

REWARD = torch.tensor([1.0, 3.0, 0.0, 2.0, 2.0, 0.0, 5.0, 1.0, 1.0])
GROUP = torch.tensor([0, 0, 0, 7, 7, 7, 7, 2, 2])
VALID = torch.tensor([1, 1, 1, 1, 1, 1, 0, 1, 1]) > 0
LENGTH = torch.tensor([2, 1, 5, 1, 3, 4, 9, 2, 3])


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        # means of 4/3, 4/3 and 1
        ("group", "none", [-1 / 3, 5 / 3, -4 / 3, 2 / 3, 2 / 3, -4 / 3, 0, 0, 0]),
        # variances of 7/3 and 4/3
        (
            "group", "group",
            [
                *(x / math.sqrt(7 / 3) for x in (-1 / 3, 5 / 3, -4 / 3)),
                *(x / math.sqrt(4 / 3) for x in (2 / 3, 2 / 3, -4 / 3)), 0, 0, 0,
            ],
        ),
        # means of the others: 3/2, 1/2, 2 and 1, 1, 2
        ("leave_one_out", "none", [-0.5, 2.5, -2, 1, 1, -2, 0, 0, 0]),
        # 10 of 8 rewards
        ("batch", "none", [-0.25, 1.75, -1.25, 0.75, 0.75, -1.25, 0, -0.25, -0.25]),
        # variance (3 * 0.25^2 + 1.75^2 + 2 * 1.25^2 + 2 * 0.75^2) / 7 = 7.5 / 7
        ("batch", "batch", [x / math.sqrt(7.5 / 7) for x in (-0.25, 1.75, -1.25, 0.75, 0.75, -1.25, 0, -0.25, -0.25)]),
        # after the group means: (14/3 + 8/3) / 7
        ("group", "batch", [x / math.sqrt(22 / 21) for x in (-1 / 3, 5 / 3, -4 / 3, 2 / 3, 2 / 3, -4 / 3, 0, 0, 0)]),
        ("none", "none", [1, 3, 0, 2, 2, 0, 0, 1, 1]),
        ("second_best", "none", [0, 2, 0, 0, 0, 0, 0, 0, 0]),
        ("second_best", "group", [0, 2 / math.sqrt(7 / 3), 0, 0, 0, 0, 0, 0, 0]),
        # (2 * 1 + 1 * 3 + 5 * 0) / 8 = 0.625; (1 * 2 + 3 * 2 + 4 * 0) / 8 = 1
        ("length_weighted", "none", [0.375, 2.375, -0.625, 1, 1, -1, 0, 0, 0]),
        ("group", "group_mean", [-0.25, 1.25, -1, 0.5, 0.5, -1, 0, 0, 0]),
        # 6 of 8 are not 0
        ("group", "nonzero", [-4 / 9, 20 / 9, -16 / 9, 8 / 9, 8 / 9, -16 / 9, 0, 0, 0]),
    ],
)  # fmt: skip
def test_advantages_by_hand(mean: Any, std: Any, expected: list[float]) -> None:
    got = F.group_advantage(REWARD, GROUP, VALID, mean=mean, std=std, length=LENGTH)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), atol=3e-6, rtol=0)


class Member(NamedTuple):
    reward: Fraction
    group: int
    valid: bool
    length: int


def average(values: list[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def deviation(values: list[Fraction]) -> float:
    center = average(values)
    return math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1))


def baseline(one: Member, others: list[Member], mean: str) -> Fraction:
    """Return what is taken off a reward; ``others`` of its group or of the batch, without it."""
    everyone = [one, *others]
    if mean == "leave_one_out":
        return average([other.reward for other in others])
    if mean == "length_weighted":
        total = sum(member.length for member in everyone)
        return sum((member.length * member.reward for member in everyone), Fraction(0)) / total
    if mean == "second_best":  # the best member has its lead, the others nothing
        second = max(other.reward for other in others)
        return second if one.reward > second else one.reward
    return average([member.reward for member in everyone])


def by_loop(members: list[Member], mean: str, std: str) -> list[float]:
    def compared(i: int, over: str) -> list[int]:
        return [
            j
            for j, other in enumerate(members)
            if other.valid and (over == "batch" or other.group == members[i].group)
        ]

    centered = []
    for i, one in enumerate(members):
        known = compared(i, mean)
        varies = len({members[j].reward for j in known}) > 1
        others = [members[j] for j in known if j != i]
        least = one.reward if not varies or not one.valid else baseline(one, others, mean)
        centered.append(one.reward - (Fraction(0) if mean == "none" else least))
    out = []
    for i, one in enumerate(members):
        known = compared(i, std)
        spread = [members[j].reward if mean == "second_best" else centered[j] for j in known]
        scale = 1.0
        if std == "group_mean":
            scale = float(average([members[j].reward for j in known] or [one.reward])) + 1e-6
        elif std == "nonzero":
            everyone = compared(i, "batch")
            scale = sum(members[j].reward != 0 for j in everyone) / max(len(everyone), 1) or 1.0
        elif std != "none":
            scale = deviation(spread) + 1e-6 if len(set(spread)) > 1 else math.inf
        out.append(float(centered[i]) / scale if one.valid else 0.0)
    return out


rewards = st.integers(-80, 80).map(lambda value: Fraction(value, 8))
names = st.sampled_from([-(2**40), -1, 5, 2**40])
batches = st.lists(
    st.builds(Member, rewards, names, st.booleans(), st.integers(1, 9)), min_size=1, max_size=12
)


@pytest.mark.slow
@pytest.mark.parametrize("mean", get_args(AdvantageMean))
@given(batches, st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_any_baseline_with_any_scale_equals_a_plain_loop(
    mean: Any, members: list[Member], junk: float
) -> None:
    """Whatever the order, the names of the groups, and the rewards of invalid members."""
    for std in get_args(AdvantageStd):
        if std == "group_mean":
            members = [member._replace(reward=abs(member.reward)) for member in members]
        reward = [float(member.reward) if member.valid else junk for member in members]
        columns = list(zip(*members, strict=True))
        group, valid, length = (torch.tensor(column) for column in columns[1:])
        got = F.group_advantage(
            torch.tensor(reward, dtype=torch.float64),
            group,
            valid,
            mean=mean,
            std=std,
            length=length,
        )
        expected = torch.tensor(by_loop(members, mean, std))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert (got[expected == 0] == 0).all()


def test_a_length_is_that_of_all_samples_of_a_trajectory() -> None:
    """Two trajectories of 1 + 2 and 1 sampled tokens, with rewards 1 and 0, have a baseline of 3/4."""
    mask = torch.tensor([[0, 1, 0], [0, 1, 1], [0, 0, 1]], dtype=torch.bool)
    done = torch.tensor([[False], [True], [True]])
    batch = TensorDict(
        {
            "group_id": torch.zeros(3, 1, dtype=torch.int64),
            ("masks", "all_assistant_mask"): mask,
            "next": {"reward": torch.tensor([[0.0], [1.0], [0.0]]), "done": done},
        },
        [3],
    )
    transform = GroupAdvantage(2, mean="length_weighted", std="none")
    assert transform(batch)["advantage"].flatten().tolist() == [0.25, 0.25, -0.75]
    assert ("masks", "all_assistant_mask") in transform.in_keys


@pytest.mark.parametrize("std", ["group_mean", "nonzero"])
def test_a_batch_of_zeros_has_no_advantage(std: Any) -> None:
    zeros = torch.zeros(4)
    got = F.group_advantage(zeros, zeros.long(), zeros == 0, std=std)
    assert got.tolist() == [0.0] * 4


def test_a_negative_reward_has_no_mean_to_divide_by() -> None:
    with pytest.raises(ValueError, match="reward=-1"):
        F.group_advantage(REWARD - 1, GROUP, VALID, std="group_mean")
    F.group_advantage(REWARD - 1 * VALID + 1, GROUP, VALID, std="group_mean")
    reward = torch.where(VALID, REWARD, -1.0)
    assert F.group_advantage(reward, GROUP, VALID, std="group_mean").isfinite().all()


def test_a_group_of_one_has_no_second_best() -> None:
    for settings in ({"mean": "second_best", "std": "none"}, {"mean": "none", "std": "group_mean"}):
        with pytest.raises(ValueError, match="repeats=1"):
            GroupAdvantage(1, **settings)

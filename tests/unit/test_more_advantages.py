"""The advantages of pass@k, MaxRL, GPG and OPO by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.support.configs import compose_config
from torchrl_grpo import functional as F
from torchrl_grpo.config import ConfigError
from torchrl_grpo.transforms.advantage import GroupAdvantage

REWARD = torch.tensor([1.0, 3.0, 0.0, 2.0, 2.0, 0.0, 5.0, 1.0, 1.0])
GROUP = torch.tensor([0, 0, 0, 7, 7, 7, 7, 2, 2])
VALID = torch.tensor([1, 1, 1, 1, 1, 1, 0, 1, 1]) > 0


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("second_best", "none", [0, 2, 0, 0, 0, 0, 0, 0, 0]),
        ("second_best", "group", [0, 2 / math.sqrt(7 / 3), 0, 0, 0, 0, 0, 0, 0]),
        # means of 4/3, 4/3 and 1
        ("group", "group_mean", [-0.25, 1.25, -1, 0.5, 0.5, -1, 0, 0, 0]),
        # 6 of 8 are not 0
        ("group", "nonzero", [-4 / 9, 20 / 9, -16 / 9, 8 / 9, 8 / 9, -16 / 9, 0, 0, 0]),
    ],
)
def test_advantages_by_hand(mean: Any, std: Any, expected: list[float]) -> None:
    got = F.group_advantage(REWARD, GROUP, VALID, mean=mean, std=std)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), atol=3e-6, rtol=0)


def test_the_best_of_a_group_may_be_the_only_valid_one() -> None:
    valid = torch.tensor([0, 1, 0, 1, 0, 0, 0, 1, 1]) > 0
    got = F.group_advantage(REWARD, GROUP, valid, mean="second_best", std="none")
    assert not got.any()


def test_the_baseline_of_opo_is_a_mean_over_tokens() -> None:
    """(2 * 1 + 1 * 3 + 5 * 0) / 8 = 0.625; (1 * 2 + 3 * 2 + 4 * 0) / 8 = 1; equal rewards give 0."""
    length = torch.tensor([2, 1, 5, 1, 3, 4, 9, 2, 3])
    settings: dict[str, Any] = {"mean": "length_weighted", "std": "none"}
    got = F.group_advantage(REWARD, GROUP, VALID, length=length, **settings)
    assert got.tolist() == [0.375, 2.375, -0.625, 1.0, 1.0, -1.0, 0.0, 0.0, 0.0]
    same = F.group_advantage(REWARD, GROUP, VALID, length=torch.full((9,), 7), **settings)
    torch.testing.assert_close(same, F.group_advantage(REWARD, GROUP, VALID, std="none"))


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


@pytest.mark.parametrize(
    "words",
    [
        ("policy.advantage_mean=second_best", "policy.turn_credit=per_turn"),
        ("policy.advantage_mean=length_weighted", "policy.turn_credit=per_turn"),
        ("policy.advantage_std=group_mean", "policy.advantage_level=token"),
        ("policy.advantage_std=nonzero", "policy.advantage_level=token"),
    ],
)
def test_they_compare_sequences(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=words[0].split("=")[0].replace(".", r"\.")):
        compose_config(*words)


def test_a_group_of_one_has_no_second_best() -> None:
    for settings in ({"mean": "second_best", "std": "none"}, {"mean": "none", "std": "group_mean"}):
        with pytest.raises(ValueError, match="repeats=1"):
            GroupAdvantage(1, **settings)

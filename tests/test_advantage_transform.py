"""GroupAdvantage: on its own, in a replay buffer, in an environment."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer
from torchrl.envs import Compose, RewardSum, TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.test_env import END, EchoTask, TwoTurnTask, respond
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.tasks.base import Problem
from torchrl_grpo.transforms.advantage import GroupAdvantage


def batch_of(rewards: list[float], groups: list[int], valid: list[bool] | None = None) -> TensorDict:
    """A ragged batch: sequence i has i + 1 tokens."""
    rows = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        row = TensorDict({"tokens": {"full": torch.arange(i + 1)}, "next": {"reward": torch.tensor([reward])}})
        row["group_id"] = torch.tensor([group])
        if valid is not None:
            row["reward_valid"] = torch.tensor([valid[i]])
        rows.append(row)
    return lazy_stack(rows)


def values(data: TensorDict) -> list[float]:
    return data["advantage"].squeeze(-1).tolist()


KEYS = ("group_id", ("next", "reward"), "advantage")


# On its own


def test_advantage_is_centred_and_scaled_within_each_group():
    transform = GroupAdvantage(3)
    # Group 4 is (1, 2, 3): mean 2, std 1. Group 9 is (0, 0, 6): mean 2, std sqrt(12).
    out = transform(batch_of([1, 0, 2, 0, 3, 6], [4, 9, 4, 9, 4, 9]))
    std = 12**0.5
    assert values(out) == pytest.approx([-1, -2 / std, 0, -2 / std, 1, 4 / std], abs=2e-6)
    assert out["advantage"].dtype == torch.float32 and out["advantage"].shape == (6, 1)
    assert values(GroupAdvantage(3, std="none")(batch_of([1, 2, 6], [0] * 3))) == [-2, -1, 3]


def test_invalid_rewards_leave_the_group_and_signalless_groups_are_counted():
    transform = GroupAdvantage(3, std="none")
    rewards = [1, 3, 100, 5, 5, 5, 0, 1, 7]
    valid = [True, True, False, True, True, True, False, False, True]
    out = transform(batch_of(rewards, [0] * 3 + [1] * 3 + [2] * 3, valid))
    assert values(out) == [-1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert (transform.num_groups, transform.num_zero_signal_groups, transform.num_invalid) == (3, 2, 3)
    transform.reset_counts()
    assert (transform.num_groups, transform.num_zero_signal_groups, transform.num_invalid) == (0, 0, 0)


def test_a_group_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"repeats=2 members, 1 of 2 have not \(the first has 3\)"):
        GroupAdvantage(2)(batch_of([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]))
    with pytest.raises(ValueError, match="repeats=1 must be at least 2"):
        GroupAdvantage(1)


def test_an_advantage_that_is_there_is_left_alone():
    batch = batch_of([1, 3], [0, 0])
    batch["advantage"] = torch.tensor([[5.0], [6.0]])
    assert values(GroupAdvantage(2)(batch)) == [5, 6]


def test_keys_can_be_named_and_groups_can_be_texts():
    batch = TensorDict({"score": torch.tensor([[1.0], [3.0], [0.0], [4.0]])}, [4])
    batch["query"] = NonTensorStack("a", "b", "a", "b")
    transform = GroupAdvantage(2, std="none", reward_key="score", group_key="query", advantage_key=("loss", "weight"))
    assert transform(batch)["loss", "weight"].tolist() == [[0.5], [-0.5], [-0.5], [0.5]]


# In a replay buffer


@pytest.mark.parametrize("storage", [LazyStackStorage, LazyTensorStorage])
def test_a_buffer_gets_whole_groups_only(storage):
    def make(rewards, groups):
        batch = batch_of(rewards, groups)
        return batch if storage is LazyStackStorage else batch.exclude("tokens").contiguous()

    transform = GroupAdvantage(2, std="none")
    buffer = ReplayBuffer(storage=storage(10), transform=transform)
    buffer.extend(make([1, 2, 3, 6], [0, 1, 0, 2]))
    assert len(buffer) == 2 and transform.num_waiting == 2
    buffer.extend(make([9], [0]))
    assert len(buffer) == 2 and transform.num_waiting == 3
    buffer.extend(make([4, 0, 2], [2, 0, 1]))
    assert len(buffer) == 8 and transform.num_waiting == 0
    stored = {key: buffer[:][key].squeeze(-1).tolist() for key in KEYS}
    assert stored["group_id"] == [0, 0, 2, 2, 0, 0, 1, 1]
    assert stored["advantage"] == [-1, 1, 1, -1, 4.5, -4.5, 0, 0]
    assert transform.num_groups == 4 and transform.num_zero_signal_groups == 1
    # A sample of single members keeps what was computed over the whole group.
    sample = buffer.sample(5)
    expected = dict(zip(stored["next", "reward"], stored["advantage"], strict=True))
    for reward, advantage in zip(*(sample[key].squeeze(-1).tolist() for key in KEYS[1:]), strict=True):
        assert expected[reward] == advantage


def test_extending_leaves_the_callers_batch_as_it_was():
    batch = batch_of([1, 3], [0, 0])
    ReplayBuffer(storage=LazyStackStorage(2), transform=GroupAdvantage(2)).extend(batch)
    assert batch.get("advantage", None) is None


# In an environment


def test_specs_with_the_advantage_are_right(tokenizer):
    class SameLength(EchoTask):
        def problems(self, split):
            return [Problem(letter, letter) for letter in "abcdef"]

    env = TransformedEnv(LLMEnv(SameLength(), tokenizer, num_envs=6, repeats=3), GroupAdvantage(3))
    check_env_specs(env)


@pytest.mark.parametrize("others", [[], [RewardSum()]])
def test_the_advantage_is_written_when_the_last_row_of_a_group_is_done(tokenizer, others):
    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    transform = GroupAdvantage(2, std="none")
    env = TransformedEnv(
        LLMEnv(TwoTurnTask(), tokenizer, num_envs=4, repeats=2, max_turns=2), Compose(transform, *others)
    )
    data = env.reset()
    assert data["advantage"].tolist() == [[0.0]] * 4
    stop, more = [*encode("stop"), END], [*encode("x"), END]
    # Group 0 ends at once, without signal; group 1 has a row that goes on.
    first = respond(env, data, [stop, stop, stop, more])
    assert first["next", "advantage"].tolist() == [[0.0]] * 4
    assert (transform.num_groups, transform.num_zero_signal_groups) == (1, 1)
    second = env.step_mdp(first)
    second.set("_step", ~second["done"])
    last = respond(env, second, [[], [], [], more])
    assert last["next", "reward"].squeeze(-1).tolist() == [1, 1, 1, 2]
    assert last["next", "advantage"].squeeze(-1).tolist() == [0, 0, -0.5, 0.5]
    assert (transform.num_groups, transform.num_zero_signal_groups, transform.num_invalid) == (2, 1, 0)

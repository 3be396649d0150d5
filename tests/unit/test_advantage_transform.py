"""GroupAdvantage: on its own, in a replay buffer, in an environment."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer
from torchrl.envs import Compose, RewardSum, TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.support.echo import EchoTask, TwoTurnTask
from tests.support.envs import END, respond
from tests.support.padded import pad_batch
from tests.support.trajectories import make_trajectory
from torchrl_grpo import keys
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.functional import sampled_token_gae
from torchrl_grpo.tasks.base import Problem
from torchrl_grpo.transforms.advantage import GroupAdvantage
from torchrl_grpo.transforms.reward import RewardShaping
from torchrl_grpo.transforms.whitening import AdvantageWhitening


def batch_of(
    rewards: list[float], groups: list[int], valid: list[bool] | None = None
) -> TensorDict:
    """Return a ragged batch in which sequence i has i + 1 tokens."""
    rows = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        row = TensorDict(
            {"tokens": {"full": torch.arange(i + 1)}, "next": {"reward": torch.tensor([reward])}}
        )
        row["group_id"] = torch.tensor([group])
        if valid is not None:
            row["reward_valid"] = torch.tensor([valid[i]])
        rows.append(row)
    return lazy_stack(rows)


def values(data: TensorDict) -> list[float]:
    return data["advantage"].squeeze(-1).tolist()


def counts(transform: GroupAdvantage) -> tuple[int, int, int]:
    return transform.num_groups, transform.num_zero_variance_groups, transform.num_invalid


KEYS = ("group_id", ("next", "reward"), "advantage")


# On its own


def steps_of_two_trajectories() -> TensorDict:
    steps = [(0.0, False), (0.0, True), (1.0, False), (0.0, True)]
    rows = [
        batch_of([reward], [0])[0].set(("next", "done"), torch.tensor([done]))
        for reward, done in steps
    ]
    return lazy_stack(rows)


def samples_of_a_trajectory() -> TensorDict:
    batch = batch_of([0.0, 1.0, 5.0], [0, 0, 0], [True, True, False])
    for row, trajectory in zip(batch.unbind(0), (3, 3, 4), strict=True):
        row.set(keys.ASSISTANT_MASK, torch.ones(2, dtype=torch.bool)).set(
            keys.ADVANTAGE, row[keys.REWARD] - 1
        )
        row.set(keys.TRAJECTORY, torch.tensor([trajectory]))
    return batch


@pytest.mark.parametrize(
    ("transform", "batch"),
    [
        (GroupAdvantage(2), steps_of_two_trajectories()),
        (RewardShaping(overlong_buffer=2, max_response_tokens=4), samples_of_a_trajectory()),
        (AdvantageWhitening(), samples_of_a_trajectory()),
    ],
)
def test_a_batch_of_the_in_keys_alone_gives_the_same(transform, batch):
    batch = batch.exclude(*transform.out_keys) if keys.ADVANTAGE not in transform.in_keys else batch
    few = transform(batch.select(*transform.in_keys, strict=False))
    whole = transform(batch.clone())
    for key in transform.out_keys:
        assert [row[key].tolist() for row in few.unbind(0)] == [
            row[key].tolist() for row in whole.unbind(0)
        ]


def test_a_direct_call_computes_the_advantage_again():
    transform, batch = GroupAdvantage(2, std="none"), batch_of([1, 3], [0, 0])
    assert values(transform(batch)) == [-1, 1]
    for row in batch.unbind(0):
        row["next", "reward"] = 4 - row["next", "reward"]
    assert values(transform(batch)) == [1, -1]


def test_advantage_is_centered_and_scaled_within_each_group():
    transform = GroupAdvantage(3)
    # Group 4 is (1, 2, 3): mean 2, std 1. Group 9 is (0, 0, 6): mean 2, std sqrt(12).
    out = transform(batch_of([1, 0, 2, 0, 3, 6], [4, 9, 4, 9, 4, 9]))
    std = 12**0.5
    assert values(out) == pytest.approx([-1, -2 / std, 0, -2 / std, 1, 4 / std], abs=2e-6)
    assert out["advantage"].dtype == torch.float32 and out["advantage"].shape == (6, 1)
    assert values(GroupAdvantage(3, std="none")(batch_of([1, 2, 6], [0] * 3))) == [-2, -1, 3]


def test_invalid_rewards_are_left_out_and_zero_variance_groups_counted():
    transform = GroupAdvantage(3, std="none")
    rewards = [1, 3, 100, 5, 5, 5, 0, 1, 7]
    valid = [True, True, False, True, True, True, False, False, True]
    out = transform(batch_of(rewards, [0] * 3 + [1] * 3 + [2] * 3, valid))
    assert values(out) == [-1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert counts(transform) == (3, 2, 3)
    transform.reset_counts()
    assert counts(transform) == (0, 0, 0)


def test_a_group_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"repeats=2 .*1 of 2 .*3\)"):
        GroupAdvantage(2)(batch_of([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]))
    with pytest.raises(ValueError, match="repeats=1 must be at least 2"):
        GroupAdvantage(1)
    one_each = GroupAdvantage(1, mean="batch", std="none")(batch_of([1, 3], [0, 1]))
    assert one_each["advantage"].flatten().tolist() == [-1.0, 1.0]


def test_an_advantage_in_a_replay_buffer_is_left_alone():
    batch = batch_of([1, 3], [0, 0])
    batch["advantage"] = torch.tensor([[5.0], [6.0]])
    buffer = ReplayBuffer(storage=LazyStackStorage(2), transform=GroupAdvantage(2), batch_size=2)
    buffer.extend(batch)
    assert values(buffer[:]) == [5, 6]


def test_keys_can_be_named_and_groups_can_be_texts():
    batch = TensorDict({"score": torch.tensor([[1.0], [3.0], [0.0], [4.0]])}, [4])
    batch["query"] = NonTensorStack("a", "b", "a", "b")
    transform = GroupAdvantage(
        2, std="none", reward_key="score", group_key="query", advantage_key=("loss", "weight")
    )
    assert transform(batch)["loss", "weight"].tolist() == [[0.5], [-0.5], [-0.5], [0.5]]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("group_id", r"no entry group_id, only .*next\.reward.*: write it"),
        (keys.REWARD, r"no entry next\.reward, only .*group_id.*: write it"),
    ],
)
def test_missing_groups_and_rewards_are_named_wherever_the_transform_is(missing, message):
    batch = batch_of([1, 3], [0, 0])
    for row in batch.unbind(0):
        row.del_(missing)
    with pytest.raises(KeyError, match=message):
        GroupAdvantage(2)(batch)
    with pytest.raises(KeyError, match=message):
        ReplayBuffer(storage=LazyStackStorage(2), transform=GroupAdvantage(2)).extend(batch)


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
    assert counts(transform) == (4, 1, 0)
    # A sample of single members keeps the result of the whole group.
    sample = buffer.sample(5)
    expected = dict(zip(stored["next", "reward"], stored["advantage"], strict=True))
    for reward, advantage in zip(
        *(sample[key].squeeze(-1).tolist() for key in KEYS[1:]), strict=True
    ):
        assert expected[reward] == advantage


def test_a_member_of_several_steps_does_not_complete_a_group_alone():
    transform = GroupAdvantage(2, std="none")
    buffer = ReplayBuffer(storage=LazyStackStorage(10), transform=transform)
    buffer.extend(make_trajectory(0, [1.0, 2.0]))
    assert len(buffer) == 0 and transform.num_waiting == 1
    buffer.extend(make_trajectory(0, [0.0, 0.0, 1.0]))
    assert buffer[:]["advantage"].squeeze(-1).tolist() == [1, 1, -1, -1, -1]
    batch = torch.cat([make_trajectory(0, [1.0, 2.0]), make_trajectory(0, [1.0])])
    assert values(GroupAdvantage(2, std="none")(batch)) == [1, 1, -1]


def test_a_trajectory_without_an_end_is_refused():
    batch = make_trajectory(0, [1.0, 2.0])[:1]
    for call in (GroupAdvantage(2), GroupAdvantage(2).inv):
        with pytest.raises(ValueError, match="yield_completed_trajectories=True"):
            call(batch)


def test_members_that_wait_are_in_the_state(tmp_path):
    def make() -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyStackStorage(10), transform=GroupAdvantage(2, std="none", group_key="query")
        )

    rows = [row.set("query", "a") for row in batch_of([1.0, 5.0], [0, 0]).unbind(0)]
    first, second, third = make(), make(), make()
    first.extend(lazy_stack(rows[:1]))
    second.load_state_dict(first.state_dict())
    torch.save(first.state_dict()["_transforms"], tmp_path / "state.pt")
    third._transform.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for buffer in (second, third):
        assert buffer._transform[0].num_waiting == 1
        buffer.extend(lazy_stack(rows[1:]))
        assert values(buffer[:]) == [-2, 2]
        assert [row["tokens", "full"].tolist() for row in buffer[:].unbind(0)] == [[0], [0, 1]]
        assert buffer[:][0]["query"] == "a"


def test_a_prompt_that_comes_twice_is_two_groups_in_a_buffer():
    rewards = [0.0, 1.0, 10.0, 20.0]
    batch = batch_of(rewards, [0, 0, 1, 1])
    for row in batch.unbind(0):
        row.set("query", "the same")
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4), transform=GroupAdvantage(2, std="none", group_key="query")
    )
    buffer.extend(batch)
    assert values(buffer[:]) == [-0.5, 0.5, -5, 5]
    with pytest.raises(ValueError, match="group_key='group_id'"):
        GroupAdvantage(2, group_key="query")(batch)
    assert values(GroupAdvantage(2, std="none")(batch)) == [-0.5, 0.5, -5, 5]


# In an environment


def test_specs_with_the_advantage_are_right(tokenizer):
    class SameLength(EchoTask):
        def problems(self, split):
            return [Problem(letter, letter) for letter in "abcdef"]

    env = TransformedEnv(LLMEnv(SameLength(), tokenizer, num_envs=6, repeats=3), GroupAdvantage(3))
    check_env_specs(env)


def play_two_turns(env, encode) -> tuple[TensorDict, TensorDict]:
    """Play two steps of four dialogs in two groups: one of the second group has a second turn."""
    stop, more = [*encode("stop"), END], [*encode("x"), END]
    first = respond(env, env.reset(), [stop, stop, stop, more])
    second = env.step_mdp(first)
    second.set("_step", ~second["done"])
    return first, respond(env, second, [[], [], [], more])


@pytest.mark.parametrize("others", [[], [RewardSum]])
def test_the_advantage_is_written_when_the_last_row_of_a_group_is_done(tokenizer, encode, others):
    transform = GroupAdvantage(2, std="none")
    env = TransformedEnv(
        LLMEnv(TwoTurnTask(), tokenizer, num_envs=4, repeats=2, max_turns=2),
        Compose(transform, *(other() for other in others)),
    )
    assert env.reset()["advantage"].tolist() == [[0.0]] * 4
    first, last = play_two_turns(env, encode)
    assert first["next", "advantage"].tolist() == [[0.0]] * 4  # group 0 ends without a signal
    assert last["next", "reward"].squeeze(-1).tolist() == [1, 1, 1, 2]
    assert last["next", "advantage"].squeeze(-1).tolist() == [0, 0, -0.5, 0.5]
    assert counts(transform) == (2, 1, 0)


def test_a_batch_statistic_is_over_the_groups_that_are_done(tokenizer, encode):
    """Group 0 is done with rewards 1, 1; group 1 is half done, so at first the batch is (1, 1), then (1, 1, 1, 2)."""
    env = TransformedEnv(
        LLMEnv(TwoTurnTask(), tokenizer, num_envs=4, repeats=2, max_turns=2),
        GroupAdvantage(2, mean="batch", std="none"),
    )
    first, last = play_two_turns(env, encode)
    assert first["next", "advantage"].tolist() == [[0.0]] * 4
    assert last["next", "advantage"].squeeze(-1).tolist() == [-0.25, -0.25, -0.25, 0.75]


# One advantage for each token


def token_row(
    reward: list[float],
    mask: list[int],
    group: int,
    valid: bool = True,
    value: list[float] | None = None,
) -> TensorDict:
    row = TensorDict(
        {keys.ASSISTANT_MASK: torch.tensor(mask).bool(), keys.FULL: torch.arange(len(mask))}
    )
    row[keys.TOKEN_REWARD] = torch.tensor(reward, dtype=torch.float32)
    row[keys.GROUP_ID], row[keys.REWARD_VALID] = torch.tensor([group]), torch.tensor([valid])
    if value is not None:
        row[keys.STATE_VALUE] = torch.tensor(value, dtype=torch.float32)
    return row


def random_token_rows(seed: int, *, values: bool = False, invalid: bool = True) -> list[TensorDict]:
    """Return 3 groups of 4 ragged dialogs: one is invalid, one has no sampled token, and unsampled
    positions hold junk.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(12):
        length = 2 + int(torch.randint(0, 9, (), generator=generator))
        mask = (torch.rand(length, generator=generator) > 0.4).int()
        mask[0] = 0
        if i == 5:
            mask[:] = 0
        reward = torch.randn(length, generator=generator)
        value = torch.randn(length, generator=generator)
        if invalid and i == 2:
            reward[:] = math.nan
        reward[mask == 0] = 77.0
        value[mask == 0] = math.nan
        known = value.tolist() if values else None
        rows.append(token_row(reward.tolist(), mask.tolist(), i % 3, i != 2 or not invalid, known))
    return rows


def gae_by_loop(row: TensorDict, gamma: float, lmbda: float) -> dict[int, float]:
    """Return the estimate at each sampled token of one sequence, from the definition as a sum over
    the later tokens.
    """
    places = row[keys.ASSISTANT_MASK].nonzero().reshape(-1).tolist()
    reward = row[keys.TOKEN_REWARD].tolist()
    value = row[keys.STATE_VALUE].tolist() if keys.STATE_VALUE in row else [0.0] * len(reward)
    delta = []
    for k, place in enumerate(places):
        following = value[places[k + 1]] if k + 1 < len(places) else 0.0
        delta.append(reward[place] + gamma * following - value[place])
    return {
        place: sum((gamma * lmbda) ** (j - k) * delta[j] for j in range(k, len(places)))
        for k, place in enumerate(places)
    }


def mean_and_std(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / max(len(values), 1)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def token_advantages_by_loop(
    rows: list[TensorDict],
    *,
    mean: str = "group",
    std: str = "group",
    gamma: float = 1.0,
    lmbda: float = 1.0,
) -> list[list[float]]:
    """Return the advantage of every token, sequence by sequence and token by token."""
    estimates = [
        gae_by_loop(row, gamma, lmbda) if row[keys.REWARD_VALID].item() else {} for row in rows
    ]
    groups = [row[keys.GROUP_ID].item() for row in rows]

    def others(i: int, over: str) -> list[tuple[int, int]]:
        return [
            (j, t)
            for j in range(len(rows))
            for t in estimates[j]
            if over == "batch" or groups[j] == groups[i]
        ]

    centered = [dict(entry) for entry in estimates]
    for i, entry in enumerate(estimates):
        if mean != "none":
            baseline = mean_and_std([estimates[j][t] for j, t in others(i, mean)])[0]
            centered[i] = {t: value - baseline for t, value in entry.items()}
    out = [[0.0] * len(row[keys.ASSISTANT_MASK]) for row in rows]
    for i, entry in enumerate(centered):
        scale = 1.0
        if std != "none":
            scale = mean_and_std([centered[j][t] for j, t in others(i, std)])[1] + 1e-6
        for t, value in entry.items():
            out[i][t] = value / scale
    return out


def token_lists(batch: TensorDict) -> list[list[float]]:
    return [row.get("advantage").tolist() for row in batch.unbind(0)]


def assert_tokens_close(actual: list[list[float]], expected: list[list[float]]) -> None:
    for row, other in zip(actual, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("mean", ["group", "batch", "none"])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize(
    ("gamma", "lmbda", "values"),
    [(1.0, 1.0, False), (0.9, 0.8, True), (0.5, 1.0, False), (0.9, 0.0, True), (0.0, 1.0, True)],
)
def test_token_advantages_are_what_a_plain_loop_computes(mean, std, gamma, lmbda, values):
    rows = random_token_rows(3, values=values)
    expected = token_advantages_by_loop(rows, mean=mean, std=std, gamma=gamma, lmbda=lmbda)
    out = GroupAdvantage(4, level="token", mean=mean, std=std, gamma=gamma, lmbda=lmbda)(
        lazy_stack(rows)
    )
    assert_tokens_close(token_lists(out), expected)
    assert out[0]["advantage"].dtype == torch.float32
    for row in out.unbind(0):
        assert row["advantage"].shape == row[keys.FULL].shape
        assert not row["advantage"][~row[keys.ASSISTANT_MASK]].any()


def test_estimates_by_hand_skip_what_was_not_sampled():
    """gamma 0.5, lmbda 0.5, values 2 and 4, rewards 1 and 3, a token of the environment in between.

    Last token: 3 - 4 = -1. First: 1 + 0.5 * 4 - 2 = 1, and 0.5 * 0.5 * (-1) from the last: 0.75.
    """
    reward = torch.tensor([[1.0, 9, 3, 9]]).double()
    value = torch.tensor([[2.0, math.nan, 4, 9]]).double()
    mask = torch.tensor([[True, False, True, False]])
    advantage, target = sampled_token_gae(reward, value, mask, 0.5, 0.5)
    assert advantage.tolist() == [[0.75, 0, -1, 0]] and target.tolist() == [[2.75, 0, 3, 0]]
    assert sampled_token_gae(reward[:0], value[:0], mask[:0], 0.5, 0.5)[0].shape == (0, 4)
    assert not sampled_token_gae(reward, value, mask & False, 0.5, 0.5)[0].any()


def test_reinforce_pp_by_hand():
    """Two responses to one prompt, one of 1 token with reward 1, one of 2 tokens with reward 0;
    kl_coef 0.5, k1.

    log sample - log ref: 0 for the first; 1 and -1 for the second. Token rewards: (1), and -0.5 *
    (1, -1). Summed from each token to the end: (1), and (-0.5 + 0.5, 0.5) = (0, 0.5). Over the
    three tokens of the batch the mean is 0.5 and the variance (0.25 + 0.25 + 0) / 2 = 0.25, so the
    std is 0.5 and the advantages are 1, -1, 0.
    """
    rows = []
    for reward, sample, ref in ((1.0, [0, -2], [0, -2]), (0.0, [0, -1, -3], [0, -2, -2])):
        row = token_row([0.0] * len(sample), [0] + [1] * (len(sample) - 1), 0).exclude(
            keys.TOKEN_REWARD
        )
        row[keys.REWARD] = torch.tensor([reward])
        row[keys.LOG_PROBS], row[keys.REF_LOG_PROBS] = (
            torch.tensor(sample).float(),
            torch.tensor(ref).float(),
        )
        rows.append(row)
    batch = RewardShaping(kl_coef=0.5, kl_estimator="k1")(lazy_stack(rows))
    out = GroupAdvantage(2, level="token", mean="batch", std="batch")(batch)
    assert_tokens_close(token_lists(out), [[0, 1], [0, -1, 0]])


def test_padding_order_and_masked_values_change_no_token_advantage():
    arguments = {"level": "token", "gamma": 0.9, "lmbda": 0.8, "mean": "batch", "std": "batch"}
    rows = random_token_rows(1, values=True)
    expected = token_lists(
        GroupAdvantage(4, **arguments)(lazy_stack([row.clone() for row in rows]))
    )
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = GroupAdvantage(4, **arguments)(lazy_stack([rows[i].clone() for i in order]))
    assert_tokens_close(token_lists(shuffled), [expected[i] for i in order])
    wide = lazy_stack(
        [*rows, *(token_row([math.nan] * 50, [0] * 50, 9, value=[0.0] * 50) for _ in range(4))]
    )
    per_token = {keys.ASSISTANT_MASK: False, keys.TOKEN_REWARD: math.nan, keys.STATE_VALUE: 5.0}
    padded = pad_batch(wide, per_token, [keys.GROUP_ID, keys.REWARD_VALID])
    out = GroupAdvantage(4, **arguments)(padded)
    assert out is padded and out["advantage"].shape == (16, 50)
    for i, row in enumerate(expected):
        assert out["advantage"][i].tolist() == row + [0.0] * (50 - len(row))


def test_zero_variance_groups_give_exact_zeros_at_token_level():
    transform = GroupAdvantage(2, level="token")
    rows = [
        token_row([0, 0.1], [0, 1], 0),
        token_row([0, 0, 0.1], [0, 1, 1], 0),
    ]  # equal returns everywhere
    rows += [token_row([0.0], [0], 1), token_row([0.0], [0], 1)]  # nothing sampled
    rows += [
        token_row([0, 1], [0, 1], 2),
        token_row([0, 2], [0, 1], 2, valid=False),
    ]  # one valid token
    rows += [token_row([0, 1], [0, 1], 3), token_row([0, 2], [0, 1], 3)]
    out = transform(lazy_stack(rows))
    assert token_lists(out)[:6] == [[0, 0], [0, 0, 0], [0], [0], [0, 0], [0, 0]]
    assert_tokens_close(token_lists(out)[6:], [[0, -(0.5**0.5)], [0, 0.5**0.5]])
    assert counts(transform) == (4, 3, 1)


@pytest.mark.parametrize("mean", ["group", "batch", "none"])
def test_a_batch_in_which_nothing_was_sampled_is_zero(mean):
    out = GroupAdvantage(2, level="token", mean=mean)(
        lazy_stack([token_row([0.0, 0.0], [0, 0], 0) for _ in range(2)])
    )
    assert token_lists(out) == [[0, 0], [0, 0]]


def test_token_level_says_what_it_needs(tokenizer):
    with pytest.raises(
        KeyError,
        match=r"next\.token_reward.*: apply RewardShaping\(\) .*level='sequence'",
    ):
        GroupAdvantage(2, level="token")(batch_of([1, 2], [0, 0]))
    env = TransformedEnv(
        LLMEnv(EchoTask(), tokenizer, num_envs=2, repeats=2), GroupAdvantage(2, level="token")
    )
    with pytest.raises(RuntimeError, match="level='token' must get finished sequences"):
        env.reset()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mean": "foo"}, r"mean='foo' must be one of \('group', .*\): use 'group'"),
        ({"std": "foo"}, r"std='foo' must be one of \('group', .*\): use 'group'"),
        ({"level": "word"}, "level='word' must be one of"),
        (
            {"level": "token", "mean": "leave_one_out"},
            "mean=leave_one_out must not be used with an advantage for each token",
        ),
        ({"level": "token", "gamma": 1.5}, r"gamma=1.5 must be in \[0, 1\]"),
        ({"level": "token", "lmbda": -0.1}, r"lmbda=-0.1 must be in \[0, 1\]"),
        ({"gamma": 0.9}, "gamma=0.9 must be 1 with level='sequence', which ignores it"),
    ],
)
def test_bad_arguments_say_what_to_use(arguments, message):
    with pytest.raises(ValueError, match=message):
        GroupAdvantage(2, **arguments)


class Doubled(GroupAdvantage):
    """A custom advantage."""

    def advantage(self, reward, group, valid):
        return 2 * super().advantage(reward, group, valid)


def test_an_advantage_of_ones_own_is_made_once_wherever_the_transform_is() -> None:
    rows = TensorDict(
        {"group_id": torch.zeros(2, 1, dtype=torch.int64), "next": {"reward": torch.eye(2)[:, :1]}},
        [2],
    )
    assert Doubled(2, std="none")(rows.clone())["advantage"].flatten().tolist() == [1.0, -1.0]
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4), transform=Doubled(2, std="none"), batch_size=4
    )
    buffer.extend(rows.clone())
    for _ in range(3):
        assert set(buffer.sample()["advantage"].flatten().tolist()) <= {1.0, -1.0}


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_a_second_normalization_equals_a_plain_loop_over_tokens(level: str) -> None:
    """Only sampled tokens of valid sequences count; a sequence's advantage counts once per token."""
    generator = torch.Generator().manual_seed(0)
    rows, values = [], []
    for number, length in enumerate((4, 7, 3, 5)):
        mask = torch.rand(length, generator=generator) < 0.7
        mask[1] = True
        size = length if level == "token" else 1
        advantage = torch.randn(size, generator=generator)
        rows.append(
            TensorDict(
                {
                    keys.ASSISTANT_MASK: mask,
                    keys.ADVANTAGE: advantage,
                    keys.REWARD_VALID: torch.tensor([number != 2]),
                }
            )
        )
        values += [float(advantage[t % size]) for t in range(length) if mask[t] and number != 2]
    before = [row[keys.ADVANTAGE].clone() for row in rows]
    mean = sum(values) / len(values)
    std = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    batch = AdvantageWhitening()(lazy_stack(rows))
    for number, (row, old) in enumerate(zip(batch.unbind(0), before, strict=True)):
        expected = old if number == 2 else (old - mean) / (std + 1e-6)
        mask = row[keys.ASSISTANT_MASK] if level == "token" else torch.ones(1, dtype=torch.bool)
        torch.testing.assert_close(row[keys.ADVANTAGE][mask], expected[mask])


def test_equal_advantages_are_exactly_zero_after_a_second_normalization() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    batch = TensorDict({keys.ASSISTANT_MASK: mask, keys.ADVANTAGE: torch.full((2, 1), 1 / 3)}, [2])
    assert AdvantageWhitening()(batch)[keys.ADVANTAGE].tolist() == [[0.0], [0.0]]


def turn_row(
    turns: list[float], group: int, valid: bool = True, *, rewards: bool = True
) -> TensorDict:
    """Return a dialog of turns of 1 to 3 tokens, separated by one or two tokens, with a reward on
    each turn's last token.
    """
    mask, at = [0], [0.0]
    for number, reward in enumerate(turns):
        length = 1 + (number + group) % 3
        mask += [1] * length + [0] * (1 + number % 2)
        at += [0.0] * (length - 1) + [reward] + [0.0] * (1 + number % 2)
    row = TensorDict(
        {keys.ASSISTANT_MASK: torch.tensor(mask).bool(), keys.REWARD: torch.tensor([sum(turns)])}
    )
    if rewards:
        row[keys.TURN_REWARDS] = torch.tensor(at, dtype=torch.float64)
    row[keys.GROUP_ID], row[keys.REWARD_VALID] = torch.tensor([group]), torch.tensor([valid])
    return row


def turns_of(row: TensorDict) -> list[list[int]]:
    """Return the positions of each turn's tokens."""
    turns: list[list[int]] = []
    before = False
    for place, sampled in enumerate(row[keys.ASSISTANT_MASK].tolist()):
        if sampled and not before:
            turns.append([])
        if sampled:
            turns[-1].append(place)
        before = sampled
    return turns


def turn_advantages_by_loop(
    rows: list[TensorDict], gamma: float, mean: str, std: str
) -> list[list[float]]:
    """Return the advantage of every token, from the definition, dialog by dialog and turn by turn."""
    returns: list[list[float]] = []
    for row in rows:
        own = [
            sum(row[keys.TURN_REWARDS][place].item() for place in places)
            for places in turns_of(row)
        ]
        returns.append(
            [sum(gamma ** (j - k) * own[j] for j in range(k, len(own))) for k in range(len(own))]
        )
    groups, valid = (
        [row[key].item() for row in rows] for key in (keys.GROUP_ID, keys.REWARD_VALID)
    )
    common = {
        g: min(len(returns[i]) for i in range(len(rows)) if groups[i] == g and valid[i])
        for g in set(groups)
    }
    compared = [
        (i, k, (groups[i], min(k, common[groups[i]] - 1)))
        for i in range(len(rows)) for k in range(len(returns[i])) if valid[i]
    ]  # fmt: skip
    centered = {}
    for i, k, stage in compared:
        others = [returns[j][h] for j, h, other in compared if mean == "batch" or other == stage]
        centered[i, k] = returns[i][k] - (0.0 if mean == "none" else mean_and_std(others)[0])
    out = [[0.0] * len(row[keys.ASSISTANT_MASK]) for row in rows]
    for i, k, stage in compared:
        others = [centered[j, h] for j, h, other in compared if std == "batch" or other == stage]
        scale = 1.0 if std == "none" else mean_and_std(others)[1] + 1e-6
        for place in turns_of(rows[i])[k]:
            out[i][place] = centered[i, k] / scale
    return out


def random_turn_rows(seed: int) -> list[TensorDict]:
    """Return 3 groups of 4 dialogs of 1 to 4 turns; one dialog is invalid, and group 1 has two
    turns in all of them.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(12):
        count = 2 if i % 3 == 1 else 1 + int(torch.randint(0, 4, (), generator=generator))
        rows.append(turn_row(torch.randn(count, generator=generator).tolist(), i % 3, i != 2))
    return rows


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize(
    ("mean", "std"), [("group", "group"), ("group", "none"), ("batch", "batch"), ("none", "none")]
)
@pytest.mark.parametrize("seed", range(3))
def test_turn_advantages_are_what_a_plain_loop_computes(seed, mean, std, gamma):
    rows = random_turn_rows(seed)
    out = GroupAdvantage(4, level="turn", gamma=gamma, mean=mean, std=std)(
        lazy_stack([row.clone() for row in rows])
    )
    assert_tokens_close(token_lists(out), turn_advantages_by_loop(rows, gamma, mean, std))


def test_turn_advantages_by_hand():
    """The returns are 1, 2, 3 and 0 for the turns that both dialogs have, and 5 for a third,
    compared with the second ones.
    """
    rows = [turn_row([-1.0, 2.0], 0), turn_row([3.0, -5.0, 5.0], 0)]
    out = GroupAdvantage(2, level="turn", std="none")(lazy_stack(rows))
    first, second = (
        [row[places[0]] for places in turns_of(rows[i])] for i, row in enumerate(token_lists(out))
    )
    assert first == pytest.approx([1 - 2, 2 - 7 / 3]) and second == pytest.approx(
        [3 - 2, 0 - 7 / 3, 5 - 7 / 3]
    )


def test_dialogs_of_one_turn_have_the_advantage_of_their_reward():
    values = [0.0, 1.0, 1.0, 0.25]
    rows = [turn_row([value], 0, rewards=False) for value in values]
    out = GroupAdvantage(4, level="turn")(lazy_stack(rows))
    expected = GroupAdvantage(4)(batch_of(values, [0] * 4))["advantage"].reshape(-1).tolist()
    assert [max(row, key=abs) for row in token_lists(out)] == pytest.approx(expected)


def test_returns_that_differ_in_the_rounding_of_their_sums_are_equal():
    """Both returns are 0.7 from the first turn on and 1 from the last; they differ in between."""
    rows = [turn_row([-0.1, -0.1, -0.1, 1.0], 0), turn_row([-0.3, 0.0, 0.0, 1.0], 0)]
    out = token_lists(GroupAdvantage(2, level="turn")(lazy_stack(rows)))
    turns = [
        [row[places[0]] for places in turns_of(one)] for row, one in zip(out, rows, strict=True)
    ]
    assert [turns[0][0], turns[1][0], turns[0][3], turns[1][3]] == [0.0] * 4
    assert turns[0][1] < 0 < turns[1][1]


@pytest.mark.parametrize(
    ("level", "rows", "expected"),
    [
        ("token", [token_row([0, 1], [0, 1], 0), token_row([0, 2], [0, 1], 0)], [-0.5, 0.5]),
        ("turn", [turn_row([0.0, 1.0], 0), turn_row([1.0, 2.0], 0)], [-1.0, 1.0]),
    ],
)
def test_a_buffer_gets_advantages_per_token_of_whole_groups(level, rows, expected):
    transform = GroupAdvantage(2, level=level, std="none")
    buffer = ReplayBuffer(storage=LazyStackStorage(4), transform=transform, batch_size=2)
    buffer.extend(lazy_stack(rows[:1]))
    assert len(buffer) == 0 and transform.num_waiting == 1
    buffer.extend(lazy_stack(rows[1:]))
    assert [max(row, key=abs) for row in token_lists(buffer[:])] == expected
    assert rows[0].get("advantage", None) is None

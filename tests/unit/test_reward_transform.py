"""RewardShaping: every option compared with plain loops over Python floats, in a buffer, and its
refusals.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Compose, TransformedEnv

from tests.support.echo import EchoTask
from tests.support.padded import pad_batch
from torchrl_grpo import keys
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.models.entries import has
from torchrl_grpo.transforms import GroupAdvantage, RewardShaping


def make_row(
    reward: float,
    mask: list[int],
    *,
    sample: list[float] | None = None,
    ref: list[float] | None = None,
    turns: list[float] | None = None,
    valid: bool | None = None,
    group: int = 0,
) -> TensorDict:
    row = TensorDict(
        {keys.ASSISTANT_MASK: torch.tensor(mask).bool(), keys.FULL: torch.arange(len(mask))}
    )
    row[keys.REWARD] = torch.tensor([float(reward)])
    row[keys.GROUP_ID] = torch.tensor([group])
    for key, value in (
        (keys.LOG_PROBS, sample),
        (keys.REF_LOG_PROBS, ref),
        (keys.TURN_REWARDS, turns),
    ):
        if value is not None:
            row[key] = torch.tensor(value, dtype=torch.float32)
    if valid is not None:
        row[keys.REWARD_VALID] = torch.tensor([valid])
    return row


def random_rows(seed: int, count: int = 6, invalid: bool = True) -> list[TensorDict]:
    """Return ragged dialogs of one to three turns with intermediate rewards; one has no sampled
    token, one is invalid.
    """
    generator = torch.Generator().manual_seed(seed)

    def numbers(size: int) -> list[float]:
        return torch.randn(size, generator=generator).tolist()

    rows = []
    for i in range(count):
        mask, turns = [0] * (1 + i % 3), [0.0] * (1 + i % 3)
        for _ in range(i % 4):
            length = int(torch.randint(1, 5, (), generator=generator))
            mask += [1] * length + [0] * (i % 2)
            turns += [0.0] * (length - 1) + numbers(1) + [0.0] * (i % 2)
        size = len(mask)
        if invalid and i == 3:
            row = make_row(
                math.nan, mask, sample=numbers(size), ref=numbers(size), turns=turns, valid=False
            )
        else:
            known = turns if i % 4 > 1 else None  # a single turn has no intermediate reward
            row = make_row(
                sum(turns), mask, sample=numbers(size), ref=numbers(size), turns=known, valid=True
            )
        rows.append(row)
    return rows


KL = {
    "k1": lambda p, q: p - q,
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: math.exp(q - p) - 1 - (q - p),
}


def by_loop(
    row: TensorDict,
    scale: float = 1.0,
    bias: float = 0.0,
    clip: tuple[float, float] | None = None,
    overlong_buffer: int = 0,
    max_response_tokens: int = 0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k1",
) -> tuple[float, list[float]]:
    """Return the shaped reward and the token rewards of one sequence, token by token."""
    mask = row[keys.ASSISTANT_MASK].tolist()
    token = [0.0] * len(mask)
    if not row[keys.REWARD_VALID].item():
        return 0.0, token
    task = scale * row[keys.REWARD].item() + bias
    if clip is not None:
        task = min(max(task, clip[0]), clip[1])
    length = sum(mask)
    if overlong_buffer:
        if length > max_response_tokens:
            task -= 1
        elif length > max_response_tokens - overlong_buffer:
            task += (max_response_tokens - overlong_buffer - length) / overlong_buffer
    if not length:
        return task, token
    if has(row, keys.TURN_REWARDS):
        token = [scale * value for value in row[keys.TURN_REWARDS].tolist()]
    last = max(i for i, sampled in enumerate(mask) if sampled)
    token[last] += task - sum(token)
    total = task
    for i, sampled in enumerate(mask):
        if sampled:
            kl = KL[kl_estimator](row[keys.LOG_PROBS][i].item(), row[keys.REF_LOG_PROBS][i].item())
            token[i] -= kl_coef * kl
            total -= kl_coef * kl
    return total, token


def shaped(batch: TensorDictBase) -> list[float]:
    return batch.get(keys.SHAPED_REWARD).squeeze(-1).tolist()


def tokens(batch: TensorDictBase) -> list[list[float]]:
    return [row.get(keys.TOKEN_REWARD).tolist() for row in batch.unbind(0)]


OPTIONS = [
    {},
    {"scale": 2.5},
    {"bias": -0.75},
    {"clip": (-0.5, 0.25)},
    {"scale": -3.0, "bias": 0.5, "clip": (-1.0, 1.0)},
    {"overlong_buffer": 4, "max_response_tokens": 7},
    {"overlong_buffer": 1, "max_response_tokens": 2},
    {"overlong_buffer": 3, "max_response_tokens": 3, "clip": (-0.1, 0.1)},
    {"kl_coef": 0.3},
    {"kl_coef": 0.3, "kl_estimator": "k2"},
    {"kl_coef": 0.3, "kl_estimator": "k3"},
    {
        "scale": 0.5,
        "bias": 0.1,
        "clip": (-0.4, 0.3),
        "overlong_buffer": 4,
        "max_response_tokens": 6,
        "kl_coef": 0.05,
        "kl_estimator": "k3",
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_each_option_is_what_a_plain_loop_computes(options: dict, seed: int) -> None:
    rows = random_rows(seed)
    before = [row[keys.REWARD].clone() for row in rows]
    out = RewardShaping(**options)(lazy_stack(rows))
    for row, reward in zip(out.unbind(0), before, strict=True):
        total, token = by_loop(row, **options)
        assert row[keys.SHAPED_REWARD].item() == pytest.approx(total, abs=1e-6)
        assert row[keys.TOKEN_REWARD].tolist() == pytest.approx(token, abs=1e-6)
        assert (
            row[keys.SHAPED_REWARD].shape == (1,) and row[keys.SHAPED_REWARD].dtype == torch.float32
        )
        assert row[keys.TOKEN_REWARD].dtype == torch.float32
        torch.testing.assert_close(row[keys.REWARD], reward, equal_nan=True, rtol=0, atol=0)


def test_turns_keep_their_rewards_and_the_clip_goes_to_the_last_token() -> None:
    """Turns of 2 and 3: scaled 4 and 6, bias 1 makes 11, clipped to 8: the last token gets 6 + (8 -
    10) = 4.
    """
    row = make_row(5.0, [0, 1, 0, 1, 1], turns=[0, 2, 0, 0, 3])
    out = RewardShaping(scale=2.0, bias=1.0, clip=(0.0, 8.0))(lazy_stack([row]))
    assert tokens(out) == [[0.0, 4.0, 0.0, 0.0, 4.0]] and shaped(out) == [8.0]


def test_a_response_without_tokens_has_no_token_rewards_and_no_nan() -> None:
    shaping = RewardShaping(
        scale=2.0, bias=0.5, kl_coef=1.0, overlong_buffer=1, max_response_tokens=2
    )
    out = shaping(lazy_stack([make_row(1.0, [0, 0], sample=[math.nan] * 2, ref=[0, 0])]))
    assert tokens(out) == [[0.0, 0.0]] and shaped(out) == [2.5]


@pytest.mark.parametrize("options", OPTIONS[-2:], ids=str)
def test_padding_and_order_change_nothing(options: dict) -> None:
    rows = random_rows(7)
    for row in rows:  # padded entries must exist in every row
        if not has(row, keys.TURN_REWARDS):
            turns = torch.zeros(row[keys.FULL].shape)
            turns[row[keys.ASSISTANT_MASK].nonzero().reshape(-1)[-1:]] = row[keys.REWARD]
            row[keys.TURN_REWARDS] = turns
    alone = [RewardShaping(**options)(lazy_stack([row.clone()]))[0] for row in rows]
    backwards = RewardShaping(**options)(lazy_stack([row.clone() for row in rows[::-1]]))
    per_token = (keys.ASSISTANT_MASK, keys.LOG_PROBS, keys.REF_LOG_PROBS, keys.TURN_REWARDS)
    nothing = [math.nan] * 40
    longest = make_row(0.0, [0] * 40, sample=nothing, ref=nothing, turns=nothing, valid=True)
    padded = pad_batch(
        lazy_stack([*rows, longest]), dict.fromkeys(per_token, 0), [keys.REWARD, keys.REWARD_VALID]
    )
    out = RewardShaping(**options)(padded)
    assert out is padded and out[keys.TOKEN_REWARD].shape == (7, 40)
    for i, row in enumerate(alone):
        expected = row[keys.TOKEN_REWARD]
        width = len(row[keys.TOKEN_REWARD])
        assert torch.equal(out[keys.TOKEN_REWARD][i, :width], expected)
        assert not out[keys.TOKEN_REWARD][i, width:].any()
        assert torch.equal(backwards[len(rows) - 1 - i][keys.TOKEN_REWARD], expected)
        assert (
            out[keys.SHAPED_REWARD][i]
            == row[keys.SHAPED_REWARD]
            == backwards[len(rows) - 1 - i][keys.SHAPED_REWARD]
        )


finite = st.floats(-10, 10, width=32)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_token_rewards_add_up_to_the_shaped_reward(data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=1, max_size=8).filter(any))
    numbers = st.lists(finite, min_size=len(mask), max_size=len(mask))
    row = make_row(
        data.draw(finite),
        mask,
        sample=data.draw(numbers),
        ref=data.draw(numbers),
        turns=data.draw(numbers),
    )
    low = data.draw(finite)
    out = RewardShaping(
        scale=data.draw(finite),
        bias=data.draw(finite),
        clip=data.draw(st.none() | st.just((low, low + 1))),
        overlong_buffer=data.draw(st.integers(0, 4)),
        max_response_tokens=4,
        kl_coef=data.draw(st.floats(0, 2)),
        kl_estimator=data.draw(
            st.sampled_from(["k1", "k2"])
        ),  # k3 grows to e^20, beyond the precision of float32
    )(lazy_stack([row]))
    token = out[0][keys.TOKEN_REWARD]
    assert token.double().sum().item() == pytest.approx(shaped(out)[0], rel=1e-5, abs=1e-3)
    assert not token[~out[0][keys.ASSISTANT_MASK]].any()


# In a replay buffer, and without one


def test_a_buffer_shapes_once_before_the_advantage_on_a_copy() -> None:
    batch = lazy_stack(
        [
            make_row(reward, [0] + [1] * (i + 1), group=i // 2)
            for i, reward in enumerate([0, 1, 2, 6])
        ]
    )
    # Scaled and clipped: 0, 2, 4, 5.
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4),
        batch_size=4,
        transform=Compose(
            GroupAdvantage(2, std="none", reward_key=keys.SHAPED_REWARD),
            RewardShaping(scale=2.0, clip=(0.0, 5.0)),
        ),
    )
    buffer.extend(batch)
    stored = buffer[:]
    assert shaped(stored) == [0, 2, 4, 5] and stored["advantage"].squeeze(-1).tolist() == [
        -1,
        1,
        -0.5,
        0.5,
    ]
    assert set(shaped(buffer.sample())) <= {0, 2, 4, 5}
    assert not has(batch, keys.SHAPED_REWARD) and not has(batch, keys.TOKEN_REWARD)


def test_a_shaped_batch_and_a_single_sequence() -> None:
    single = RewardShaping(scale=2.0)(make_row(1.5, [0, 1, 1]))
    assert single[keys.TOKEN_REWARD].tolist() == [0, 0, 3] and single[
        keys.SHAPED_REWARD
    ].tolist() == [3]
    again = RewardShaping(scale=100.0)(single.clone())
    assert again[keys.TOKEN_REWARD].tolist() == [0, 0, 150]
    for key in (
        keys.TOKEN_REWARD,
        keys.SHAPED_REWARD,
    ):  # one of the two without the other is not a shaped batch
        half = single.clone()
        del half["next", key[1]]
        out = RewardShaping(scale=4.0)(half)
        assert out[keys.TOKEN_REWARD].tolist() == [0, 0, 6] and out[
            keys.SHAPED_REWARD
        ].tolist() == [6]


def test_it_says_that_it_does_not_belong_in_an_environment(tokenizer) -> None:
    env = TransformedEnv(LLMEnv(EchoTask(), tokenizer, num_envs=2, repeats=2), RewardShaping())
    with pytest.raises(RuntimeError, match="RewardShaping must get finished sequences"):
        env.reset()


def test_missing_reference_log_probs_are_named() -> None:
    with pytest.raises(
        KeyError,
        match=r"next\.ref_log_probs\.full, .*: apply KLScoring",
    ):
        RewardShaping(kl_coef=0.1)(lazy_stack([make_row(1.0, [1], sample=[0.0])]))


def test_a_missing_reward_is_named() -> None:
    row = make_row(1.0, [1]).exclude(keys.REWARD)
    with pytest.raises(KeyError, match=r"next\.reward, .*group_id.*: write it"):
        RewardShaping()(lazy_stack([row]))


def test_the_advantage_reads_the_shaped_reward_only_where_it_is_told_to() -> None:
    """Rewards 0 and 1, five times: 0 and 5."""

    def advantages(**settings: str | tuple[str, str]) -> list[float]:
        transform = Compose(GroupAdvantage(2, std="none", **settings), RewardShaping(scale=5.0))
        buffer = ReplayBuffer(storage=LazyStackStorage(2), transform=transform)
        buffer.extend(lazy_stack([make_row(reward, [0, 1]) for reward in (0, 1)]))
        return buffer[:]["advantage"].flatten().tolist()

    assert advantages() == [-0.5, 0.5]
    assert (
        advantages(reward_key=keys.SHAPED_REWARD) == advantages(level="token")[1::2] == [-2.5, 2.5]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip": (1.0, -1.0)}, r"clip=\[1.0, -1.0\] must be a pair"),
        ({"clip": (1.0, 1.0)}, r"clip=\[1.0, 1.0\] must be a pair"),
        ({"overlong_buffer": -1}, "overlong_buffer=-1 must be at least 0"),
        ({"overlong_buffer": 4}, "overlong_buffer=4 must be at most max_response_tokens=None"),
        (
            {"overlong_buffer": 9, "max_response_tokens": 8},
            "overlong_buffer=9 must be at most max_response_tokens=8",
        ),
        ({"kl_estimator": "k4"}, "kl_estimator='k4' must be one of"),
        ({"kl_coef": -0.1}, "kl_coef=-0.1 must be at least 0"),
    ],
)
def test_bad_arguments_say_what_to_use(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardShaping(**arguments)

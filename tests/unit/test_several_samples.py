"""One trajectory, several training samples: what counts once, what counts per token, and what stays
together.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from tests.support import losses
from tests.support.models import make_tiny_model
from tests.support.padded import pad_batch
from tests.support.training import make_batch, make_trainer
from torchrl_grpo import keys
from torchrl_grpo.collectors.sampler import has_variance
from torchrl_grpo.collectors.summary import rollout_metrics, sample_rows
from torchrl_grpo.envs.dialog_state import LOST, DialogState, SampleState
from torchrl_grpo.models.entries import trajectories_of
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.objectives.tokens import token_weights
from torchrl_grpo.runtime.groups import PackedGroup
from torchrl_grpo.tasks.base import Dialog, Problem, TurnLimits
from torchrl_grpo.tasks.drawing import Drawn
from torchrl_grpo.transforms import GroupAdvantage, RewardShaping


def row(
    trajectory: int | None, sampled: int, reward: float, *, done: bool = True, group: int = 0
) -> TensorDict:
    """Return a sample of two prompt tokens and this many sampled ones."""
    mask = torch.tensor([False] * 2 + [True] * sampled)
    out = TensorDict(
        {
            keys.FULL: torch.arange(2 + sampled),
            keys.RESPONSE: torch.arange(sampled) + 10 * (trajectory or 0),
            keys.ASSISTANT_MASK: mask,
            keys.LOG_PROBS: torch.zeros(2 + sampled),
            keys.GROUP_ID: torch.tensor([group]),
            keys.REWARD: torch.tensor([reward]),
            keys.REWARD_VALID: torch.tensor([True]),
            keys.CORRECT: torch.tensor([reward >= 1]),
            keys.TRUNCATED: torch.tensor([False]),
            keys.DONE: torch.tensor([done]),
            keys.POLICY_VERSION: torch.tensor([0]),
            keys.QUERY: "q",
            keys.RESPONSE_TEXT: "r",
        }
    )
    return out if trajectory is None else out.set(keys.TRAJECTORY, torch.tensor([trajectory]))


def compacting() -> TensorDictBase:
    """Return a group of two: a trajectory of samples with 3 and 1 tokens and reward 1, and one of 2
    tokens and reward 0.
    """
    return lazy_stack([row(6, 3, 0.0, done=False), row(6, 1, 1.0), row(7, 2, 0.0)])


@pytest.mark.parametrize(
    ("turn_samples", "expected"),
    [
        ([0, 1, 0], [([1], "b"), ([0, 2], "a\nc")]),  # the dialog returned to its first sample
        ([0, LOST, 1], [([0], "a"), ([2], "c")]),
        ([LOST, LOST], [([1], "")]),  # no turn was delivered, so the last one stands for all
        ([], [([0], "")]),  # the opening failed
    ],
)
def test_samples_of_a_dialog_come_in_the_order_of_their_ends(turn_samples, expected):
    state = DialogState(Drawn(0, 0, Problem("?", "")), SampleState(0, ()))
    for turn, number in enumerate(turn_samples):
        state.continue_with(max(number, 0), (), torch.arange(1), TurnLimits())
        said = {"role": "assistant", "content": "abc"[turn]}
        state.add_turn(Dialog(state.problem, ["abc"[turn]], [said]), torch.arange(2))
        state.turn_rewards[-1] = float(turn)
        if number == LOST:
            state.undo_turn()
    samples = state.samples()
    assert [(sample.turns, sample.text) for sample in samples] == expected
    for sample in samples if turn_samples else ():
        assert sample.rewards == [float(turn) for turn in sample.turns]


def test_trajectories_are_numbered_in_the_order_of_their_rows():
    assert trajectories_of(compacting()).tolist() == [0, 0, 1]
    assert trajectories_of(lazy_stack([row(None, 1, 0.0), *compacting().unbind(0)])).tolist() == [
        0,
        1,
        1,
        2,
    ]
    assert trajectories_of(lazy_stack([row(None, 1, 0.0), row(None, 2, 0.0)])) is None
    assert trajectories_of(lazy_stack([row(1, 1, 0.0), row(2, 2, 0.0)])) is None


@pytest.mark.parametrize(
    "aggregation, of_samples",
    [
        # Two trajectories, of 3 + 1 and of 2 tokens: each token of the first is 1 / (2 * 4), of the second 1 / (2 * 2).
        ("sequence_mean", [1 / 8, 1 / 8, 1 / 4]),
        ("token_mean", [1 / 6, 1 / 6, 1 / 6]),
        # Divided by the constant 5, and by two trajectories.
        ("constant", [1 / 10, 1 / 10, 1 / 10]),
    ],
)
def test_a_trajectory_counts_once_with_equal_tokens(aggregation, of_samples):
    loss = GRPOLoss(
        make_trainer().loss.actor_network,
        aggregation=aggregation,
        constant_length=5 if aggregation == "constant" else None,
    )
    batch = TensorDict(
        {
            keys.FULL: torch.zeros(3, 4, dtype=torch.int64),
            keys.ASSISTANT_MASK: torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).bool(),
            keys.LOG_PROBS: torch.zeros(3, 4),
            keys.TRAJECTORY: torch.tensor([[4], [4], [9]]),
        },
        [3],
    )
    weights = loss.normalize(batch)[keys.LOSS_WEIGHTS]
    expected = torch.tensor(of_samples).unsqueeze(-1) * batch[keys.ASSISTANT_MASK]
    torch.testing.assert_close(weights, expected)


def test_a_trajectory_in_two_samples_weighs_what_it_weighs_in_one():
    whole = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    split = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    for aggregation in ("sequence_mean", "token_mean", "constant"):
        one = token_weights(losses.rows_of(whole), aggregation)
        two = token_weights(losses.rows_of(split), aggregation, trajectory=torch.tensor([0, 0, 1]))
        assert torch.equal(one, two)


def test_a_loss_alone_and_micro_batches_weigh_as_the_whole_batch():
    logits, rows = losses.make_batch(0)
    for number, sample in enumerate(rows):
        sample[keys.TRAJECTORY] = torch.tensor([number // 2])
        sample[keys.IS_DEMONSTRATION] = torch.tensor([number == 3])
        sample[keys.TEACHER_LOG_PROBS] = sample[keys.LOG_PROBS] - 0.1
    ragged = (keys.FULL, keys.ASSISTANT_MASK, keys.LOG_PROBS, keys.TEACHER_LOG_PROBS)
    others = [keys.ADVANTAGE, keys.TRAJECTORY, keys.IS_DEMONSTRATION, "row"]
    batch = pad_batch(lazy_stack(rows), dict.fromkeys(ragged, 0), others)
    loss = GRPOLoss(losses.Table(logits), sft_coeff=0.5)
    alone = loss(batch.clone())
    normalized = loss.normalize(batch.clone())
    whole = loss(normalized.clone())
    parts = [loss(part) for part in normalized.split(2)]
    for name in ("loss_objective", "loss_sft", "kl_k1_to_teacher", "entropy"):
        assert whole[name].abs() > 1e-3
        torch.testing.assert_close(alone[name], whole[name])
        torch.testing.assert_close(parts[0][name] + parts[1][name], whole[name])


def test_a_trajectory_that_is_not_valid_leaves_with_its_samples():
    batch = TensorDict(
        {
            keys.FULL: torch.zeros(3, 2, dtype=torch.int64),
            keys.ASSISTANT_MASK: torch.ones(3, 2, dtype=torch.bool),
            keys.LOG_PROBS: torch.zeros(3, 2),
            keys.TRAJECTORY: torch.tensor([[4], [4], [9]]),
            keys.REWARD_VALID: torch.tensor([[False], [False], [True]]),
        },
        [3],
    )
    weights = make_trainer().loss.normalize(batch)[keys.LOSS_WEIGHTS]
    assert weights.tolist() == [[0, 0], [0, 0], [0.5, 0.5]]


def test_the_samples_of_a_trajectory_stay_in_one_optimizer_step():
    batch = make_batch((9, 14, 6, 11, 8))
    for sample, trajectory in zip(batch.unbind(0), (0, 1, 1, 1, 2), strict=True):
        sample.set(keys.TRAJECTORY, torch.tensor([trajectory]))
    trainer = make_trainer(optim_batch_size=2)
    seen: list[int] = []
    trainer.train_step = lambda part: seen.append(len(part)) or {"train/loss": 0.0}  # type: ignore[method-assign,func-returns-value]
    trainer.train_batch(batch)
    assert seen == [4, 1]


def test_micro_batches_change_no_step_of_several_samples():
    def step(tokens: int) -> torch.Tensor:
        batch = make_batch((9, 14, 6, 11))
        for sample, trajectory in zip(batch.unbind(0), (0, 0, 1, 1), strict=True):
            sample.set(keys.TRAJECTORY, torch.tensor([trajectory]))
        model = make_tiny_model()
        trainer = make_trainer(
            model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_tokens=tokens
        )
        trainer.train_batch(batch)
        return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.parameters])

    torch.testing.assert_close(step(16), step(10_000), rtol=1e-4, atol=1e-6)


def test_all_samples_of_a_trajectory_get_its_advantage():
    advantage = GroupAdvantage(2, std="none")(compacting())[keys.ADVANTAGE]
    assert advantage.reshape(-1).tolist() == [0.5, 0.5, -0.5]


def test_an_advantage_of_tokens_sees_the_reward_across_samples():
    batch = RewardShaping()(compacting())
    GroupAdvantage(2, mean="none", std="none", level="token", gamma=0.5)(batch)
    got = [sample.get(keys.ADVANTAGE).tolist() for sample in batch.unbind(0)]
    assert got == [[0, 0, 0.125, 0.25, 0.5], [0, 0, 1.0], [0, 0, 0, 0]]


def test_bias_clip_and_penalty_are_those_of_a_trajectory():
    shaped = RewardShaping(scale=2, bias=1, overlong_buffer=4, max_response_tokens=6)(compacting())
    # 2 * 1 + 1 and a penalty of 4 tokens: (6 - 4 - 4) / 4; the other trajectory has bias alone.
    assert shaped[keys.SHAPED_REWARD].reshape(-1).tolist() == [0, 2.5, 1]
    assert [float(sample.get(keys.TOKEN_REWARD).sum()) for sample in shaped.unbind(0)] == [
        0,
        2.5,
        1,
    ]


def test_metrics_count_a_trajectory_once():
    batch = GroupAdvantage(2, std="none")(compacting())
    got = rollout_metrics(batch)
    expected = {
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "accuracy": 0.5,
        "advantage_mean": 0.0,
        "response_length": 3.0,
        "response_length_max": 4.0,
        "invalid": 0,
        "sequences": 2,
        "samples": 3,
        "tokens": 6,
        "zero_variance_groups": 0,
    }
    assert {name: got[f"rollout/{name}"] for name in expected} == expected
    assert "rollout/samples" not in rollout_metrics(batch[2:])


def test_rows_of_samples_have_their_number_and_the_trajectory_s_reward():
    rows = sample_rows(GroupAdvantage(2, std="none")(compacting()), "train")
    assert [
        (sample_row.get("sample"), sample_row["reward"], sample_row["length"])
        for sample_row in rows
    ] == [
        (0, 1, 3),
        (1, 1, 1),
        (None, 0, 2),
    ]


def test_a_sample_without_a_reward_is_no_variance():
    same = lazy_stack([row(6, 3, 0.0, done=False), row(6, 1, 1.0), row(7, 2, 1.0)])
    assert not has_variance(same.unbind(0))
    assert has_variance(compacting().unbind(0))


def test_a_group_of_several_samples_travels_as_it_is():
    there = pickle.loads(pickle.dumps(PackedGroup(compacting())))
    assert trajectories_of(there).tolist() == [0, 0, 1]
    assert [sample.get(keys.DONE).item() for sample in there.unbind(0)] == [False, True, True]

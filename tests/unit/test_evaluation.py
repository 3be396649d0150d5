"""Evaluation, and the metrics of a batch."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.support.configs import compose_config
from tests.support.models import make_tiny_model
from tests.support.runs import SMALL, steps
from torchrl_grpo import keys
from torchrl_grpo.assembly.run import build
from torchrl_grpo.collectors.evaluation import Evaluator
from torchrl_grpo.collectors.summary import rollout_metrics, sample_rows
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.extras.report.records import read_samples
from torchrl_grpo.generation.base import Completion, Engine, SamplingParams
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.host import stalls
from torchrl_grpo.host.files import read_jsonl
from torchrl_grpo.intervals import mean_interval
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Problem, Score, Split, Task
from torchrl_grpo.tasks.with_tests import WithTests


class CopyTask(Task):
    """A task in which the response must be the query."""

    name = "copy"

    def __init__(self, digits: Sequence[int] = range(5)) -> None:
        self.digits = digits

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(str(digit), str(digit)) for digit in self.digits]

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        correct = responses[-1] == problem.answer
        return Score(float(correct), correct)


class Scripted(Engine):
    """Greedy copies digits below 3. Sampled, the j-th response to digit d copies if j < d. Draws
    are counted.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.draws = 0
        self.zero = tokenizer("0", add_special_tokens=False)["input_ids"][0]

    def generate(
        self, prompts: Sequence[Tensor], n: int, params: SamplingParams, on_finished: object = None
    ) -> list[list[Completion]]:
        self.draws += 1
        out = []
        for prompt in prompts:
            digit_token = prompt[1]  # <|user|> digit <|end|> <|assistant|>
            digit = int(digit_token) - self.zero
            group = []
            for j in range(n):
                right = digit < 3 if params.temperature == 0 else j < digit
                tokens = torch.tensor([int(digit_token) if right else 3, 1])
                group.append(Completion(tokens, torch.zeros(2), "stop"))
            out.append(group)
        return out

    def update_weights(self, weights: object, version: int) -> None: ...

    def state_dict(self) -> dict[str, int]:
        return {"policy_version": 0, "draws": self.draws}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.draws = state["draws"]


@pytest.mark.slow
def test_each_response_of_an_evaluation_is_a_sign_of_progress(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(stalls, "note", notes.append)
    for pool in (None, RewardPool(ArithmeticTask(), 1, timeout_s=300)):
        greedy = LLMEnv(
            ArithmeticTask(), tokenizer, num_envs=3, repeats=1, split="test", reward_pool=pool
        )
        engine = TransformersEngine(make_tiny_model())
        Evaluator(engine, greedy, None, params=SamplingParams(4)).evaluate(sampled=True)
        if pool is not None:
            pool.close()
    assert (
        notes == [f"evaluating 3 problems, {count} responses received" for count in (1, 2, 3)] * 2
    )


def intervals(name: str, values: Sequence[float], suffix: str = "") -> dict[str, float]:
    low, high = mean_interval(values)
    return {f"eval/ci_low_{name}{suffix}": low, f"eval/ci_high_{name}{suffix}": high}


def test_pass_at_1_and_pass_at_k_by_hand(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Greedy: digits 0, 1, 2 of 5. Of 4 samples, digit d has d right, so only digit 0 has none:
    pass@4 = 4/5.
    """
    engine = Scripted(tokenizer)
    greedy = LLMEnv(CopyTask(), tokenizer, num_envs=5, repeats=1, split="test")
    sampled = LLMEnv(CopyTask(), tokenizer, num_envs=20, repeats=4, split="test")
    evaluator = Evaluator(engine, greedy, sampled, params=SamplingParams(4, stop_token_ids=(1,)))
    metrics, rows = evaluator.evaluate(sampled=True)
    assert metrics == {
        "eval/pass@1": pytest.approx(0.6), "eval/reward_mean": pytest.approx(0.6), "eval/response_length": 2.0,
        "eval/truncated": 0.0, "eval/invalid_fraction": 0.0, "eval/pass@4": 0.8, "eval/invalid_fraction@4": 0.0,
        "eval/avg@4": 0.5, **intervals("pass@1", [1, 1, 1, 0, 0]), **intervals("avg@4", [0, 0.25, 0.5, 0.75, 1]),
    }  # fmt: skip
    assert [row["correct_of"] for row in rows] == [[int(row["query"]), 4] for row in rows]
    recorded = [{"step": 0} | row for row in rows]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in recorded))
    without_tokens = [{key: row[key] for key in row if key != "tokens"} for row in recorded]
    assert [*read_samples(tmp_path / "samples.jsonl")] == without_tokens
    assert {(row["query"], row["correct"]) for row in rows} == {(str(d), d < 3) for d in range(5)}
    assert [row["problem"] for row in rows] == [0, 1, 2, 3, 4]
    again = evaluator.evaluate(sampled=False)[1]
    assert [(row["problem"], row["query"]) for row in again] == [
        (row["problem"], row["query"]) for row in rows
    ]
    few = Evaluator(engine, greedy, None, params=SamplingParams(4, stop_token_ids=(1,)), rows=2)
    fewer = few.evaluate(sampled=False)[1]
    assert [row["problem"] for row in fewer if "tokens" in row] == [0, 1]
    plain = [{**row, "prompt": None, "tokens": None, "correct_of": None} for row in rows]
    assert [row | {"prompt": None, "tokens": None, "correct_of": None} for row in fewer] == plain
    assert engine.draws == 0  # its random state was restored
    assert "eval/pass@4" not in evaluator.evaluate(sampled=False)[0]


class PartlyScored(CopyTask):
    """Fail to score each response to some queries, and the right responses to others."""

    def __init__(self, never: str, wrong_only: str = "") -> None:
        super().__init__()
        self.never, self.wrong_only = never, wrong_only

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        score = super().score(problem, responses)
        if problem.query in self.never or (score.correct and problem.query in self.wrong_only):
            raise OSError("no judge")
        return score


@pytest.mark.parametrize(
    ("task", "greedy", "sampled"),
    [
        (
            PartlyScored("02"),
            (1 / 3, 0.4),
            (1.0, 0.4),
        ),  # remaining: digits 1, 3 and 4; copied: digit 1, in all samples
        (
            PartlyScored("0", wrong_only="1"),
            (1 / 3, 0.4),
            (3 / 4, 5 / 20),
        ),  # the 3 wrong samples of digit 1 remain
        (PartlyScored("01234"), (math.nan, 1.0), (math.nan, 1.0)),
    ],
)
def test_invalid_rewards_count_neither_in_pass_at_1_nor_in_pass_at_k(
    task: Task,
    greedy: tuple[float, float],
    sampled: tuple[float, float],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    engine = Scripted(tokenizer)
    envs = (LLMEnv(task, tokenizer, num_envs=5 * k, repeats=k, split="test") for k in (1, 4))
    metrics, _ = Evaluator(engine, *envs, params=SamplingParams(4, stop_token_ids=(1,))).evaluate(
        sampled=True
    )
    approx = functools.partial(pytest.approx, nan_ok=True)
    assert (metrics["eval/pass@1"], metrics["eval/invalid_fraction"]) == approx(greedy)
    assert metrics["eval/reward_mean"] == approx(greedy[0])
    assert (metrics["eval/pass@4"], metrics["eval/invalid_fraction@4"]) == approx(sampled)


def test_a_further_test_set_has_metrics_of_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    """The test split's metrics stay. Of the further digits 0 and 1, greedy copies both, and
    sampling only digit 1.
    """
    engine = Scripted(tokenizer)
    task = WithTests(CopyTask(), {"more": CopyTask([0, 1])})
    greedy = LLMEnv(task, tokenizer, num_envs=7, repeats=1, split="test")
    sampled = LLMEnv(task, tokenizer, num_envs=28, repeats=4, split="test")
    evaluator = Evaluator(
        engine, greedy, sampled, params=SamplingParams(4, stop_token_ids=(1,)), further=["more"]
    )
    metrics, rows = evaluator.evaluate(sampled=True)
    shared = {
        "response_length": 2.0,
        "truncated": 0.0,
        "invalid_fraction": 0.0,
        "invalid_fraction@4": 0.0,
    }
    accuracy = pytest.approx(0.6)
    values = {"pass@1": accuracy, "reward_mean": accuracy, "pass@4": pytest.approx(0.8), **shared}
    further = {"pass@1": 1.0, "reward_mean": 1.0, "pass@4": 0.5, **shared}
    values["avg@4"], further["avg@4"] = 0.5, 0.125
    bounds = intervals("pass@1", [1, 1, 1, 0, 0]) | intervals("avg@4", [0, 0.25, 0.5, 0.75, 1])
    bounds |= intervals("pass@1", [1, 1], "/more") | intervals("avg@4", [0, 0.25], "/more")
    assert (
        metrics
        == {f"eval/{name}": value for name, value in values.items()}
        | {f"eval/{name}/more": value for name, value in further.items()}
        | bounds
    )
    assert sorted(row["query"] for row in rows if row.get("dataset") == "more") == ["0", "1"]
    assert (
        "eval/pass@1"
        in Evaluator(engine, greedy, None, params=SamplingParams(4)).evaluate(sampled=False)[0]
    )


def make_row(
    group: int, reward: float, valid: bool, advantage: float, length: int
) -> TensorDictBase:
    return TensorDict(
        {
            keys.RESPONSE: torch.arange(length),
            keys.ASSISTANT_MASK: torch.arange(length + 2) >= 2,
            keys.REWARD: torch.tensor([reward]),
            keys.REWARD_VALID: torch.tensor([valid]),
            keys.CORRECT: torch.tensor([reward > 0]),
            keys.TRUNCATED: torch.tensor([length == 4]),
            keys.GROUP_ID: torch.tensor([group]),
            keys.ADVANTAGE: torch.tensor([advantage]),
            keys.QUERY: f"q{group}",
            keys.RESPONSE_TEXT: f"r{group}{length}",
        }
    )


def make_batch() -> TensorDictBase:
    return lazy_stack(
        [
            make_row(0, 1.0, True, 0.7, 2),
            make_row(0, 0.0, True, -0.7, 4),
            make_row(1, 1.0, True, 0.0, 3),
            make_row(1, 9.0, False, 0.0, 3),
        ]
    )


def test_rollout_metrics_leave_invalid_rewards_out() -> None:
    metrics = rollout_metrics(make_batch())
    assert metrics["rollout/reward_mean"] == pytest.approx(2 / 3)
    assert metrics["rollout/accuracy"] == pytest.approx(2 / 3)
    assert metrics["rollout/reward_std"] == pytest.approx((2 / 9) ** 0.5)
    assert metrics["rollout/response_length"] == 3.0
    assert metrics["rollout/tokens"] == 12
    assert metrics["rollout/truncated"] == 0.25
    assert metrics["rollout/zero_variance_groups"] == 0.5
    assert metrics["rollout/invalid"] == 1
    assert metrics["rollout/sequences"] == 4


def test_advantages_are_counted_over_valid_sequences_or_their_tokens() -> None:
    metrics = rollout_metrics(make_batch())
    names = [f"rollout/advantage_{name}" for name in ("mean", "std", "min", "max")]
    assert [metrics[name] for name in names] == pytest.approx(
        [0.0, (2 * 0.7**2 / 3) ** 0.5, -0.7, 0.7]
    )
    rows = list(
        make_batch().unbind(0)
    )  # of 2, 4, 3 and 3 tokens after a prompt of 2; the last one is not valid
    for row, value in zip(rows, (2.0, -1.0, 0.0, 9.0), strict=True):
        row[keys.ADVANTAGE] = value * row[keys.ASSISTANT_MASK]
    metrics = rollout_metrics(lazy_stack(rows))
    assert [metrics[name] for name in names] == pytest.approx([0.0, (12 / 9) ** 0.5, -1.0, 2.0])
    for row in rows:  # as TorchRL's loss reads it
        row[keys.ADVANTAGE] = row[keys.ADVANTAGE].unsqueeze(-1)
    assert rollout_metrics(lazy_stack(rows)) == metrics


def test_a_batch_without_valid_rewards_has_no_reward_and_no_accuracy() -> None:
    batch = lazy_stack([make_row(0, 1.0, False, 0.0, 2), make_row(0, 0.0, False, 0.0, 3)])
    metrics = rollout_metrics(batch)
    assert all(
        math.isnan(metrics[f"rollout/{name}"]) for name in ("reward_mean", "reward_std", "accuracy")
    )
    assert all(
        math.isnan(metrics[f"rollout/advantage_{name}"]) for name in ("mean", "std", "min", "max")
    )
    assert (metrics["rollout/invalid"], metrics["rollout/sequences"]) == (2, 2)


def test_a_sample_row_says_what_came_out() -> None:
    [row, *_] = sample_rows(make_batch(), "train")
    assert row == {
        "split": "train", "query": "q0", "response": "r02", "reward": 1.0, "correct": True, "valid": True,
        "advantage": pytest.approx(0.7), "length": 2, "finish_reason": "stop", "group": 0,
    }  # fmt: skip


@pytest.mark.slow
def test_what_pass_at_k_leaves_out_is_not_left_out_in_training(tmp_path: Path) -> None:
    cut = (
        "evaluation.num_prompts=4",
        "evaluation.k=2",
        "evaluation.top_p=0.9",
        "evaluation.top_k=5",
        "evaluation.min_p=0.1",
    )
    with closing(build(compose_config(*SMALL, *cut, steps(1)), tmp_path)) as training_run:
        sampler = training_run.rollouts.samplers[0].part
        drawn = [sampler.evaluator._sampling_policy.params, sampler._take(1).policy.params]
        assert [(params.top_p, params.top_k, params.min_p) for params in drawn] == [
            (0.9, 5, 0.1),
            (1.0, 0, 0.0),
        ]
        training_run.fit()
    assert {"eval/pass@1", "eval/pass@2"} <= read_jsonl(tmp_path / "metrics.jsonl")[-1].keys()

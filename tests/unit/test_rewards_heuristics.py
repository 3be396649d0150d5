"""Rewards that need no labels."""

from __future__ import annotations

import copy

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.echo import EchoTask
from tests.support.envs import END, column, respond
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.rewards import heuristics
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\nb</think>\n<answer>b</answer>\n", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.8),
        ("Hi <think>a</think><answer>b</answer>", 0.8),
        ("<answer>b</answer><think>a</think>", 0.8),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.4),
        ("<think>a</think>", 0.4),
        ("<think>", 0.2),
        ("", 0.0),
    ],
)
def test_format_counts_tags_and_the_whole_shape(response: str, reward: float) -> None:
    assert heuristics.format(response) == reward


def test_a_thought_that_the_prompt_begins_is_part_of_the_format(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rewards = make_rewards("format")
    for prefill, response in (
        ("<think>\n", "a</think><answer>b</answer>"),
        ("<think>\n\n</think>\n\n", "<answer>b</answer>"),
        ("", "<think>a</think><answer>b</answer>"),
    ):
        other = copy.deepcopy(tokenizer)
        other.chat_template += prefill.replace("\n", "{{ '\\n' }}")
        env = LLMEnv(WithRewards(EchoTask(), rewards), other, num_envs=2, repeats=1)
        texts = [response, f"<think>{response}"]
        data = respond(
            env,
            env.reset(),
            [[*other(text, add_special_tokens=False)["input_ids"], END] for text in texts],
        )
        assert column(data, "reward") == [1.0, pytest.approx(0.6)], prefill


@pytest.mark.parametrize(
    ("count", "reward"),
    [(0, 0.0), (25, 0.5), (50, 1.0), (2000, 1.0), (3000, 0.5), (4000, 0.0), (10**6, 0.0)],
)
def test_length_is_a_trapezoid(count: int, reward: float) -> None:
    assert heuristics.length("x" * count) == pytest.approx(reward)


@pytest.mark.parametrize(("low", "high"), [(-1, 5), (6, 5), (0, 0)])
def test_impossible_lengths_are_an_error(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="0 <= low <= high > 0"):
        heuristics.length("x", low, high)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("15", 1.0),
        ("a\nis 15.\n\n", 1.0),
        ("15\nis it", 0.5),
        ("fifteen", 0.0),
        ("", 0.0),
        ("٣", 0.0),
    ],
)
def test_number_wants_one_in_the_last_line(response: str, reward: float) -> None:
    assert heuristics.number(response) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("48 + 24 = 72", 1.0),
        ("48 + 24 = 73", 0.0),
        ("7 * 8 = 56, so 56 - 6 = 51", 0.5),
        ("48/2 = <<48/2=24>>24", 1.0),
        ("1. 7 x 8 = 56\n2. 5 - 9 = -4\n- 3 × 4 = 12", 1.0),
        ("$1,200 * 2 = $2,400.00", 1.0),
        ("(3 + 5) / 2 = 4", 1.0),
        ("x = 5", 0.0),
        ("5 = 5", 0.0),
        ("1/0 = 5", 0.0),
        ("9**9**9 = 5", 0.0),
        ("no calculation", 0.0),
        ("", 0.0),
        ("1/3 + 1/3 = 2/3", 1.0),
        ("4 * 12 = 96/2", 1.0),
        ("7 * 8 = 28 * 2, and 2 + 2 = 4", 1.0),
    ],
)
def test_operations_is_the_share_of_right_calculations(response: str, reward: float) -> None:
    assert heuristics.operations(response) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("First we add.\n7 + 8 = 15\n#### 15", 1.0),
        ("- one\n- two", 0.5),
        ("because", 0.25),
        ("The answer is 15.", 0.25),
        ("15", 0.0),
        ("", 0.0),
    ],
)
def test_structure_has_four_quarters(response: str, reward: float) -> None:
    assert heuristics.structure(response) == reward

"""Safe arithmetic, the reward ``countdown`` and the countdown task."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_grpo.rewards.countdown import countdown
from torchrl_grpo.rewards.expressions import evaluate
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Problem, Score
from torchrl_grpo.tasks.countdown import CountdownTask, split_of
from torchrl_grpo.tasks.shapes import ShapesTask


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("(3 + 5) * 2", 16),
        ("1/3 + 1/6", Fraction(1, 2)),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("-2 - -3", 1),
        ("2 × 3 ÷ 4 − 1", Fraction(1, 2)),
        ("2**10", 1024),
        ("2^-2", Fraction(1, 4)),
        (" ((((1))))\t", 1),
    ],
)
def test_arithmetic_is_exact(text: str, value: Fraction | int) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "1 +",
        "1 2",
        "1/0",
        "0**-1",
        "2**0.5",
        "10**10**10",
        "9**9**9**9",
        "(2**4000)*(2**4000)",
        "1e999",
        "7 // 2",
        "7 % 2",
        "2(3)",
        "(1, 2)",
        "007",
        "__import__('os')",
        "1" * 300,
        "(" * 200 + "1" + ")" * 200,
        "(" * 120 + "1" + ")" * 120,
        "-" * 255 + "1",
        "1\x00",
        "\ud800",
        "٣",
        "1\n2",
    ],
)
def test_anything_else_is_a_value_error_at_once(text: str) -> None:
    start = time.process_time()
    if (
        text == "-" * 255 + "1" or text == "(" * 120 + "1" + ")" * 120
    ):  # deep, and within the limits of the syntax
        assert abs(evaluate(text)) == 1
    else:
        with pytest.raises(ValueError, match="an expression must be"):
            evaluate(text)
    assert time.process_time() - start < 10


@pytest.mark.slow
@given(st.text(alphabet="0123456789+-*/(). ^", max_size=40))
def test_random_arithmetic_gives_a_number_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(evaluate(text), Fraction)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>(3+5)*2</answer>", 1.0),
        ("#### (3 + 5) * 2", 1.0),
        ("#### 2 × (5 + 3) = 16", 1.0),
        ("<think>#### 1</think><answer>\n(5+3)*2\n</answer>", 1.0),
        ("#### 3*5+2", 0.1),
        ("#### 3+5+2", 0.1),
        ("<answer>3*5+2</answer> <answer>(3+5)*2</answer>", 1.0),
        ("<answer>(3+5)*2</answer> <answer>3*5+2</answer>", 0.1),
        ("(3+5)*2", 0.0),
        ("", 0.0),
        ("####", 0.0),
        ("#### 16", 0.0),
        ("#### 8*2", 0.0),
        ("#### (3+5)*2*1", 0.0),
        ("#### (3+5)*2+3-3", 0.0),
        ("#### 35-2", 0.0),
        ("#### 3.5*2", 0.0),
        ("#### 2**3+5", 0.0),
        ("#### 5//3*2", 0.0),
        ("#### 2* *3+5", 0.0),
        ("#### 5/(3-3)*2", 0.0),
        ("#### (3+5*2", 0.0),
        ("#### (3+5)2", 0.0),
        ("#### __import__('os').system('3 5 2')", 0.0),
    ],
)
def test_each_given_number_must_be_used_once_and_reach_the_target(
    response: str, reward: float
) -> None:
    assert countdown(response, [2, 3, 5], 16, format_score=0.1) == reward


def test_equal_numbers_may_each_be_used() -> None:
    assert countdown("#### 7*7+7", [7, 7, 7], 56) == 1.0
    assert countdown("#### 7*7", [7, 7, 7], 49) == 0.0


def test_division_by_zero_has_no_value_and_no_format_score() -> None:
    assert countdown("#### 5/(3-3)", [3, 3, 5], 1, format_score=0.1) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "difficulty", [2, 4, 6, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 5))]
)
def test_every_problem_has_its_own_solution(difficulty: int) -> None:
    task = CountdownTask(difficulty)
    for split in ("train", "test"):
        for problem in task.problems(split):
            assert len(problem.extra["nums"]) == difficulty
            assert all(1 <= number <= 20 for number in problem.extra["nums"])
            assert 1 <= problem.extra["target"] <= 100
            assert task.score(problem, [f"#### {problem.answer}"]) == Score(1.0, True)


def test_sizes_and_distinct_problems() -> None:
    task = CountdownTask()
    problems = {split: task.problems(split) for split in ("train", "test")}
    assert {split: len(rows) for split, rows in problems.items()} == {"train": 4096, "test": 512}
    keys = [
        (tuple(sorted(p.extra["nums"])), p.extra["target"])
        for rows in problems.values()
        for p in rows
    ]
    assert len(set(keys)) == 4096 + 512


@pytest.mark.slow
def test_splits_are_disjoint_across_seeds_and_settings() -> None:
    tasks = [CountdownTask(3, largest=9, seed=0), CountdownTask(3, largest=20, seed=1)]
    keys = {
        split: {
            (tuple(sorted(p.extra["nums"])), p.extra["target"])
            for task in tasks
            for p in task.problems(split)
        }
        for split in ("train", "test")
    }
    assert not keys["train"] & keys["test"]
    assert split_of([2, 3, 5], 16) == split_of([5, 2, 3], 16)


@pytest.mark.slow
def test_same_seed_gives_the_same_problems_in_another_process() -> None:
    """Those of countdown, pictures, and sums."""
    code = (
        "from torchrl_grpo.tasks.arithmetic import ArithmeticTask as A\n"
        "from torchrl_grpo.tasks.countdown import CountdownTask as C\n"
        "from torchrl_grpo.tasks.shapes import ShapesTask as S\n"
        "print([(p.extra, p.answer) for p in C(4, seed=5).problems('test')[:20]])\n"
        "print([p.images[0].hash for p in S().problems('test')[:50]])\n"
        "print([p.query for p in A(3, 5).problems('train')[:50]])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    countdown_problems = CountdownTask(4, seed=5).problems("test")
    assert done.stdout.splitlines() == [
        str([(p.extra, p.answer) for p in countdown_problems[:20]]),
        str([p.images[0].hash for p in ShapesTask().problems("test")[:50]]),
        str([p.query for p in ArithmeticTask(3, 5).problems("train")[:50]]),
    ]
    assert countdown_problems != CountdownTask(4, seed=6).problems("test")


def test_the_message_has_numbers_target_and_format() -> None:
    task = CountdownTask()
    (message,) = task.messages(task.problems("train")[0])
    extra = task.problems("train")[0].extra
    assert message["role"] == "user"
    assert (
        str(extra["nums"]) in message["content"]
        and f"equals {extra['target']}." in message["content"]
    )
    assert message["content"].endswith("#### expression")


def test_the_last_turn_is_scored() -> None:
    problem = Problem("", "(3+5)*2", {"nums": [2, 3, 5], "target": 16})
    assert CountdownTask().score(problem, ["#### (3+5)*2", "#### 3+5+2"]) == Score(0.0, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"difficulty": 1}, "difficulty must be from 2 to 6 numbers, got 1"),
        ({"difficulty": 7}, "difficulty must be from 2 to 6 numbers, got 7"),
        ({"largest": 1}, "largest and largest_target must be at least 2, got 1 and 100"),
    ],
)
def test_arguments_out_of_range_are_an_error(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CountdownTask(**arguments)


def test_an_unknown_split_is_an_error() -> None:
    with pytest.raises(ValueError, match="split must be 'train' or 'test', got 'dev'"):
        CountdownTask().problems("dev")  # type: ignore[arg-type]

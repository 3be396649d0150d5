"""The arithmetic task: its splits share no problem, its problems are reproducible, and its scorer is exact."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_grpo.tasks.arithmetic import ArithmeticTask, final_answer, split_of
from torchrl_grpo.tasks.base import Problem, Score

QUERY = re.compile(r"(\d+)([+-])(\d+)=\?")


def parse(problem: Problem) -> tuple[int, str, int]:
    match = QUERY.fullmatch(problem.query)
    assert match is not None, problem.query
    return int(match[1]), match[2], int(match[3])


def canonical(problem: Problem) -> tuple[str, int, int]:
    a, op, b = parse(problem)
    return (op, min(a, b), max(a, b)) if op == "+" else (op, a, b)


@pytest.mark.parametrize("difficulty", [1, 2, 3, 4, 7])
def test_answers_are_right_and_operands_have_the_stated_size(difficulty: int) -> None:
    digits = {1: 1, 2: 2}.get(difficulty, difficulty - 1)
    operations = set()
    for split in ("train", "test"):
        for problem in ArithmeticTask(difficulty).problems(split):
            a, op, b = parse(problem)
            operations.add(op)
            assert len(str(a)) == len(str(b)) == digits
            assert int(problem.answer) == (a + b if op == "+" else a - b) >= 0
    assert operations == ({"+"} if difficulty <= 2 else {"+", "-"})


@pytest.mark.slow
def test_splits_share_no_problem_across_difficulties_and_seeds() -> None:
    tasks = [ArithmeticTask(difficulty, seed) for difficulty in (1, 2, 3, 4) for seed in (0, 1, 2)]
    train = {canonical(problem) for task in tasks for problem in task.problems("train")}
    test = {canonical(problem) for task in tasks for problem in task.problems("test")}
    assert not train & test


def test_both_orders_of_a_sum_fall_on_the_same_side() -> None:
    assert all(split_of(a, "+", b) == split_of(b, "+", a) for a in range(100) for b in range(100))


def test_a_fifth_of_all_two_digit_sums_is_held_out() -> None:
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    share = sum(split_of(a, "+", b) == "test" for a, b in pairs) / len(pairs)
    assert len(pairs) == 4095
    assert share == pytest.approx(0.2, abs=0.02)


def test_default_task_has_thousands_of_distinct_problems() -> None:
    task = ArithmeticTask()
    queries = {
        split: [problem.query for problem in task.problems(split)] for split in ("train", "test")
    }
    assert {split: len(set(q)) for split, q in queries.items()} == {"train": 4096, "test": 512}
    assert {split: len(q) for split, q in queries.items()} == {"train": 4096, "test": 512}


@pytest.mark.slow
def test_smallest_difficulty_gives_every_problem_there_is() -> None:
    task = ArithmeticTask(difficulty=1)
    queries = [problem.query for split in ("train", "test") for problem in task.problems(split)]
    assert sorted(queries) == sorted(f"{a}+{b}=?" for a in range(10) for b in range(10))


def test_another_seed_draws_in_another_order() -> None:
    first, second = (ArithmeticTask(2, seed).problems("test") for seed in (0, 1))
    assert first != second
    assert ArithmeticTask(2, 0).problems("test") == first


def test_message_states_the_answer_format() -> None:
    assert ArithmeticTask().messages(Problem("27+58=?", "85")) == [
        {"role": "user", "content": "27+58=? #### n"}
    ]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### 85", "85"),
        ("7+8=15, 2+5+1=8 #### 85", "85"),
        ("#### 12 no, #### 85\n", "85"),
        ("####85", "85"),
        ("#### 0085", "85"),
        ("#### -5", "-5"),
        ("#### -0", "0"),
        ("85", None),
        ("### 85", None),
        ("#### 85.", None),
        ("#### 8 5", None),
        ("#### 85 #### ", None),
        ("#### +85", None),
        ("#### --85", None),
        ("#### 8_5", None),
        ("#### ٨٥", None),
        ("####\n85", None),
        ("", None),
    ],
)
def test_only_an_integer_after_the_mark_at_the_very_end_is_an_answer(
    response: str, answer: str | None
) -> None:
    assert final_answer(response) == answer


@pytest.mark.slow
@given(st.integers(), st.text(max_size=30), st.integers(0, 5))
def test_a_written_integer_is_read_back(n: int, before: str, zeros: int) -> None:
    sign, digits = ("-", str(n)[1:]) if n < 0 else ("", str(n))
    assert final_answer(f"{before}#### {sign}{'0' * zeros}{digits}") == str(n)


def test_scores_are_exact() -> None:
    task = ArithmeticTask()
    problem = Problem("27+58=?", "85")
    assert task.score(problem, ["7+8=15, 2+5+1=8 #### 85"]) == Score(1.0, True)
    assert task.score(problem, ["7+8=15, 2+5=7 #### 75"]) == Score(0.0, False)
    assert task.score(problem, ["85"]) == Score(0.0, False)
    assert task.score(problem, ["#### 85", "#### 86"]) == Score(0.0, False)


@pytest.mark.parametrize(
    "nonsense", ["#### " + "9" * 100_000, "#" * 100_000, "#### " * 20_000, "\x00\ud800", "-" * 9999]
)
def test_nonsense_of_any_length_scores_zero(nonsense: str) -> None:
    assert ArithmeticTask().score(Problem("27+58=?", "85"), [nonsense]) == Score(0.0, False)


@pytest.mark.parametrize("difficulty", [0, -1, 11])
def test_difficulty_out_of_range_is_an_error(difficulty: int) -> None:
    with pytest.raises(ValueError, match=f"difficulty must be from 1 to 10, got {difficulty}"):
        ArithmeticTask(difficulty)


def test_unknown_split_is_an_error() -> None:
    with pytest.raises(ValueError, match="split must be 'train' or 'test', got 'dev'"):
        ArithmeticTask().problems("dev")  # type: ignore[arg-type]

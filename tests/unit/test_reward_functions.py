"""Reward functions: called in three forms, converted to parts and a score, awaited concurrently."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Dialog, Problem, Score
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards

EXTRA = {"prompt": "6*7=?", "solution": "42", "level": 3}


def dialog(response: str = "42", answer: Any = "42", **extra: Any) -> Dialog:
    return Dialog(
        Problem("6*7=?", answer, EXTRA | extra, dataset="sums"), [response], tokens=(5, 6, 1)
    )


def columns_of(*columns: str, answer: Any = "") -> Problem:
    return Problem("", answer, dict.fromkeys(columns))


def parts(function: Callable[..., Any], *args: Any, **options: Any) -> dict[str, float | None]:
    return dict(make_rewards({"fn": function, **options})(dialog(*args)).parts)


# Arguments


def test_arguments_are_matched_by_name() -> None:
    def see(
        response,
        prompt,
        messages,
        answer,
        finish_reason,
        tokens,
        level,
        extra=7,
        scale=1,
        **columns,
    ):  # type: ignore[no-untyped-def]
        assert [message["content"] for message in messages] == ["6*7=?", "42"]
        assert (response, prompt, answer, finish_reason, tokens) == (
            "42",
            "6*7=?",
            "42",
            "stop",
            [5, 6, 1],
        )
        assert (level, extra, scale) == (3, 7, 5)
        assert columns == {"solution": "42"}
        return 1

    assert parts(see, scale=5) == {"see": 1.0}


def test_an_option_wins_over_a_column_and_a_fact_over_a_column() -> None:
    def see(response: str, level: int) -> float:
        assert response == "42"
        return level

    rewards = make_rewards({"fn": see, "level": 8})
    assert rewards(dialog(response="42", **{"level": 3})).reward == 8
    shadowed = Dialog(Problem("q", None, {"response": "a column", "level": 3}), ["42"])
    assert make_rewards(see)(shadowed).reward == 3


def test_arguments_that_nothing_gives_are_refused_before_a_run() -> None:
    def see(response: str, solution: str, hint: str, level: int = 3) -> float:
        return 1.0

    rewards = make_rewards(see)
    with pytest.raises(
        ValueError,
        match=r"needs hint, .*: use only these names: answer, .*solution, tokens",
    ):
        rewards.check(columns_of("solution"))
    rewards.check(columns_of("solution", "hint"))
    make_rewards({"fn": see, "hint": "none"}).check(columns_of("solution"))


@pytest.mark.parametrize(
    ("function", "columns", "missing"),
    [
        ("gsm8k", [], "answer"), ("gsm8k", ["answer"], "answer"), ("number", [], None),
        (lambda completions, answer: [1], [], "answer"), (lambda completions, answer: [1], ["answer"], None),
        (lambda solution_str, ground_truth: 1, [], "ground_truth"),
        (lambda solution_str, ground_truth: 1, ["ground_truth"], None),
    ],
)  # fmt: skip
def test_an_answer_that_no_problem_has_is_refused_before_a_run(
    function: Any, columns: list[str], missing: str | None
) -> None:
    rewards = make_rewards({"fn": function, "name": "f"})
    rewards.check(columns_of(*columns))
    if missing is None:
        rewards.check(columns_of(*columns, answer=None))
    else:
        with pytest.raises(ValueError, match=f"needs {missing}, .*: use only these names"):
            rewards.check(columns_of(*columns, answer=None))


@pytest.mark.parametrize(
    ("function", "columns", "has_answer", "fix"),
    [
        (lambda completion, reference: 1, [], True, "rename completion to response and reference to answer"),
        (lambda response, label: 1, ["label_text"], True, "rename label to answer"),
        (lambda response, solutoin: 1, ["solution"], True, "rename solutoin to solution"),
        (lambda response, answer: 1, ["Final_Answer"], False, r"env\.columns\.answer=Final_Answer"),
        (lambda completions, answer: [1], ["target_value"], False, r"env\.columns\.answer=target_value"),
        (lambda completion, mood: 1, [], True, "rename completion to response"),
        (lambda response, mood: 1, [], True, "set it as an option"),
    ],
)  # fmt: skip
def test_a_missing_argument_says_what_to_rename_or_to_name(
    function: Any, columns: list[str], has_answer: bool, fix: str
) -> None:
    with pytest.raises(ValueError, match=fix):
        make_rewards({"fn": function, "name": "f"}).check(
            columns_of(*columns, answer="" if has_answer else None)
        )


def test_options_that_a_function_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reward gsm8k .* has no mood: did you mean mode\?"):
        make_rewards({"fn": "gsm8k", "mood": "lenient"})
    with pytest.raises(ValueError, match=r"has no weigth: did you mean weight\?"):
        make_rewards({"fn": "gsm8k", "weigth": 0.5})
    with pytest.raises(
        ValueError,
        match=r" x: use some of \['answer', 'mode', 'name'",
    ):
        make_rewards({"fn": "gsm8k", "x": 1})
    with pytest.raises(ValueError, match=r"reward f .*: remove the '/'"):
        make_rewards({"fn": lambda response, /: 1, "name": "f"})


# Results


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (2, {"f": 2.0}),
        (True, {"f": 1.0}),
        (np.float32(0.5), {"f": 0.5}),
        (np.bool_(True), {"f": 1.0}),
        (torch.tensor([0.25]), {"f": 0.25}),
        ({"a": 1, "b": None, "c": False}, {"f/a": 1.0, "f/b": None, "f/c": 0.0}),
    ],
)
def test_a_result_becomes_parts(result: Any, expected: dict[str, float | None]) -> None:
    assert parts(lambda response: result, name="f") == expected


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (float("nan"), "reward f must be a finite number, a bool or None, but is nan"),
        (float("-inf"), "but is -inf"),
        ("1.0", "reward f must be .*, but is of type str: return a number"),
        (10**1000, "is of type int"),
        (torch.ones(2), "is of type Tensor"),
        ([1.0], "is of type list"),
        ({"a": 1.0, "b": {}}, "reward f/b must be .* type dict"),
        (None, r"one of the rewards \['f'\] must be a number .*: return 0\.0 where"),
        ({"correct": True}, r"one of the rewards \['f/correct'\] must be a number"),
        ({}, r"one of the rewards \[\] must be a number"),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_the_function(result: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parts(lambda response: result, name="f")


def test_the_reward_is_the_weighted_sum_of_what_applies() -> None:
    spec = [
        {"fn": lambda response: {"a": 1, "b": 3, "correct": True}, "name": "f", "weight": 0.5},
        {"fn": lambda response: None, "name": "g", "weight": 100},
        {"fn": lambda response: 4, "name": "h", "weight": -0.25},
        {"fn": lambda response: {"x": 8, "y": 100}, "name": "k", "weight": {"x": 2}},
        {"fn": lambda response: 7, "name": "logged", "weight": 0},
    ]
    score = make_rewards(spec)(dialog())
    assert score.reward == 0.5 * 4 - 1 + 16
    assert list(score.parts) == ["f/a", "f/b", "f/correct", "g", "h", "k/x", "k/y", "logged"]
    assert score.parts["g"] is None


@pytest.mark.parametrize(
    ("results", "correct"),
    [
        ([1], True), ([0.99], False), ([True], True), ([0, 1], False), ([None, 1], True), ([None, 0], False),
        ([{"a": 1, "b": 0}], True), ([{"a": 0, "reward": 1}], True), ([{"reward": 9, "correct": False}], False),
        ([{"reward": 0, "correct": 1}], True), ([{"reward": 1, "correct": None}, 0], False),
    ],
)  # fmt: skip
def test_the_first_reward_that_applies_decides_what_is_correct(
    results: list[Any], correct: bool
) -> None:
    spec = [{"fn": lambda response, r=r: r, "name": f"f{i}"} for i, r in enumerate(results)]
    assert make_rewards(spec)(dialog()).correct is correct


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], r"env.reward=\[\] must name a reward"),
        (["gsm8k", {"fn": "gsm8k", "mode": "lenient"}], "different names, but gsm8k occurs twice: set `name`"),
        ({"weight": 1}, "env.reward must name a function as fn, got {'weight': 1}"),
        ([3], "env.reward must name a function as fn, got 3: for example"),
        ({"fn": "gsm8k", "name": "a/b"}, "env.reward.name='a/b' must be text without '/'"),
        ({"fn": "gsm8k", "weight": "much"}, "env.reward.weight='much' of gsm8k must be a finite number"),
        ({"fn": "gsm8k", "weight": True}, "must be a finite number"),
        ({"fn": "ifeval", "weight": {"prompt_strict": float("inf")}}, "of ifeval must be a finite number"),
        ({"fn": lambda solution_str: 1, "name": "v", "weight": {"score": 1}}, "weight of reward v must be a number"),
    ],
)  # fmt: skip
def test_a_spec_that_is_wrong_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rewards(spec)


def test_a_part_with_a_weight_must_be_returned() -> None:
    with pytest.raises(ValueError, match=r"reward f .*parts .*\['x'\]"):
        parts(lambda response: {"y": 1}, name="f", weight={"x": 1})


# TRL's and verl's functions


def test_a_function_of_trl_gets_text_for_a_prompt_of_text() -> None:
    def accuracy(prompts, completions, solution, completion_ids, trainer_state, **kwargs):  # type: ignore[no-untyped-def]
        assert (prompts, completion_ids, trainer_state) == (["6*7=?"], [[5, 6, 1]], None)
        assert set(kwargs) == {"answer", "level", "log_extra", "log_metric"}
        kwargs["log_metric"]("accuracy", 1.0)
        return [float(c == s) for c, s in zip(completions, solution, strict=True)]

    rewards = make_rewards(accuracy)
    rewards.check(columns_of("prompt", "solution"))
    assert rewards(dialog()) == Score(1.0, True, {"accuracy": 1.0})
    with pytest.raises(ValueError, match="needs solution, which is neither"):
        rewards.check(columns_of("prompt"))


def test_a_function_of_trl_gets_messages_for_a_prompt_of_messages() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7=?"}]
    after = [
        {"role": "assistant", "content": "41"},
        {"role": "user", "content": "Again?"},
        {"role": "assistant", "content": "42"},
    ]

    def last(completions, prompts, **kwargs):  # type: ignore[no-untyped-def]
        assert prompts == [chat]
        return [len(completions[0]) + float(completions[0][-1]["content"])]

    problem = Problem("6*7=?", "42", {"question": chat})
    one = Dialog(problem, ["42"], messages=[*chat, after[-1]])
    two = Dialog(problem, ["41", "42"], messages=[*chat, *after])
    rewards = make_rewards(last, prompt_column="question")
    assert [rewards(one).reward, rewards(two).reward] == [43.0, 45.0]
    assert rewards(Dialog(problem, ["42"])).reward == 43.0
    chat = [
        {"role": "system", "content": "In words."},
        chat[1],
    ]  # env.system_prompt replaces that of the data
    assert rewards(Dialog(problem, ["42"], messages=[*chat, after[-1]])).reward == 43.0


@pytest.mark.parametrize("result", [1.0, [], [1.0, 2.0]])
def test_a_function_of_trl_must_return_one_reward(result: Any) -> None:
    with pytest.raises(ValueError, match="reward f must return a list"):
        parts(lambda completions, **kwargs: result, name="f")


def test_a_function_of_trl_may_return_none_a_tensor_and_be_async() -> None:
    async def later(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(completions[0]))]

    spec = [
        {"fn": lambda completions, **kwargs: [None], "name": "none"},
        {"fn": lambda completions: torch.tensor([3.0]), "name": "tensor"},
        {"fn": lambda completion_ids, **kwargs: [len(completion_ids[0])], "name": "ids"},
        {"fn": lambda prompts, **kwargs: [len(prompts[0])], "name": "prompt"},
        later,
    ]
    assert make_rewards(spec)(dialog()).parts == {
        "none": None,
        "tensor": 3.0,
        "ids": 3.0,
        "prompt": 5.0,
        "later": 2.0,
    }


def test_a_function_of_verl_gets_its_four_arguments() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
        return {
            "score": float(solution_str == ground_truth),
            "source": len(data_source),
            "info": str(extra_info),
        }

    rewards = make_rewards({"fn": compute_score, "weight": 0.5})
    rewards.check(columns_of())
    expected = {"compute_score": 1.0, "compute_score/source": 4.0}
    assert rewards(dialog()) == Score(0.5, True, expected)
    row = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "43"}}
    assert rewards(dialog(**row)).parts == {"compute_score": 0.0, "compute_score/source": 12.0}


def test_a_function_of_verl_may_return_a_number_and_take_options() -> None:
    def score(data_source, solution_str, ground_truth, extra_info, method="strict"):  # type: ignore[no-untyped-def]
        return len(method) + extra_info["index"]

    assert make_rewards(score)(dialog(extra_info={"index": 2})).reward == 8
    assert make_rewards({"fn": score, "method": ""})(dialog(index=1)).reward == 1
    with pytest.raises(ValueError, match=r"reward f .*\['acc'\]: add `score`"):
        parts(lambda solution_str: {"acc": 1}, name="f")


@pytest.mark.parametrize("name", ["solution_str", "model_output", "predict_str"])
def test_a_function_of_verl_may_give_the_response_another_name(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(
        f"def compute_score({name}, ground_truth, timeout_score=0): return {name} == ground_truth",
        namespace,
    )
    rewards = make_rewards(namespace["compute_score"])
    rewards.check(columns_of())
    row = {"reward_model": {"style": "rule", "ground_truth": "43"}}
    assert [rewards(dialog()).reward, rewards(dialog(**row)).reward] == [1.0, 0.0]


def test_the_first_entry_of_a_tuple_from_a_function_of_verl_is_the_score() -> None:
    def compute_score(model_output: str, ground_truth: str) -> tuple[bool, bool, str]:
        return model_output == ground_truth, True, model_output

    assert make_rewards(compute_score)(dialog()) == Score(1.0, True, {"compute_score": 1.0})
    with pytest.raises(InvalidRewardError, match="is of type tuple"):
        parts(lambda response: (1.0, 2.0), name="f")


def test_feedback_is_kept_in_every_form() -> None:
    def by_response(response: str) -> dict[str, Any]:
        return {"reward": 1.0, "feedback": "ours"}

    def by_trl(completions: list[str], **kwargs: Any) -> list[Any]:
        return [{"reward": 1.0, "feedback": "TRL's"}]

    def by_verl(solution_str: str) -> dict[str, Any]:
        return {"score": 1.0, "feedback": "verl's", "pred": "42"}

    score = make_rewards([by_response, by_trl, by_verl])(dialog())
    assert score.feedback == "ours\nTRL's\nverl's"
    assert score.parts == {"by_response/reward": 1.0, "by_trl/reward": 1.0, "by_verl": 1.0}
    number = make_rewards({"fn": lambda response: {"": 1.0, "feedback": 0.5}, "name": "f"})(
        dialog()
    )
    assert (number.feedback, number.parts) == ("", {"f": 1.0, "f/feedback": 0.5})


@pytest.mark.parametrize("options", [{"max_completion_len": 100, "soft_punish_cache": 20}, {}])
def test_a_function_that_makes_a_reward_is_refused_before_a_run(options: dict[str, int]) -> None:
    def get_punishment(
        max_completion_len: int, soft_punish_cache: int = 20
    ) -> Callable[..., list[float]]:
        return lambda completion_ids, **kwargs: [0.0 for _ in completion_ids]

    with pytest.raises(
        ValueError,
        match=r"reward get_punishment must have .*: if it returns",
    ):
        make_rewards({"fn": get_punishment, **options}).check(columns_of("prompt", "solution"))
    reward = make_rewards({"fn": get_punishment(100), "name": "made"})
    reward.check(columns_of("prompt", "solution"))
    assert reward(dialog()).reward == 0.0


# Asynchronous


async def slow(response: str) -> float:
    await asyncio.sleep(float(response))
    return float(response)


def test_async_rewards_of_many_dialogs_are_awaited_at_a_time() -> None:
    barrier = asyncio.Barrier(50)

    async def meet(response: str) -> float:
        await barrier.wait()  # for ever, if they were awaited one after the other
        return float(response)

    rewards = make_rewards([meet, {"fn": lambda response: 1, "name": "plain"}])
    scores = rewards.score_all([dialog("0.2")] * 50, timeout_s=300)
    assert scores == [Score(1.2, False, {"meet": 0.2, "plain": 1.0})] * 50
    assert rewards.asynchronous and not make_rewards("gsm8k").asynchronous


@pytest.mark.slow
def test_one_dialogs_error_or_time_out_is_not_anothers() -> None:
    def refuse(response: str) -> float:
        if response == "0.01":
            raise KeyError("no")
        return 1.0

    scores = make_rewards([slow, refuse]).score_all(
        [*map(dialog, ("60", "0.01", "x", "0.02"))], timeout_s=5
    )
    assert [type(score) for score in scores] == [InvalidRewardError, KeyError, ValueError, Score]
    assert scores[0].cause == "timeout"  # type: ignore[union-attr]
    assert str(scores[0]) == "a reward must be returned within 5 s, but it was not."


def test_a_function_that_exits_ends_nothing() -> None:
    async def leave(response: str) -> float:
        sys.exit(3)

    for function in (leave, lambda response: sys.exit(3)):
        rewards = make_rewards({"fn": function, "name": "leave"})
        with pytest.raises(RuntimeError, match=r"SystemExit\(3\) was raised"):
            rewards(dialog())
    assert make_rewards(slow)(dialog("0")).reward == 0.0


def test_async_rewards_work_inside_a_running_event_loop() -> None:
    async def caller() -> float:
        return make_rewards(slow)(dialog("0")).reward

    assert asyncio.run(caller()) == 0.0


def test_an_async_function_keeps_its_event_loop_from_call_to_call() -> None:
    loops = []

    class Client:
        async def __call__(self, response: str) -> float:
            loops.append(asyncio.get_running_loop())
            return 1.0

    rewards = make_rewards({"fn": Client(), "name": "client"})
    assert rewards.asynchronous
    assert [rewards(dialog()).reward, rewards(dialog()).reward] == [1.0, 1.0]
    assert loops[0] is loops[1]


@pytest.mark.slow
def test_a_task_with_rewards_is_the_other_task_in_all_else() -> None:
    task = ArithmeticTask(difficulty=1)
    wrapped = WithRewards(
        task, make_rewards({"fn": "gsm8k", "mode": "lenient", "name": "right", "weight": 2})
    )
    problem = wrapped.problems("train")[0]
    assert wrapped.messages(problem) == task.messages(problem)
    got = wrapped.judge(Dialog(problem, [f"The answer is {problem.answer}."]))
    assert got == Score(2.0, True, {"right": 1.0})

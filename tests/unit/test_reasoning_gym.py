"""``env.dataset=reasoning_gym:NAME``: every data set of the installed version, its options, and the errors."""

from __future__ import annotations

import inspect
import json
import pickle
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import compose_config
from tests.support.runs import at
from tests.support.scripts import SMALL, SYNC, rows_of
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.integrations.reasoning_gym import EVALUATED, ReasoningGymTask, is_harmless

reasoning_gym = pytest.importorskip("reasoning_gym")

NAMES = sorted(set(reasoning_gym.factory.DATASETS) - {"composite"})
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Data sets with many right answers, whose entries have none: nothing says what a right response would be."""


def answered(text: str | None) -> list[str]:
    return [f"<think>Hm.</think>\n<answer>\n{text}\n</answer>"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names", [NAMES[::8], pytest.param(NAMES, marks=pytest.mark.nightly)], ids=len
)
def test_data_sets_draw_render_and_score_their_own_answers(names: Sequence[str]) -> None:
    """The scorer, pickled and unpickled, must reject None as a response without raising."""
    without = set()
    wrong = dict[str, float]()
    for name in names:
        task = ReasoningGymTask(name, max_samples=2)
        [problem, *_] = task.problems("train")
        assert task.problems("test"), name
        system, user = task.messages(problem)
        assert "<answer>" in system["content"] and user["content"] == problem.query, name
        there = pickle.loads(pickle.dumps(task))
        assert there.score(problem, ["no tag"]).reward < 1, name
        if problem.answer is None:
            without.add(name)
        elif (reward := there.score(problem, answered(problem.answer)).reward) != 1:
            wrong[name] = reward
    assert len(NAMES) >= 105
    assert without == WITHOUT_ANSWER & set(names)
    assert wrong == {}


def test_the_scorers_that_run_an_answer_as_python_are_the_known_ones() -> None:
    """Compare with the files that evaluate a variable that they call an answer."""
    runs = re.compile(r"(\beval|parse_expr|sympify)\((user_)?answer\b")
    names = {
        name
        for name in NAMES
        if runs.search(Path(inspect.getfile(reasoning_gym.factory.DATASETS[name][0])).read_text())
    }
    assert names - {"propositional_logic"} == EVALUATED  # that has a parser of its own


HOSTILE = [
    "__import__('os').system('touch {file}')",
    "open('{file}', 'w')",
    "(open)('{file}', 'w')",
    "[open][0]('{file}', 'w')",
    "exec(chr(49))",
    "[open('{file}', 'w') for x in [1]]",
    "map(open, ['{file}'], ['w'])",
    "list(map(open, ['{file}'], ['w']))",
    "(lambda f: f('{file}', 'w'))(open)",
    "sin(open('{file}', 'w'))",
    "open ('{file}', 'w')",
    "[open\\\n('{file}', 'w')]",
    "[open # sin\n('{file}', 'w')]",
]


@pytest.mark.parametrize("name", sorted(EVALUATED))
def test_an_answer_that_is_code_is_not_run(name: str, tmp_path: Path) -> None:
    task = ReasoningGymTask(name, max_samples=1)
    [problem] = task.problems("train")
    for answer in HOSTILE:
        message = answered(answer.format(file=tmp_path / "touched"))
        assert not task.score(problem, message).correct
        assert not (tmp_path / "touched").exists(), answer


def test_what_is_run_would_be_dangerous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would prove nothing."""
    monkeypatch.setattr("torchrl_grpo.integrations.reasoning_gym.is_harmless", lambda _: True)
    task = ReasoningGymTask("n_queens", max_samples=1)
    [problem] = task.problems("train")
    with suppress(Exception):
        task.score(problem, answered(f"[open('{tmp_path / 'touched'}', 'w')]"))
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "answer",
    ["x**2*sin(3*x + 1)/2 + C", "2*(x + 1)*(x - 1)", "[[1, 0], [0, 1]]", "['A', 'BC']", "_ Q\nQ _"],
)
def test_ordinary_answers_are_harmless(answer: str) -> None:
    assert is_harmless(answer)


def test_the_splits_share_no_question_and_are_the_same_in_every_process() -> None:
    first, again = (
        ReasoningGymTask("chain_sum", options={"max_digits": 1}, max_samples=40) for _ in range(2)
    )
    train, test = first.problems("train"), first.problems("test")
    assert (len(train), len(test)) == (40, 10)
    assert not {problem.query for problem in train} & {problem.query for problem in test}
    assert len({problem.query for problem in train}) == 40
    assert list(again.problems("train")) == list(train)
    other = ReasoningGymTask("chain_sum", options={"max_digits": 1, "seed": 1}, max_samples=40)
    assert {problem.query for problem in other.problems("train")} != {
        problem.query for problem in train
    }


def test_a_question_of_two_levels_is_one_problem() -> None:
    task = ReasoningGymTask("chain_sum", options={"levels": [0, 1, 2]}, max_samples=60)
    for split, size in (("train", 60), ("test", 15)):
        assert (
            len({problem.query for problem in task.problems(split)})
            == len(task.problems(split))
            == size
        )


def test_levels_have_an_equal_share_and_set_the_arguments() -> None:
    task = ReasoningGymTask("chain_sum", options={"levels": [0, 2, 5]}, max_samples=30)
    train = task.problems("train")
    assert [problem.extra["level"] for problem in train] == [0] * 10 + [2] * 10 + [5] * 10
    most = [
        max(
            problem.extra["metadata"]["num_terms"]
            for problem in train
            if problem.extra["level"] == at
        )
        for at in (0, 5)
    ]
    assert most[0] == 2 < most[1] <= 7


def test_a_scorer_takes_the_last_tag_or_the_whole_response() -> None:
    task = ReasoningGymTask("chain_sum", max_samples=1)
    [problem] = task.problems("train")
    right = problem.answer
    assert task.score(problem, [f"<answer>0.5</answer> or <answer>{right}</answer>"]).correct
    assert not task.score(problem, [right]).correct
    bare = ReasoningGymTask(
        "chain_sum",
        max_samples=1,
        system_prompt="A number.",
        prompt_template="{num_terms}: {question}",
    )
    assert bare.score(problem, [f" {right}\n"]).correct
    assert [message["content"] for message in bare.messages(problem)] == [
        "A number.",
        f"{problem.extra['metadata']['num_terms']}: {problem.query}",
    ]


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ("chain_sun", {}, "must be one of the .* use reasoning_gym:chain_sum"),
        ("composite", {}, "use env.datasets for several"),
        ("chain_sum", {"max_digit": 2}, "dataset_options.max_digit must .* use max_digits"),
        ("chain_sum", {"size": 2}, "use env.max_samples"),
        ("chain_sum", {"max_digits": -1}, "max_digits must be >= min_digits"),
        ("chain_sum", {"seed": -1}, "integer of at least 0"),
        ("chain_sum", {"levels": [0, 99]}, r"levels=\[0, 99\] must be .* from 0 to 10"),
        ("chain_sum", {"levels": [1, 0]}, "must be increasing integers"),
        ("chain_sum", {"levels": 3}, "increasing integers from 0"),
        ("chain_sum", {"levels": [0], "max_digits": 3}, "max_digits must be left out .*levels"),
    ],
)
def test_options_that_the_library_rejects_are_reported(
    dataset: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ReasoningGymTask(dataset, options=options)


def test_keys_that_its_data_sets_do_not_read_are_refused() -> None:
    data = "env.dataset=reasoning_gym:chain_sum"
    with pytest.raises(ConfigError, match=rf"env\.difficulty=3 must be left out with {data}"):
        compose_config(*SMALL, data, "env.difficulty=3")


def test_without_the_library_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r'pip install "torchrl_grpo\[reasoning-gym\]"'):
        ReasoningGymTask("chain_sum")


GYM = (
    'env.datasets=[{dataset: "reasoning_gym:chain_sum", weight: 2, dataset_options: {max_terms: 2, max_digits: 1}, '
    'max_samples: 40}, {dataset: "reasoning_gym:leg_counting", name: legs, max_samples: 20}]'
)


@pytest.mark.slow
def test_several_train_through_reward_workers_and_resume_equal(
    run_here: Callable[..., int], tmp_path: Path
) -> None:
    steps = (
        "evaluation.num_prompts=4",
        GYM,
        "env.reward_workers=1",
        "train.checkpoint_frequency=2",
    )
    common = [
        "--config-name",
        "grpo_arithmetic",
        *SMALL,
        *steps,
        "inference_model.max_new_tokens=8",
    ]
    assert (
        run_here(
            SYNC, *common, "train.total_dialog_turns=64", f"hydra.run.dir={tmp_path / 'whole'}"
        )
        == 0
    )
    half = at(tmp_path / "whole", 2)
    resume = (
        f"train.resume={half}",
        "train.total_dialog_turns=64",
        f"hydra.run.dir={tmp_path / 'rest'}",
    )
    assert run_here(SYNC, *common, *resume) == 0
    whole, rest = rows_of(tmp_path / "whole"), rows_of(tmp_path / "rest")
    assert [row["train/loss"] for row in rest if row["step"] > 2] == [
        row["train/loss"] for row in whole if row["step"] > 2
    ]
    samples = [json.loads(line) for line in (tmp_path / "whole" / "samples.jsonl").open()]
    assert {sample["dataset"] for sample in samples} == {"chain_sum", "legs"}
    assert whole[-1]["rollout/invalid"] == 0


def test_a_data_set_is_made_from_the_config() -> None:
    config = compose_config(
        *SMALL,
        "env.dataset=reasoning_gym:chain_sum",
        "env.dataset_options={levels: [0, 1]}",
        "env.max_samples=8",
    )
    task = make_task(config.env)
    assert task.name == "chain_sum" and len(task.problems("train")) == 8

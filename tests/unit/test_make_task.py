"""From ``env.*`` to a task: built-in data sets, files, several with weights, and custom classes."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from omegaconf import OmegaConf

from tests.support.configs import compose_config
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.config import ConfigError, from_hydra
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Dialog, Message, Problem, Score, Split, Task, Turn, WrappedTask
from torchrl_grpo.tasks.gsm8k import GSM8KTask
from torchrl_grpo.tasks.mixed import MixedTask
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards

REWARD = """
def exact_match(response, answer):
    return {"reward": float(response.strip().endswith(answer)), "short": float(len(response) < 20)}

def by_column(response, level):
    return level / 10
"""
TASK = """
from torchrl_grpo.tasks import Problem, Score, Task

class MyTask(Task):
    name = "mine"
    def __init__(self, level=1):
        self.level = level
    def problems(self, split):
        return [Problem(f"{split} {self.level}", "x")]
    def score(self, problem, responses):
        return Score(1.0, True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "my_own_tasks.py").write_text(TASK)
    for name, start in (("a", 0), ("b", 100)):
        rows = [
            {"q": f"{n}+1?", "answer": str(n + 1), "level": n % 5} for n in range(start, start + 30)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_task_of(*overrides: str) -> Task:
    return make_task(compose_config(*overrides).env)


def test_a_task_in_a_file_runs_where_the_file_is_not(folder: Path) -> None:
    task = make_task_of(
        "env.dataset=null", "env.task._target_=my_own_tasks.py:MyTask", "+env.task.level=3"
    )
    sent = cloudpickle.dumps([task])
    (folder / "my_own_tasks.py").unlink()
    code = (
        "import pickle, sys; [task] = pickle.load(sys.stdin.buffer)\n"
        "again = pickle.loads(pickle.dumps(task)); print(task.problems('train')[0].query, again.level)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, cwd="/")
    assert done.stdout.decode() == "train 3 3\n", done.stderr.decode()


def score(task: Task, problem: Problem, response: str) -> Score:
    return task.judge(Dialog(problem, [response]))


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_file_and_a_function_make_a_task() -> None:
    task = make_task_of(
        "env.dataset=a.jsonl",
        "env.columns.prompt=q",
        "env.test_fraction=0.2",
        "env.reward=my_rewards.py:exact_match",
        "env.prompt_template='{q} Answer with a number.'",
        "env.system_prompt=Add.",
    )
    problem = task.problems("train")[0]
    chat = [message["content"] for message in task.messages(problem)]
    assert chat == ["Add.", f"{problem.query} Answer with a number."]
    assert score(task, problem, f"It is {problem.answer}").parts["exact_match/reward"] == 1.0
    assert (
        score(task, problem, f"It is {problem.answer}").correct
        and not score(task, problem, "no").correct
    )
    assert len(task.problems("train")) + len(task.problems("test")) == 30


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["env.dataset=a.jsonl", "env.columns.prompt=q"],
            r"env\.dataset=a\.jsonl needs env\.reward: use a",
        ),
        (
            ["env.dataset=c.jsonl"],
            r"=c\.jsonl must be a file or folder that exists, .*: did you mean b",
        ),
        (
            ["env.dataset=a.jsonl"],
            r"columns\.prompt must name the column .*\['answer', 'level', 'q'\]: set it to one",
        ),
        (
            ["env.dataset=a.jsonl", "env.columns.prompt=q", "env.reward=my_rewards.py:by_colum"],
            r"by_colum",
        ),
        (["env.dataset=arithmetic", "env.reward=my_rewards.py:by_column"], r"level"),
        (
            ["env.dataset=countdown", "env.difficulty=7"],
            r"difficulty must be from 2 to 6 numbers, got 7",
        ),
        (
            ["env.task._target_=my_own_tasks.YourTask"],
            r"env\.task\._target_=my_own_tasks\.YourTask must name a class",
        ),
        (
            ["env.task._target_=my_own_tasks.MyTask", "+env.task.lvl=3"],
            r"that it accepts.*: leave out env\.task\.lvl",
        ),
        (
            ["env.task._target_=my_own_tasks.py:YourTask"],
            r"env\.task\._target_=my_own_tasks\.py:YourTask must name a class .*use one of \['MyTask'\]",
        ),
        (["env.task._target_=my_own_tasks.py"], r"must name a class .*use one of \['MyTask'\]"),
        (
            ["env.task._target_=my_own_tasks.py:MyTask", "+env.task.lvl=3"],
            r"env\.task=\{'_target_': 'my_own_tasks\.py:MyTask', 'lvl': 3\} .*: leave out env\.task\.lvl",
        ),
        (
            ["env.task._target_=builtins.dict"],
            r"env\.task\._target_=builtins\.dict must be a subclass of Task",
        ),
        (
            ["env.datasets=[{dataset: a.jsonl, columns: {prompt: q}}, {dataset: arithmetic}]"],
            r"env\.datasets\[0\]\.dataset=a\.jsonl needs env\.datasets\[0\]\.reward",
        ),
        (
            ["env.datasets=[{dataset: arithmetic}, {dataset: arithmetic, difficulty: 3}]"],
            r"env\.datasets\[0\]\.name=arithmetic must differ from the other names: set another name",
        ),
    ],
)
def test_what_cannot_serve_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task_of(*overrides)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_custom_class_is_a_task_with_its_arguments() -> None:
    task = make_task_of("env.task._target_=my_own_tasks.MyTask", "+env.task.level=3")
    assert task.problems("test") == [Problem("test 3", "x")]
    rewarded = make_task_of(
        "env.task._target_=my_own_tasks.MyTask", "env.reward=my_rewards.py:exact_match"
    )
    assert score(rewarded, task.problems("train")[0], "x").parts["exact_match/short"] == 1.0


def test_built_in_names_make_their_tasks() -> None:
    assert isinstance(make_task_of("env.difficulty=3"), ArithmeticTask)
    countdown = make_task(compose_config(name="grpo_countdown").env)
    problem = countdown.problems("test")[0]
    assert (
        len(problem.extra["nums"]) == 3
        and score(countdown, problem, f"#### {problem.answer}").correct
    )


@pytest.mark.slow
def test_gsm8k_takes_a_reward_template_and_columns(folder: Path) -> None:
    for split, n in (("train", 1), ("test", 2)):
        row = {"question": f"{n}+1?", "answer": f"#### {n + 1}"}
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    path = f"env.dataset_path={folder}"
    plain = make_task_of("env.dataset=gsm8k", path)
    assert (
        isinstance(plain, GSM8KTask) and score(plain, plain.problems("train")[0], "#### 2").correct
    )
    task = make_task_of(
        "env.dataset=gsm8k",
        path,
        "env.reward={fn: gsm8k, mode: lenient}",
        "env.prompt_template='{question} Boxed.'",
    )
    problem = task.problems("test")[0]
    assert task.messages(problem) == [{"role": "user", "content": "2+1? Boxed."}]
    assert (
        score(task, problem, r"\boxed{3}").correct
        and not score(plain, problem, r"\boxed{3}").correct
    )


def test_ifeval_is_scored_by_the_mean_of_its_accuracies(folder: Path) -> None:
    row = {
        "key": 1,
        "prompt": "Use no commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    }
    rows = [row | {"prompt": f"Use no commas. {n}"} for n in range(40)]
    (folder / "ifeval").mkdir()
    (folder / "ifeval" / "input_data.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    task = make_task(compose_config(f"env.dataset_path={folder}/ifeval", name="grpo_ifeval").env)
    problem = task.problems("train")[0]
    assert (
        score(task, problem, "yes").reward == 1.0 and score(task, problem, "yes, no").reward == 0.0
    )


# Several data sets

MIX = (
    "env.datasets=[{dataset: a.jsonl, weight: 0.7, reward: 'my_rewards.py:exact_match', columns: {prompt: q}, "
    "test_fraction: 0.2}, {dataset: arithmetic, weight: 0.3, difficulty: 1}]"
)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_several_data_sets_are_each_put_and_scored_their_own_way() -> None:
    task = make_task_of(MIX)
    problems = task.problems("train")
    first, last = problems[0], problems[-1]
    assert (first.dataset, last.dataset) == ("a", "arithmetic") and task.name == "a+arithmetic"
    assert task.messages(first) == [{"role": "user", "content": first.query}]
    assert task.messages(last)[0]["content"].endswith("=? #### n")
    assert (
        "exact_match/reward" in score(task, first, "x").parts and score(task, last, "x").parts == {}
    )
    assert score(task, last, f"#### {last.answer}").correct
    assert {problem.dataset for problem in task.problems("test")} == {"a", "arithmetic"}


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_mixed_task_and_its_problems_can_be_pickled() -> None:
    task = make_task_of(MIX)
    problems = task.problems("train")
    assert list(pickle.loads(pickle.dumps(problems))) == list(problems)
    assert (
        score(pickle.loads(pickle.dumps(task.tasks["arithmetic"])), problems[-1], "x").reward == 0.0
    )  # type: ignore[attr-defined]


class Fixed(Task):
    """A task with this many problems, whose ``next_turn`` replies with its name."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def problems(self, split: str) -> list[Problem]:
        return [Problem(f"{self.name}{n}", n) for n in range(self.size)]

    def score(self, problem: Problem, responses: Any) -> Score:
        return Score(float(problem.answer), True)

    def next_turn(self, problem: Problem, responses: Any) -> str:
        return self.name


def test_an_epoch_draws_by_weight_and_repeats_as_little_as_possible() -> None:
    task = MixedTask([Fixed("x", 90), Fixed("y", 10)], [1, 3], ["x", "y"])
    problems = task.problems("train")
    drawn = [problems[i].query for i in task.epoch(problems, range(100), random.Random(0))]
    counts = Counter(drawn)
    assert len(drawn) == 100 and sum(query.startswith("x") for query in drawn) == 25
    assert {counts[f"x{n}"] for n in range(90)} == {0, 1}
    assert {counts[f"y{n}"] for n in range(10)} == {7, 8}
    assert drawn == [problems[i].query for i in task.epoch(problems, range(100), random.Random(0))]
    assert drawn != [problems[i].query for i in task.epoch(problems, range(100), random.Random(1))]
    assert [query[0] for query in drawn[:20]] != ["x"] * 20


@pytest.mark.parametrize(
    ("usable", "shares"), [(range(90), {"x": 90}), ([0, 1, 2, 95], {"x": 1, "y": 3})]
)
def test_only_usable_problems_are_drawn(usable: Any, shares: dict[str, int]) -> None:
    task = MixedTask([Fixed("x", 90), Fixed("y", 10)], [1, 3], ["x", "y"])
    problems = task.problems("train")
    order = task.epoch(problems, usable, random.Random(0))
    assert set(order) <= set(usable) and Counter(problems[i].dataset for i in order) == shares


def test_test_problems_come_once_each_and_the_data_sets_in_turn() -> None:
    task = MixedTask([Fixed("x", 90), Fixed("y", 10)], [1, 3], ["x", "y"])
    problems = task.problems("test")
    order = task.epoch(problems, range(100), random.Random(0))
    assert sorted(order) == list(range(100))
    assert Counter(problems[i].dataset for i in order[:20]) == {"x": 10, "y": 10}


@pytest.mark.slow
def test_each_data_set_answers_its_own_dialogs() -> None:
    task = MixedTask([Fixed("x", 2), ArithmeticTask(1)], [1, 1], ["x", "sums"])
    reply: list[Message] | None = task.reply(Dialog(task.problems("train")[0], ["?"]))
    assert task.multi_turn and reply == [{"role": "user", "content": "x"}]
    assert task.reply(Dialog(task.problems("train")[2], ["?"])) is None
    assert not MixedTask([ArithmeticTask(1)], [1], ["a"]).multi_turn


class Short(Task):
    """Score a dialog by its problem and responses."""

    name = "short"

    def problems(self, split: Split) -> list[Problem]:
        return [Problem("?", "yes")]

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        return Score(float(responses[-1] == problem.answer), responses[-1] == problem.answer)

    def next_turn(self, problem: Problem, responses: Sequence[str]) -> str | None:
        return "again" if responses[-1] == "maybe" else None


class Long(Task):
    """Score the same by the whole dialog."""

    name = "long"

    def problems(self, split: Split) -> list[Problem]:
        return [Problem("?", "yes")]

    def judge(self, dialog: Dialog) -> Score:
        return Short().score(dialog.problem, dialog.responses)

    def reply(self, dialog: Dialog) -> list[Message] | None:
        return [{"role": "user", "content": "again"}] if dialog.responses[-1] == "maybe" else None


class Wrapped(WrappedTask):
    """A wrapper of another task that rephrases its problems."""

    def messages(self, problem: Problem) -> list[Message]:
        return [{"role": "user", "content": "!"}]


@pytest.mark.parametrize(
    "task", [Short(), Long(), Wrapped(Long()), MixedTask([Long(), Short()], [1, 1], ["", "x"])]
)
def test_a_task_may_go_by_the_responses_or_by_the_whole_dialog(task: Task) -> None:
    problem = Problem("?", "yes")
    messages = [{"role": "user", "content": "again"}]
    dialogs = [
        Dialog(problem, ["yes"], last=False),
        Dialog(problem, ["maybe"], last=False),
        Dialog(problem, ["maybe"]),
        Dialog(problem, ["maybe"], finish_reason="length", last=False),
    ]
    wrong = Score(0.0, False)
    expected = [
        Turn(None, Score(1.0, True)),
        Turn(messages, None),
        Turn(messages, wrong),
        Turn(None, wrong),
    ]
    assert task.advance(dialogs) == expected and task.multi_turn


def test_data_sets_beside_each_other_await_many_rewards_at_a_time() -> None:
    async def all_there(response: str) -> float:
        nonlocal waiting
        waiting += 1
        while waiting < 3:
            await asyncio.sleep(0.001)
        return float(response)

    waiting = 0
    task = MixedTask([WithRewards(Short(), make_rewards(all_there)), Long()], [1, 1], ["a", "b"])
    responses = [("a", "1"), ("b", "yes"), ("a", "2"), ("a", "3")]
    dialogs = [
        Dialog(Problem("?", "yes", dataset=name), [response]) for name, response in responses
    ]
    turns = task.advance(dialogs, timeout_s=300)
    assert [turn.score.reward for turn in turns] == [1.0, 1.0, 2.0, 3.0]  # type: ignore[union-attr]


# The config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.datasets=[{weight: 1}]"], r"env\.datasets\[0\]\.dataset=null must be a data set"),
        (
            ["env.datasets=[{dataset: gsm8k, weight: 0}]"],
            r"env\.datasets\[0\]\.weight=0\.0 must be above 0",
        ),
        (
            ["env.dataset=a.jsonl", "env.dataset_path=x"],
            r"path=x must be left out .*: to use it, set env\.dataset=gsm8k",
        ),
    ],
)
def test_data_keys_that_nothing_reads_or_that_clash_are_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config(*overrides)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"wieght": 1},
            r"wieght in env\.datasets names a config key that does not exist: did you mean weight\?",
        ),
        (
            {"columns": {"promt": "q"}},
            r"columns\.promt in env\.datasets names .*: did you mean columns\.prompt\?",
        ),
        (
            {"weight": "many"},
            r"weight=many in env\.datasets must have the type float: leave it out for 1\.0",
        ),
        (
            "gsm8k",
            r"env\.datasets must be a list of data sets, got gsm8k: for example, \[\{dataset: gsm8k\}\]",
        ),
    ],
)
def test_a_mistake_in_an_entry_is_named_with_a_hint(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hydra(OmegaConf.create({"env": {"datasets": [entry]}}))


@pytest.mark.slow
def test_chat_template_arguments_are_a_node_of_ones_own() -> None:
    for override in (
        "env.chat_template_kwargs={thinking: 2}",
        "+env.chat_template_kwargs.thinking=2",
    ):
        assert compose_config(override).env.chat_template_kwargs == {"thinking": 2}
    with pytest.raises(ConfigError, match=r"env\.chat_template_kwargs=3 must be"):
        compose_config("env.chat_template_kwargs=3")

"""``DatasetTask``: rows of any source as problems, their prompts, splits and errors."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow.parquet
import pytest
from datasets import Dataset

from tests.support.configs import compose_config
from tests.support.datasets import ROWS, error_of, write
from tests.support.published import published
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.config import ConfigError
from torchrl_grpo.integrations.graders.ifeval_task import IFEvalTask
from torchrl_grpo.integrations.graders.math_task import MathTask, last_boxed
from torchrl_grpo.tasks.base import Problem
from torchrl_grpo.tasks.dataset import DatasetTask
from torchrl_grpo.tasks.fields import fill_template

IFEVAL = published("ifeval")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


# Sources


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_rows_of_a_file_become_problems_with_all_columns(suffix: str, tmp_path: Path) -> None:
    task = DatasetTask(write(tmp_path / f"data.{suffix}", ROWS))
    problems = task.problems("train")
    assert len(problems) == 40 and task.name == "data"
    assert problems[3] == Problem("3+1?", "4", {"question": "3+1?", "answer": "4", "level": 0})
    assert problems[-1].query == "39+1?" and [p.answer for p in problems[1:3]] == ["2", "3"]
    assert list(problems) == [problems[i] for i in range(40)]
    assert task.messages(problems[3]) == [{"role": "user", "content": "3+1?"}]


def test_values_of_a_csv_file_are_text_and_missing_ones_none(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(
        b'\xef\xbb\xbfquestion,answer,note\r\n"1,5+1?\nSay",007,NA\r\n\r\nb,2024-01-01,\r\n'
    )
    assert list(DatasetTask(str(path)).problems("train")) == [
        Problem("1,5+1?\nSay", "007", {"question": "1,5+1?\nSay", "answer": "007", "note": "NA"}),
        Problem("b", "2024-01-01", {"question": "b", "answer": "2024-01-01", "note": None}),
    ]


def test_values_of_a_jsonl_file_stay_as_they_are(tmp_path: Path) -> None:
    """``datasets``' own reader makes dates, numbers and None-filled structures out of these."""
    rows = [
        {
            "prompt": "a",
            "answer": "2024-01-01",
            "any": "1",
            "info": {"a": 1},
            "big": 2**70,
            "part": 1,
        },
        {
            "prompt": "b",
            "answer": "2024-01-02",
            "any": 2,
            "info": {"b": [None]},
            "big": 1,
            "part": 2.5,
        },
        {"prompt": "c", "answer": None, "any": None, "info": None, "big": None, "part": None},
    ]
    problems = DatasetTask(write(tmp_path / "data.jsonl", rows)).problems("train")
    assert [problem.extra for problem in problems] == rows


@pytest.mark.parametrize(
    ("names", "train", "test"),
    [
        (["train.jsonl", "test.jsonl", "validation.jsonl"], 2, 2),
        (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test.parquet"], 4, 2),
        (["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"], 4, 2),
        (["main/train-0-of-1.csv", "main/test-0-of-1.csv", "LICENSE", ".x/train.csv"], 2, 2),
    ],
    ids=["files", "shards", "folders", "nested"],
)
def test_splits_of_a_folder_are_named_by_its_files(
    names: list[str], train: int, test: int, tmp_path: Path
) -> None:
    for number, name in enumerate(names):
        write(tmp_path / name, [{"prompt": f"{number}a"}, {"prompt": f"{number}b"}])
    task = DatasetTask(str(tmp_path))
    assert (len(task.problems("train")), len(task.problems("test"))) == (train, test)


def test_files_named_after_no_split_are_all_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "b.csv", [{"prompt": "2"}])
    write(tmp_path / "a.jsonl", [{"prompt": "1"}])
    assert [p.query for p in DatasetTask(str(tmp_path)).problems("train")] == ["1", "2"]
    task = DatasetTask(str(tmp_path), train_split="b", test_split="a")
    assert [p.query for p in task.problems("train")] + [p.query for p in task.problems("test")] == [
        "2",
        "1",
    ]


def test_max_samples_takes_the_first_rows_of_each_split(tmp_path: Path) -> None:
    for suffix in ("jsonl", "parquet"):
        path = write(tmp_path / f"data.{suffix}", ROWS)
        assert [p.query for p in DatasetTask(path, max_samples=3).problems("train")] == [
            "0+1?",
            "1+1?",
            "2+1?",
        ]


def test_hub_name_config_and_revision_reach_load_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(*args: str, **options: str) -> Dataset:
        calls.append((args, options))
        if options["split"] == "test":
            raise ValueError("Unknown split \"test\". Should be one of ['train'].")
        return Dataset.from_list(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    task = DatasetTask("org/name", dataset_config="main", revision="v1")
    assert len(task.problems("train")) == 40 and task.name == "name"
    assert calls == [(("org/name", "main"), {"split": "train", "revision": "v1"})]
    assert (
        "Should be one of ['train']: set env.test_split=NAME or env.test_fraction=0.1"
        in error_of(task, "test")
    )


@pytest.mark.slow
def test_the_hub_without_a_network_is_one_clear_error(tmp_path: Path) -> None:
    code = (
        "from torchrl_grpo.tasks.dataset import DatasetTask\n"
        "try: DatasetTask('org/name').problems('train')\n"
        "except ValueError as error: print(error)\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert out.startswith(
        "env.dataset=org/name must reach org/name on Hugging Face or in its cache, got Connection"
    )
    assert out.endswith(
        "connect once, or use a file (jsonl, json, csv, parquet) or a folder on this machine.\n"
    )


# Prompts


def test_a_prompt_may_be_a_list_of_chat_messages(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?", "name": None},
    ]
    path = write(tmp_path / "data.jsonl", [{"prompt": chat, "solution": "2"}])
    plain, instructed = DatasetTask(path), DatasetTask(path, system_prompt="Be long.")
    problem = plain.problems("train")[0]
    assert (problem.query, problem.answer) == ("1+1?", "2")
    assert plain.messages(problem) == [chat[0], {"role": "user", "content": "1+1?"}]
    assert instructed.messages(instructed.problems("train")[0])[0] == {
        "role": "system",
        "content": "Be long.",
    }


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_only_the_nulls_of_aligned_rows_are_left_out(tmp_path: Path, suffix: str) -> None:
    """Arrow gives each row the keys of all rows; in JSON, a null is a value."""
    calls = [{"function": {"name": "set", "arguments": {name: None, "by": 1}}} for name in "xy"]
    schemas = [{"name": "set", "parameters": {"unit": {"default": None}}}, {"name": "get"}]
    rows = [
        {
            "chat": [
                {"role": "user", "content": "?", "name": None},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
            "tools": tools,
            "answer": {"own": None},
        }
        for call, tools in zip(calls, (schemas, json.dumps(schemas)), strict=True)
    ]
    if suffix == "parquet":
        rows[1]["tools"] = schemas
    task = DatasetTask(write(tmp_path / f"data.{suffix}", rows), messages_column="chat")
    nulls = {"x": None} if suffix == "jsonl" else {}
    first, second = task.problems("train")
    [reply] = task.demonstration(first)
    assert task.messages(first) == [{"role": "user", "content": "?"}]
    assert reply["content"] == ""
    assert reply["tool_calls"][0]["function"]["arguments"] == nulls | {"by": 1}
    read = (
        schemas
        if suffix == "jsonl"
        else [{"name": "set", "parameters": {"unit": {}}}, {"name": "get"}]
    )
    assert [task.tools_for(problem) for problem in (first, second)] == [read, read]
    assert first.answer == {"own": None}  # a reward gets the row as it is


def test_template_and_system_prompt_make_the_chat(tmp_path: Path) -> None:
    task = DatasetTask(
        write(tmp_path / "data.jsonl", ROWS),
        prompt_template="{question}\n\nLevel {level:02d}: answer in \\boxed{} as {{answer}}.",
        system_prompt="You add.",
    )
    problem = task.problems("train")[4]
    assert problem.query == "4+1?"
    assert task.messages(problem) == [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "4+1?\n\nLevel 01: answer in \\boxed{} as {answer}."},
    ]


def test_a_template_alone_can_be_the_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"nums": [1, 2], "goal": 3}])
    task = DatasetTask(path, prompt_template="Make {goal} of {nums}.")
    problem = task.problems("train")[0]
    assert problem == Problem("Make 3 of [1, 2].", None, {"nums": [1, 2], "goal": 3})
    assert task.messages(problem) == [{"role": "user", "content": "Make 3 of [1, 2]."}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (r"{q} in \boxed{} or \frac{1}{2}", r"Hi {q} in \boxed{} or \frac{1}{2}"),
        ('{q} as {"a": {"b": [1]}}', 'Hi {q} as {"a": {"b": [1]}}'),
        ("{{q}} is {q}", "{q} is Hi {q}"),
        ("{a b}/{q}", "3/Hi {q}"),
    ],
)
def test_other_braces_of_a_template_survive(template: str, text: str) -> None:
    assert fill_template(template, {"q": "Hi {q}", "a b": 3}) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{quesion}",
            r"must have the column \{quesion\} of prompt_template, .*: did you mean \{question\}\?",
        ),
        (
            r"\boxed{xyz}",
            r"'question'\]: use one of them, or write \{\{xyz\}\} for the text \{xyz\}",
        ),
        ("{question:d}", r"must fit the format of \{question:d\} in prompt_template"),
        ("{missing}", r"must have a value in the column 'missing', which prompt_template uses"),
    ],
)
def test_a_field_that_cannot_be_filled_is_an_error(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill_template(template, {"question": "q", "missing": None})


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            "ab",
            {},
            "the column with the prompts of PATH, which has ['a', 'b']: set it to one of them",
        ),
        (
            ("prompt", "query"),
            {},
            "which has ['prompt', 'query']: for example, env.columns.prompt=prompt, or write",
        ),
        (
            ("A", "B", "Test question"),
            {},
            "'Test question']: for example, env.columns.prompt=Test question, or",
        ),
        (
            ("prompt", "answer", "target"),
            {},
            "env.columns.answer must name one of ['answer', 'target'], which PATH",
        ),
        (
            ("prompt", "b"),
            {"prompt_column": "promt"},
            "env.columns.prompt=promt must be a column of PATH, which has [",
        ),
        (
            ("prompt", "b"),
            {"answer_column": "c"},
            "['b', 'prompt']: use one of them as env.columns.answer.",
        ),
        (
            ("prompt", "b"),
            {"prompt_template": "{c} {prompt}"},
            "PATH:1 must have the column {c} of prompt_template",
        ),
    ],
)
def test_a_column_that_is_missing_or_unclear_lists_those_there(
    columns: Any, options: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "data.jsonl", [dict.fromkeys(columns, "x")])
    assert message.replace("PATH", path) in error_of(DatasetTask(path, **options))  # type: ignore[arg-type]


def test_columns_that_were_guessed_are_said_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="torchrl_grpo")
    DatasetTask(write(tmp_path / "data.jsonl", ROWS)).problems("train")
    assert "using the column question for prompts and answer for answers" in caplog.text


# Splits


def test_without_a_test_split_the_error_says_what_to_set(tmp_path: Path) -> None:
    task = DatasetTask(write(tmp_path / "data.jsonl", ROWS))
    assert error_of(task, "test").endswith(
        "test.jsonl is missing (found: ['data.jsonl']): set env.test_split=NAME or env.test_fraction=0.1, or "
        "evaluation.num_prompts=0 for no evaluation."
    )


@pytest.mark.slow
def test_a_run_that_evaluates_nothing_needs_no_test_split(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", ROWS)
    overrides = (f"env.dataset={path}", "env.reward=math", "evaluation.k=0")
    context = prepare(compose_config(*overrides, "evaluation.num_prompts=0"))
    assert context.tests is None and context.train_env.num_problems == len(ROWS)
    with pytest.raises(
        ConfigError, match=r"set env\.test_split=NAME .* or evaluation\.num_prompts=0"
    ):
        prepare(compose_config(*overrides))


def test_an_unknown_split_lists_those_there(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "dev.jsonl", ROWS)
    message = error_of(DatasetTask(str(tmp_path), train_split="tran", test_split="dev"))
    assert (
        "with the split 'tran', but tran.jsonl is missing (found: ['dev.jsonl', 'train.jsonl'])"
        in message
    )


def test_a_fraction_splits_by_the_prompt_whatever_the_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n % 300}?", "id": n} for n in range(600)]
    one = DatasetTask(write(tmp_path / "a.jsonl", rows), test_fraction=0.2)
    other = DatasetTask(
        write(tmp_path / "b.csv", rows[::-1]), test_fraction=0.2, prompt_template="{prompt} Think."
    )
    train, test = ({p.query for p in one.problems(split)} for split in ("train", "test"))  # type: ignore[arg-type]
    assert train == {p.query for p in other.problems("train")} and test == {
        p.query for p in other.problems("test")
    }
    assert not train & test and len(train | test) == 300
    assert 40 <= len(test) <= 80
    assert len(one.problems("train")) + len(one.problems("test")) == 600


def test_rows_without_an_answer_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\n1+1?,2\n1+2?,\n1+3?,four\n")
    answers = [problem.answer for problem in DatasetTask(str(tmp_path / "a.csv")).problems("train")]
    assert answers == ["2", None, "four"]
    assert (
        "1 of the 3 rows of train have no value in the column answer; their answer is None."
        in caplog.text
    )


def test_a_fraction_that_leaves_a_split_empty_is_an_error(tmp_path: Path) -> None:
    task = DatasetTask(write(tmp_path / "data.jsonl", ROWS[:1]), test_fraction=0.5)
    messages = [error_of(task, split) for split in ("train", "test") if not _has(task, split)]
    assert (
        len(messages) == 1
        and "env.test_fraction=0.5 must leave problems in both splits, but the " in messages[0]
    )


def _has(task: DatasetTask, split: Any) -> bool:
    try:
        return bool(task.problems(split))
    except ValueError:
        return False


def test_a_problem_in_both_splits_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:20])
    write(tmp_path / "test.jsonl", ROWS[18:])
    task = DatasetTask(str(tmp_path))
    task.problems("train")
    assert (
        f"2 of 'test' and 'train' are the same, the first at {tmp_path}/test.jsonl:1: '18+1?'"
        in error_of(task, "test")
    )


def test_a_split_can_be_evaluated_on_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", ROWS)
    assert len(DatasetTask(path, test_split="train").problems("test")) == 40
    both = DatasetTask(path, test_split="train")  # a rule refuses that in a run that trains
    assert len(both.problems("train")) == len(both.problems("test")) == 40
    task = DatasetTask(path, test_split="train", field="env.datasets[0]")
    task.problems("train")
    assert "40 of 'train' and 'train' are the same" in error_of(task, "test")


# Pickling


def test_a_pickled_task_has_no_data_and_needs_no_file(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", ROWS)
    task = DatasetTask(path, test_fraction=0.2, prompt_template="Q: {question}")
    problem = task.problems("train")[0]
    before = len(cloudpickle.dumps(task))
    os.remove(path)
    copy = pickle.loads(cloudpickle.dumps(task))
    assert before < 1500
    assert copy.messages(problem) == [{"role": "user", "content": f"Q: {problem.query}"}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_pickled_problems_carry_their_rows_and_no_others(suffix: str, tmp_path: Path) -> None:
    path = write(
        tmp_path / f"data.{suffix}",
        [{"prompt": f"{n}" * 500, "info": {"n": n}} for n in range(200)],
    )
    problems = DatasetTask(path, test_fraction=0.1).problems("test")
    pickled = pickle.dumps(problems)
    os.remove(path)
    assert len(pickled) < 60_000 and pickle.loads(pickled) == list(problems)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_messages_have_no_keys_of_other_rows(suffix: str, tmp_path: Path) -> None:
    calls = [
        {"function": {"name": "weather", "arguments": {"city": "Rome"}}},
        {"function": {"name": "move"}},
    ]
    chats = [
        [
            {"role": "user", "content": f"q{number}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "ok"},
        ]
        for number, call in enumerate(calls)
    ]
    task = DatasetTask(write(tmp_path / f"data.{suffix}", [{"prompt": chat} for chat in chats]))
    chats[0][1]["content"] = chats[1][1]["content"] = ""
    assert [task.messages(problem) for problem in task.problems("train")] == chats


@pytest.mark.parametrize(
    ("kinds", "rows"),
    [
        (("string", "large_string"), ["1", "2"]),
        (("int32", "int64"), [1, 2**40]),
        (("int64", "int32"), [2**40, 1]),
        (("int32", "float64"), [1, 2.5]),
    ],
)
def test_shards_of_a_parquet_file_may_differ_in_width(
    kinds: tuple[str, str], rows: list[Any], tmp_path: Path
) -> None:
    for number, (kind, row) in enumerate(zip(kinds, rows, strict=True)):
        table = pyarrow.table(
            {"question": [f"{number}?"], "answer": pyarrow.array([row], getattr(pyarrow, kind)())}
        )
        pyarrow.parquet.write_table(table, tmp_path / f"train-0000{number}-of-00002.parquet")
    assert [problem.answer for problem in DatasetTask(str(tmp_path)).problems("train")] == rows


def test_shards_of_types_that_no_type_includes_are_refused(tmp_path: Path) -> None:
    for number, row in enumerate(("1", {"a": 1})):
        write(tmp_path / f"train-0000{number}-of-00002.parquet", [{"question": "?", "answer": row}])
    assert "train-00001-of-00002.parquet must have columns of the types of" in error_of(
        DatasetTask(str(tmp_path))
    )


def test_a_field_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text(f"question,answer\n1+1?,{'x' * 140_000}\n")
    [problem] = DatasetTask(str(tmp_path / "data.csv")).problems("train")
    assert problem.answer == "x" * 140_000


def test_the_data_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", ROWS)
    task = DatasetTask(path, test_fraction=0.2)
    train = task.problems("train")
    os.remove(path)
    assert task.problems("train") is train and len(task.problems("test")) + len(train) == 40


# Presets


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}, so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"It is $\boxed 5$.", "5"),
        (r"\fbox{x}", "x"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{}", None),
        (r"\boxed", None),
        (r"\boxed{1", None),
        ("5", None),
    ],
)
def test_the_last_box_of_a_solution_is_the_answer(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


def test_math_reads_folders_and_drops_train_problems_of_the_test_split(tmp_path: Path) -> None:
    def row(n: int) -> dict[str, str]:
        return {
            "problem": f"Halve {n}.",
            "solution": f"It is $\\boxed{{\\frac{{{n}}}{{2}}}}$.",
            "level": "Level 1",
        }

    write(tmp_path / "train.jsonl", [row(n) for n in range(10)])
    write(tmp_path / "test" / "algebra" / "1.json", [row(3)])
    (tmp_path / "test" / "algebra" / "2.json").write_text(json.dumps(row(12), indent=2))
    task = MathTask(str(tmp_path))
    assert [p.query for p in task.problems("test")] == ["Halve 3.", "Halve 12."]
    assert [p.answer for p in task.problems("train")] == [
        f"\\frac{{{n}}}{{2}}" for n in range(10) if n != 3
    ]
    assert task.messages(task.problems("train")[0])[0]["content"].endswith("within \\boxed{}.")
    write(tmp_path / "train.jsonl", [{"problem": "a", "solution": "5"}])
    assert "train.jsonl:1 must have a solution with its answer in \\boxed{}" in error_of(
        MathTask(str(tmp_path))
    )


@pytest.mark.skipif(not IFEVAL.is_dir(), reason="IFEval's file is not on this machine")
def test_ifeval_splits_its_541_prompts_or_tests_on_all() -> None:
    task = IFEvalTask(str(IFEVAL))
    train, test = task.problems("train"), task.problems("test")
    assert len(train) + len(test) == 541 and 30 <= len(test) <= 80
    assert train[0].extra["instruction_id_list"] and train[0].answer is None
    assert len(IFEvalTask(str(IFEVAL), test_split="train").problems("test")) == 541


def test_ifeval_without_its_file_names_it(tmp_path: Path) -> None:
    message = error_of(IFEvalTask(str(tmp_path)))
    assert "must be a folder with input_data.jsonl" in message

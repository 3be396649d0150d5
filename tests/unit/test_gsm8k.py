"""The GSM8K task: its data, its errors, its scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.published import published
from torchrl_grpo.tasks.base import Problem, Score
from torchrl_grpo.tasks.gsm8k import GSM8KTask

REAL_DATA = published("gsm8k")
GOOD_ROW = {"question": "How much is 48 + 24?", "answer": "48 + 24 = <<48+24=72>>72\n#### 72"}


def write_split(folder: Path, split: str, lines: list[str]) -> None:
    (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        write_split(tmp_path, split, [json.dumps(GOOD_ROW)])
    return tmp_path


def test_a_row_becomes_a_problem_with_a_canonical_answer(folder: Path) -> None:
    write_split(
        folder,
        "train",
        [json.dumps(GOOD_ROW), "", json.dumps({"question": "q", "answer": "#### 1,200.50"})],
    )
    assert GSM8KTask(str(folder)).problems("train") == [
        Problem(query="How much is 48 + 24?", answer="72", extra=GOOD_ROW),
        Problem(query="q", answer="1200.5", extra={"question": "q", "answer": "#### 1,200.50"}),
    ]


def test_splits_come_from_their_own_files(folder: Path) -> None:
    write_split(folder, "test", [json.dumps({"question": "other", "answer": "#### -3"})])
    task = GSM8KTask(str(folder))
    assert [p.query for p in task.problems("train")] == ["How much is 48 + 24?"]
    assert [(p.query, p.answer) for p in task.problems("test")] == [("other", "-3")]


def test_the_prompt_is_one_user_message_with_question_and_format() -> None:
    message, *more = GSM8KTask().messages(Problem(query="How much is 48 + 24?", answer="72"))
    assert not more
    assert message["role"] == "user"
    assert message["content"].startswith("How much is 48 + 24?\n\n")
    assert message["content"].endswith("#### <number>")


@pytest.mark.parametrize(
    "response",
    ["#### 72", "so 72\n#### 72.00", "#### $72.", "####72 clips", "#### 1\n#### 72\nBye"],
)
def test_right_answers_earn_one(response: str) -> None:
    assert GSM8KTask().score(Problem("q", "72"), [response]) == Score(reward=1.0, correct=True)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "72",
        "#### 73",
        "#### -72",
        "#### 72 or 73",
        "#### 7 2",
        "#### 72\n#### 1",
        "#### 44**19**35",
        "#### __import__('os')",
    ],
)
def test_other_answers_earn_zero(response: str) -> None:
    assert GSM8KTask().score(Problem("q", "72"), [response]) == Score(reward=0.0, correct=False)


def test_the_last_turn_of_a_dialog_is_scored() -> None:
    assert GSM8KTask().score(Problem("q", "72"), ["#### 1", "#### 72"]).correct
    assert not GSM8KTask().score(Problem("q", "72"), ["#### 72", "#### 1"]).correct


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="GSM8K's files are not on this machine")
def test_every_real_problem_parses_and_its_reference_solution_earns_one() -> None:
    task = GSM8KTask(str(REAL_DATA))
    for split, count in (("train", 7473), ("test", 1319)):
        problems = task.problems(split)  # type: ignore[arg-type]
        rows = [
            json.loads(line)
            for line in (REAL_DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert len(problems) == len(rows) == count
        for problem, row in zip(problems, rows, strict=True):
            assert problem.query == row["question"]
            assert task.score(problem, [row["answer"]]) == Score(reward=1.0, correct=True)
            assert float(problem.answer) == float(
                row["answer"].split("####")[1].strip().replace(",", "")
            )


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="GSM8K's files are not on this machine")
def test_real_splits_share_no_question() -> None:
    task = GSM8KTask(str(REAL_DATA))
    assert not {p.query for p in task.problems("train")} & {p.query for p in task.problems("test")}


def test_building_the_task_reads_nothing() -> None:
    assert GSM8KTask("/no/such/folder").name == "gsm8k"


def test_missing_folder_names_the_field_and_the_files() -> None:
    with pytest.raises(
        ValueError,
        match=r"env\.dataset_path='/no/such/folder' .*train\.jsonl .*test\.jsonl",
    ):
        GSM8KTask("/no/such/folder").problems("train")


def test_missing_file_lists_what_is_there(folder: Path) -> None:
    (folder / "test.jsonl").unlink()
    task = GSM8KTask(str(folder))
    task.problems("train")
    with pytest.raises(ValueError, match=r"test\.jsonl .*\['train\.jsonl'\].*: use the folder"):
        task.problems("test")


NOT_JSON = (b'{"question": ', b"[1, 2]", b'"text"', b"\xff\xfe{}", b"[" * 100_000)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((line, r"must be") for line in NOT_JSON),
        (b'{"question": "q", "solution": "#### 1"}', r".* column 'answer', .*\['q"),
        (b'{"question": "q", "answer": 72}', r".* column 'answer', .*72"),
        (b'{"question": "q", "answer": "72"}', r".*'#### <number>'"),
        (b'{"question": "q", "answer": "#### seventy-two"}', r".*'#### <number>'"),
        (b'{"question": "q", "answer": "####"}', r".*'#### <number>'"),
    ],
)
def test_a_row_that_cannot_serve_is_named_by_file_and_line(
    folder: Path, line: bytes, message: str
) -> None:
    (folder / "train.jsonl").write_bytes(json.dumps(GOOD_ROW).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"train\.jsonl:3 {message}"):
        GSM8KTask(str(folder)).problems("train")


def test_empty_split_is_an_error(folder: Path) -> None:
    (folder / "test.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="the test split has 0"):
        GSM8KTask(str(folder)).problems("test")


def test_without_a_path_the_hub_data_set_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*args: str, split: str) -> object:
        calls.append((*args, split))
        return datasets.Dataset.from_list([GOOD_ROW])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = GSM8KTask()
    assert task.problems("test") == [
        Problem(query="How much is 48 + 24?", answer="72", extra=GOOD_ROW)
    ]
    assert task.problems("test")[0].answer == "72"  # read once, then kept
    assert calls == [("openai/gsm8k", "main", "test")]

"""Files and rows that cannot serve as a data set are refused with their file and line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.datasets import ROWS, error_of, write
from torchrl_grpo.tasks.dataset import DatasetTask
from torchrl_grpo.tasks.sources import Hub, UnknownSplitError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(autouse=True)
def pythons_own_recursion_limit() -> Iterator[None]:
    """Restore the default limit, because some packages raise it at import."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": ', "must be one JSON object per line, got b'{\"prompt\": '"),
        (b"[1, 2]", "must be a JSON object, got b'[1, 2]'"),
        (b'{"prompt": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
        (b'{"prompt": "\\ud800"}', "must be text in Unicode, got \"'utf-8' codec can't encode"),
        (b"[" * 100_000, "must be one JSON object per line"),
        (b'{"prompt": null}', "must have text in the column 'prompt', but it has none (the row has [])"),
        (b'{"answer": "x"}', "must have text in the column 'prompt', but it has none (the row has ['answer'])"),
        (b'{"prompt": 7}', "must have text in the column 'prompt', but it has 7"),
        (b'{"prompt": " "}', "must have text in the column 'prompt', but it has ' '"),
        (
            b'{"prompt": []}',
            "in the column 'prompt' that end before the assistant's turn, but it has []",
        ),
        (b'{"prompt": [{"role": "user"}]}', "each with role and content as text, but it has {'role': 'user'}"),
        (b'{"prompt": [{"role": "assistant", "content": "x"}]}', "before the assistant's turn, but it has [{'role'"),
        (b'{"prompt": [{"role": "user", "content": 5}]}', "content as text, but it has {'role': 'user', 'content': 5}"),
        (b'{"prompt": [{"role": "user", "content": null}]}', "as text, but it has {'role': 'user', 'content': None}"),
        (b'{"prompt": [{"role": "user", "content": ["a"]}]}', "as text, but it has {'role': 'user', 'content': ["),
        (b'{"prompt": [{"role": 5, "content": "a"}]}', "content as text, but it has {'role': 5, 'content': 'a'}"),
        (b'{"prompt": ["a", 5]}', "content as text, but it has 'a'"),
        (b'{"prompt": [{"role": "user", "content": "\\ud83d"}]}', "must be text in Unicode"),
    ],
    ids=[
        "cut", "list", "utf8", "surrogate", "deep", "null", "missing", "number", "blank", "empty", "chat", "answered",
        "number said", "null said", "list said", "number role", "texts", "surrogate said",
    ],
)  # fmt: skip
def test_a_row_that_cannot_serve_is_named_by_file_and_line(
    line: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    error = error_of(DatasetTask(str(path)))
    assert error.startswith(f"{path}:3 must ") and message in error


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.json",
            b'[{"prompt": "a"},\n {"prompt": 1}, 7]',
            "a.json[2] must be a JSON object, got 7",
        ),
        (
            "a.json",
            b'[{"prompt": "a"},\n {"prompt"}]',
            "a.json:2 must be a list of JSON objects, got invalid JSON",
        ),
        ("a.json", b'{"prompt": "a"}\n{"prompt"}\n', "a.json:2 must be one JSON object per line"),
        (
            "a.csv",
            b"prompt,b\na,1\nb,1,2\n",
            "a.csv:3 must be a row of a csv file, got 3 fields, but its first line has 2",
        ),
        (
            "a.csv",
            b'prompt,b\n"a\nb",1\n\nx\n',
            "a.csv:5 must be a row of a csv file, got 1 fields",
        ),
        (
            "a.csv",
            b"prompt,prompt\na,1\n",
            "a.csv:1 must be a row of a csv file, got duplicate names in",
        ),
        ("a.csv", b"prompt,b\na,1\n\xff,2\n", "a.csv:3 must be UTF-8"),
        (
            "a.csv",
            b"prompt,b\na,1\n,2\n",
            "a.csv:3 must have text in the column 'prompt', but it has none (",
        ),
        (
            "a.parquet",
            b"prompt,b\na,1\n",
            "a.parquet must be a parquet file, got Parquet magic bytes not found",
        ),
        (
            "a.txt",
            b"hello",
            "a.txt must be a file of the kind .jsonl, .json, .csv, .parquet, but it ends with '.txt'",
        ),
        ("a.jsonl", b"\n", "a.jsonl must have problems, but the train split has 0"),
        ("a.csv", b"prompt,b\n", "a.csv must have problems, but the train split has 0"),
    ],
)
def test_malformed_files_of_each_kind_are_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert message in error_of(DatasetTask(str(tmp_path / name)))


def test_a_null_prompt_in_parquet_is_named_by_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "data.parquet", [{"prompt": "a"}, {"prompt": None}])
    assert error_of(DatasetTask(path)).startswith(
        f"{path}[1] must have text in the column 'prompt'"
    )


def test_a_missing_file_proposes_one_that_is_there(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", ROWS)
    path = str(tmp_path / "dat.jsonl")
    message = error_of(DatasetTask(path))
    assert (
        message
        == f"env.dataset={path} must be a file or folder that exists, but it does not: did you mean "
        + (f"{tmp_path / 'data.jsonl'}?")
    )
    assert "paths are relative to" in error_of(DatasetTask("/no/such/folder"))


def test_an_unknown_split_on_the_hub_lists_those_there(tmp_path: Path) -> None:
    """A folder stands in for the hub: ``datasets`` finds its splits the same way."""
    write(tmp_path / "repo" / "train.jsonl", ROWS)
    hub = Hub(str(tmp_path / "repo"), None, None, "env.dataset=org/name", "use a file")
    assert len(hub.read("train", 7)) == 7 and hub.read("train", None).where(3).endswith(
        "repo train[3]"
    )
    with pytest.raises(UnknownSplitError, match=r"must have the split 'dev', got .*\['train'\]"):
        hub.read("dev", None)


def test_the_hubs_options_are_refused_for_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", ROWS)
    assert "dataset_config and revision are for the hub" in error_of(
        DatasetTask(path, revision="v1")
    )
    assert error_of(DatasetTask("gsm9k")).endswith("connect once, or use gsm8k.")

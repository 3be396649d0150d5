"""GSM8K: grade-school word problems whose answer is one number (arXiv:2110.14168).

The problems come from a folder with ``train.jsonl`` and ``test.jsonl``, or from ``openai/gsm8k`` on Hugging Face.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchrl_grpo.rewards import marked_number
from torchrl_grpo.tasks.base import Message, Problem, Score, Split, Task

HUB_NAME = "openai/gsm8k"
HUB_CONFIG = "main"
COLUMNS = ("question", "answer")
INSTRUCTION = "Reason step by step, then finish with a line that holds only the answer: #### <number>"


class GSM8KTask(Task):
    """GSM8K's problems; a response earns 1 when the number after its last ``####`` is the answer, otherwise 0.

    Args:
        dataset_path: a folder with ``train.jsonl`` and ``test.jsonl``, one JSON object a line with the fields
            ``question`` and ``answer``, where the answer ends with ``#### n``. None loads ``openai/gsm8k`` through
            ``datasets``.

    >>> task = GSM8KTask()
    >>> problem = Problem(query="How much is 48 + 24?", answer="72")
    >>> task.score(problem, ["48 + 24 = 72\\n#### 72.00"])
    Score(reward=1.0, correct=True)
    """

    name = "gsm8k"

    def __init__(self, dataset_path: str | None = None) -> None:
        self.dataset_path = dataset_path
        self._problems: dict[Split, list[Problem]] = {}

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split in the order of the data. Their answers are canonical numbers.

        Raises:
            ValueError: the data is not there, or a row of it is malformed (the message says which).
        """
        if split not in self._problems:
            rows = _hub_rows(split) if self.dataset_path is None else _file_rows(Path(self.dataset_path), split)
            self._problems[split] = _parse(rows)
            if not self._problems[split]:
                raise ValueError(
                    f"env.dataset_path={self.dataset_path!r} must hold problems, the {split} split has 0: "
                    f"fill {split}.jsonl with GSM8K's rows."
                )
        return self._problems[split]

    def messages(self, problem: Problem) -> list[Message]:
        """One user message: the question, and how to answer. (A system message is foreign to some chat templates.)"""
        return [{"role": "user", "content": f"{problem.query}\n\n{INSTRUCTION}"}]

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        """Compares the number after the last ``####`` of the last turn with the answer, exactly."""
        correct = marked_number(responses[-1]) == problem.answer
        return Score(reward=float(correct), correct=correct)


def _parse(rows: Iterable[tuple[str, dict[str, Any]]]) -> list[Problem]:
    problems = []
    for where, row in rows:
        for column in COLUMNS:
            if not isinstance(row.get(column), str):
                found = f"has the columns {sorted(row)}" if column not in row else f"has {row[column]!r:.80}"
                raise ValueError(
                    f"{where} must have a text column {column!r}, it {found}: rename or add the column, "
                    f"GSM8K needs {list(COLUMNS)}."
                )
        answer = marked_number(row["answer"])
        if answer is None:
            raise ValueError(
                f"{where} must have an answer that ends with '#### <number>', it ends with {row['answer'][-80:]!r}: "
                "add the final line or remove the row."
            )
        problems.append(Problem(query=row["question"], answer=answer))
    return problems


def _file_rows(folder: Path, split: Split) -> Iterator[tuple[str, dict[str, Any]]]:
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        found = sorted(p.name for p in folder.iterdir())[:10] if folder.is_dir() else "no folder"
        raise ValueError(
            f"env.dataset_path={str(folder)!r} must be a folder with train.jsonl and test.jsonl, {path.name} is "
            f"missing (found: {found}): give the folder that holds both files."
        )
    # Bytes, so that a line that is not UTF-8 is reported like any other malformed line. An empty line is not a row.
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where} must be one JSON object a line, got {line[:80]!r} ({error}): fix that line."
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f'{where} must be a JSON object, got {line[:80]!r}: write {{"question": ..., "answer": ...}}.'
            )
        yield where, row


def _hub_rows(split: Split) -> Iterator[tuple[str, dict[str, Any]]]:
    fix = "set env.dataset_path to a folder with GSM8K's train.jsonl and test.jsonl"
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ValueError(
            f"env.dataset=gsm8k without env.dataset_path must have the package 'datasets', it is not installed: "
            f"pip install datasets, or {fix}."
        ) from error
    try:
        data = load_dataset(HUB_NAME, HUB_CONFIG, split=split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:  # no network, not in the cache, broken download
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"env.dataset=gsm8k without env.dataset_path must reach {HUB_NAME} on Hugging Face or in its cache, "
            f"got {reason:.200}: connect once, or {fix}."
        ) from error
    for number, row in enumerate(data):
        yield f"{HUB_NAME} {split}[{number}]", row

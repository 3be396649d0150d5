"""Files of a run: their names, and reading them back."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TIMELINE_FILE = "timeline.jsonl"
ENVIRONMENT_FILE = "environment.json"
_LONGEST_YAML = 300_000
"""Characters that PyYAML reads in a few seconds. A run's config has a few thousand."""
_LARGEST = 1e100
"""Larger numbers measure nothing, and their sums and squares may not be finite."""
_LARGEST_STEP = 2**53
_TEXTS = ("split", "dataset", "query", "response", "finish_reason")
_NUMBERS = ("reward", "advantage", "length", "version", "staleness")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of a run's jsonl file, skipping lines that are no rows, such as one cut off
    by a crash.

    Returns:
        the rows, none when the file is not there.
    """
    path = Path(path)
    if not path.exists():
        return []
    return [row for line in whole_lines(path) if (row := parse_row(line)) is not None]


def parse_row(line: str) -> dict[str, Any] | None:
    """Return the row on a line; None where it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and is_row(row) else None


def is_row(row: Mapping[str, Any]) -> bool:
    """Whether the values that are shown, searched or drawn have the types that a run writes."""
    parts, turns = row.get("parts") or {}, row.get("turn_rewards") or []
    metrics = [value for name, value in row.items() if "/" in name]
    return (
        is_step(row.get("step"))
        and all(isinstance(row.get(name), str | None) for name in _TEXTS)
        and all(isinstance(row.get(name), int | str | None) for name in ("group", "problem"))
        and isinstance(parts, dict)
        and isinstance(turns, list)
        and all(map(is_number, turns))
        and all(
            value is None or is_number(value)
            for value in (*metrics, *map(row.get, _NUMBERS), *parts.values())
        )
    )


def is_number(value: Any, largest: float = _LARGEST) -> bool:
    """Whether a value of a row is a number that can be drawn and computed with."""
    return isinstance(value, int | float) and abs(value) <= largest


def is_step(value: Any) -> bool:
    """Whether a value of a row can be the number of a step."""
    return isinstance(value, int) and abs(value) <= _LARGEST_STEP


def whole_lines(path: Path) -> list[str]:
    """Return the lines that end in a newline (``splitlines`` would also split at other characters)."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


def open_inside(folder: Path, name: str) -> BinaryIO | None:
    """Open a file of a run's folder; return None if it does not exist, or if a link leads out of
    the folder.
    """
    try:
        path = (folder / name).resolve(strict=True)
        if path.is_relative_to(folder.resolve()) and path.is_file():
            return path.open("rb")
    except (OSError, RuntimeError):  # not there, not ours to read, or a link to itself
        pass
    return None


def read_inside(folder: Path, name: str) -> str:
    """The text of a file of a run's folder, nothing where there is none."""
    file = open_inside(folder, name)
    if file is None:
        return ""
    with file:
        return file.read().decode(errors="replace")


def is_full(error: BaseException) -> bool:
    """Whether an error means that a disk or quota is full."""
    full = (errno.ENOSPC, errno.EDQUOT)
    by_number = isinstance(error, OSError) and error.errno in full
    return by_number or any(
        f"(os error {number})" in str(error) for number in full
    )  # as Rust says it: safetensors


class _PlainLoader(yaml.SafeLoader):
    """Loads YAML without aliases, which let a few lines stand for more than fits into memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases")
        return super().compose_node(parent, index)


def load_yaml(text: str) -> Any:
    """Loads a YAML file of a run's folder, which may come from others: in bounded time and memory.

    Raises:
        yaml.YAMLError: it cannot be loaded; the message says why.
    """
    if len(text) > _LONGEST_YAML:
        raise yaml.YAMLError(f"it has more than {_LONGEST_YAML:,} characters")
    try:
        return yaml.load(text, _PlainLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:  # a value without its form
        raise yaml.YAMLError(str(error)) from error

"""Files of a run: their names, and reading them back."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TIMELINE_FILE = "timeline.jsonl"
ENVIRONMENT_FILE = "environment.json"
_MOST_THUMBNAIL_BYTES = 1 << 17
"""More than a PNG file of 128 x 128 pixels has."""
_LONGEST_YAML = 300_000
"""Maximum length, which PyYAML reads in a few seconds. A run's config has a few thousand
characters.
"""
_LARGEST = 1e100
"""Largest magnitude of a number: larger ones are not measurements, and their squares may overflow.
"""
_LARGEST_STEP = 2**53
_TEXTS = ("split", "dataset", "query", "prompt", "response", "finish_reason")
_NUMBERS = ("reward", "advantage", "length", "version", "staleness")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of a run's jsonl file, skipping invalid lines, such as one cut off by a
    crash.

    Returns:
        the rows; empty if the file does not exist.
    """
    path = Path(path)
    if not path.exists():
        return []
    return [row for line in whole_lines(path) if (row := parse_row(line)) is not None]


def parse_row(line: str) -> dict[str, Any] | None:
    """Return the row on a line; None if the line is not a row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and is_row(row) else None


def is_row(row: Mapping[str, Any]) -> bool:
    """Return whether the values to show, search or plot have the types that a run writes."""
    parts = row.get("parts") or {}
    turns = row.get("turn_rewards") or []
    images = row.get("images") or []
    metrics = [value for name, value in row.items() if "/" in name]
    return (
        is_step(row.get("step"))
        and all(isinstance(row.get(name), str | None) for name in _TEXTS)
        and all(isinstance(row.get(name), int | str | None) for name in ("group", "problem"))
        and isinstance(parts, dict)
        and isinstance(turns, list)
        and all(map(is_number, turns))
        and isinstance(images, list)
        and all(isinstance(image, str) for image in images)
        and all(
            value is None or is_number(value)
            for value in (*metrics, *map(row.get, _NUMBERS), *parts.values())
        )
    )


def is_number(value: Any, largest: float = _LARGEST) -> bool:
    """Return whether a value of a row is a number that can be plotted and computed with."""
    return isinstance(value, int | float) and abs(value) <= largest


def is_step(value: Any) -> bool:
    """Return whether a value of a row can be a step number."""
    return isinstance(value, int) and abs(value) <= _LARGEST_STEP


def whole_lines(path: Path) -> list[str]:
    """Return the lines that end in a newline. (``splitlines`` would also split at other
    characters.)
    """
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


def open_inside(folder: Path, name: str) -> BinaryIO | None:
    """Open a file in a run's folder. Return None if it does not exist or is a link that leads out
    of the folder.
    """
    try:
        path = (folder / name).resolve(strict=True)
        if path.is_relative_to(folder.resolve()) and path.is_file():
            return path.open("rb")
    except (OSError, RuntimeError):  # missing, not readable, or a link to itself
        pass
    return None


def read_inside(folder: Path, name: str) -> str:
    """Return the text of a file in a run's folder; empty if ``open_inside`` returns None."""
    file = open_inside(folder, name)
    if file is None:
        return ""
    with file:
        return file.read().decode(errors="replace")


def thumbnail_name(image: str) -> str:
    """Return the path, in a run's folder, of the thumbnail of the image with this hash."""
    return f"images/{image[:16]}.png"


def read_thumbnail(folder: Path, image: str) -> bytes:
    """Return the thumbnail of the image with this hash, a PNG file; empty without one."""
    is_hash = re.fullmatch("[0-9a-f]{64}", image)
    file = open_inside(folder, thumbnail_name(image)) if is_hash else None
    if file is None:
        return b""
    with file:
        return file.read(_MOST_THUMBNAIL_BYTES)


def is_full(error: BaseException) -> bool:
    """Return whether an error means that a disk or quota is full."""
    full = (errno.ENOSPC, errno.EDQUOT)
    by_number = isinstance(error, OSError) and error.errno in full
    # The second form is that of Rust, and so of safetensors.
    return by_number or any(f"(os error {number})" in str(error) for number in full)


class _PlainLoader(yaml.SafeLoader):
    """Loads YAML without aliases, by which a few lines can expand to more than fits into memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases")
        return super().compose_node(parent, index)


def load_yaml(text: str) -> Any:
    """Load a YAML file from a run's folder in bounded time and memory, because others may have
    written it.

    Raises:
        yaml.YAMLError: it cannot be loaded; the message says why.
    """
    if len(text) > _LONGEST_YAML:
        raise yaml.YAMLError(f"it has more than {_LONGEST_YAML:,} characters")
    try:
        return yaml.load(text, _PlainLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    # A malformed value, such as a date.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise yaml.YAMLError(str(error)) from error

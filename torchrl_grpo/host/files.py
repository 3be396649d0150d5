"""Files of a run: their names, and reading rows back."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TIMELINE_FILE = "timeline.jsonl"
TRACE_FILE = "trace.json.gz"
ENVIRONMENT_FILE = "environment.json"
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
    return [row for line in whole_lines(path) if is_row(row := read_row(line))]


def read_row(line: str | bytes) -> dict[str, Any]:
    """Return the mapping on a line; empty if the line is not one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


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


def thumbnail_name(image: str) -> str:
    """Return the path, in a run's folder, of the thumbnail of the image with this hash."""
    return f"images/{image[:16]}.png"


def is_full(error: BaseException) -> bool:
    """Return whether an error means that a disk or quota is full."""
    full = (errno.ENOSPC, errno.EDQUOT)
    by_number = isinstance(error, OSError) and error.errno in full
    # Rust, and so safetensors, uses the second form.
    return by_number or any(f"(os error {number})" in str(error) for number in full)

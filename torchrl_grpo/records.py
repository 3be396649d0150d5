"""The files of a run as they are read back, and their texts and numbers as they are shown. It imports nothing heavy."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TIMELINE_FILE = "timeline.jsonl"
ENVIRONMENT_FILE = "environment.json"
MISSING = "-"


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a jsonl file of a run; lines that are none, such as one that a crash cut short, are left out.

    Returns:
        the rows, none when the file is not there.
    """
    path = Path(path)
    if not path.exists():
        return []
    return [row for line in whole_lines(path) if (row := parse_row(line)) is not None]


def parse_row(line: str) -> dict[str, Any] | None:
    """Return the row on a line: a JSON object with an integer ``step``; None where it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def whole_lines(path: Path) -> list[str]:
    """The lines that end in a newline (``splitlines`` would split at more characters than that)."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no more room on a disk, or none that may be used."""
    full = (errno.ENOSPC, errno.EDQUOT)
    by_number = isinstance(error, OSError) and error.errno in full
    return by_number or any(f"(os error {number})" in str(error) for number in full)  # as Rust says it: safetensors


def one_of_each(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of ``samples.jsonl`` with the first of each group first, then the second ones, and so on.

    >>> [row["n"] for row in one_of_each([{"group": 4, "n": 1}, {"group": 4, "n": 2}, {"group": 5, "n": 3}])]
    [1, 3, 2]
    """
    seen, order = Counter[Any](), []
    for position, row in enumerate(rows):
        group = row.get("group", f"row {position}")  # older runs have none
        order.append((seen[group], position))
        seen[group] += 1
    return [rows[position] for _, position in sorted(order)]


def printable(text: str, encoding: str = "utf-8") -> str:
    """The text on one line: what cannot be printed, in an encoding, becomes its escape (``\\n``, ``\\x1b``,
    ``\\u202e``)."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def printable_lines(text: str, encoding: str = "utf-8") -> str:
    """The text with its newlines; what else cannot be printed becomes its escape."""
    return "\n".join(printable(line, encoding) for line in text.split("\n"))


def clip(text: str, longest: int) -> str:
    """The text, with its middle left out where it is too long: the answer stands at the end."""
    if len(text) <= longest:
        return text
    tail = (longest - 5) // 2
    return f"{text[: longest - 5 - tail]} ... {text[len(text) - tail :]}"


def earned(row: Mapping[str, Any]) -> Any:
    """A sample's reward, none where it is not valid."""
    return None if row.get("valid") is False else row.get("reward")


def passes(
    row: Mapping[str, Any], least: float | None = None, most: float | None = None, text: str | None = None
) -> bool:
    """Whether a sample's reward lies within these bounds and its prompt or response has the text, in capitals or not.

    A reward that is not valid is neither high nor low.
    """
    reward = earned(row)
    if (least, most) != (None, None) and reward is None:
        return False
    texts = f"{row.get('query')}\0{row.get('response')}".casefold()
    return (
        (least is None or reward >= least)
        and (most is None or reward <= most)
        and (text is None or text.casefold() in texts)
    )


def reward_text(row: Mapping[str, Any]) -> str:
    """A sample's reward; a reward that crashed or timed out is not 0 but ``invalid``."""
    return "invalid" if row.get("valid") is False or row.get("reward") is None else number(row["reward"])


def percent(value: float | None) -> str:
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"


def number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"


def size(count: float) -> str:
    """Bytes, in the unit that fits."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def merge_steps(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One mapping a step, in the order of the steps: a step's later lines add to its earlier ones."""
    records: dict[int, dict[str, Any]] = {}
    for row in rows:
        records.setdefault(row["step"], {}).update(row)
    return [records[step] for step in sorted(records)]


def run_title(config: str, hydra: str) -> str:
    """Model, data and algorithm, where the texts of Hydra's ``config.yaml`` and ``hydra.yaml`` name them."""
    try:
        settings, choices = yaml.safe_load(config), yaml.safe_load(hydra)["hydra"]["runtime"]["choices"]
        env = settings["env"]
        data = " and ".join(str(entry["dataset"]) for entry in env.get("datasets") or [env])
        data = (env.get("task") or {}).get("_target_") or data
        return f"{settings['model']['name']} on {data} with {choices['algo']}"
    except (yaml.YAMLError, KeyError, TypeError):
        return "GRPO run"

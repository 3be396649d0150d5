"""The files of a run as they are read back, and their texts and numbers as they are shown. It imports nothing heavy."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from pathlib import Path
from typing import Any

import yaml

NOISE = 1e-8
"""What is nearer to 0 is rounding: no metric means that."""
_ALL_DIGITS = Context(prec=400)
"""Takes any float."""
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TIMELINE_FILE = "timeline.jsonl"
ENVIRONMENT_FILE = "environment.json"
MISSING = "-"
_LONGEST_YAML = 300_000
"""Characters: some seconds of PyYAML's time. A run's config has some thousands."""


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
    return MISSING if value is None or not math.isfinite(value) else f"{_rounded(100 * value, 1)}%"


def points(before: float, after: float) -> str:
    """The difference of two shares as ``percent`` shows them.

    >>> percent(0.33749), percent(0.98251), points(0.33749, 0.98251)
    ('33.7%', '98.3%', '+64.6 points')
    """
    return f"{_rounded(100 * after, 1) - _rounded(100 * before, 1):+} points"


def accuracy(metrics: Mapping[str, Any], name: str, decoding: str = "") -> str:
    """An ``eval/pass@*`` metric with the share of invalid rewards behind it and, where it is 0, their mean.

    >>> accuracy({"eval/pass@1": 1.0, "eval/invalid_fraction": 0.9375, "eval/reward_mean": 1.0}, "eval/pass@1")
    '100.0% (93.8% invalid)'
    """
    if metrics[name] is None or math.isnan(metrics[name]):
        return "no valid reward"
    k, slash, dataset = name.removeprefix("eval/pass@").partition("/")
    invalid = metrics.get(f"eval/invalid_fraction{'' if k == '1' else f'@{k}'}{slash}{dataset}")
    reward = metrics.get(f"eval/reward_mean{slash}{dataset}") if k == "1" and metrics[name] == 0 else None
    notes = [f"{percent(invalid)} invalid"] if invalid else []
    if reward:
        notes.append(f"mean reward {number(reward)}")
    shown = [percent(metrics[name]), decoding, f"({', '.join(notes)})" if notes else ""]
    return " ".join(filter(None, shown))


def decoding(name: str) -> str:
    """How the responses behind an ``eval/pass@*`` metric were decoded.

    >>> decoding("eval/pass@1"), decoding("eval/pass@1/gsm8k"), decoding("eval/pass@16")
    ('greedy', 'greedy', 'sampled')
    """
    return "greedy" if name.split("/")[1] == "pass@1" else "sampled"


def number(value: float | None) -> str:
    """A number with three digits, and without a fraction from 1,000 on.

    >>> number(0.5625), number(1234.5), number(0.000025), number(-2.42e-10)
    ('0.563', '1,235', '2.5e-5', '0')
    """
    if value is None or not (isinstance(value, int) or math.isfinite(value)):
        return MISSING
    if isinstance(value, int) or value.is_integer():
        return f"{int(value):,}"
    if abs(value) >= 999.5:
        return f"{_rounded(value, 0):,}"
    if abs(value) < NOISE:
        return "0"
    digits = float(_rounded(value, 2 - Decimal(value).adjusted()))
    mantissa, _, exponent = f"{digits:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def _rounded(value: float, places: int) -> Decimal:
    """The value with so many places, halves away from zero as in JavaScript: Python rounds them to even digits."""
    return Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP, _ALL_DIGITS)


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
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # a value without its form
        raise yaml.YAMLError(str(error)) from error


def run_title(config: str, hydra: str) -> str:
    """Model, data and algorithm, where the texts of Hydra's ``config.yaml`` and ``hydra.yaml`` name them."""
    try:
        settings, choices = load_yaml(config), load_yaml(hydra)["hydra"]["runtime"]["choices"]
        env = settings["env"]
        data = " and ".join(str(entry["dataset"]) for entry in env.get("datasets") or [env])
        data = (env.get("task") or {}).get("_target_") or data
        return f"{settings['model']['name']} on {data} with {choices['algo']}"
    except (yaml.YAMLError, AttributeError, KeyError, TypeError):
        return "GRPO run"

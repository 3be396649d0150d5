"""Helpers for the rows of a run's files: samples, steps, titles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from torchrl_grpo.extras.run_files import load_yaml, read_inside
from torchrl_grpo.host.files import is_row, read_row
from torchrl_grpo.host.text import printable_lines

OVERRIDES = ".hydra/overrides.yaml"
TOKENS = ', "tokens": {'
"""Beginning of a sample's last key. Inside a text its quotes would be escaped."""


def problem_of(row: Mapping[str, Any]) -> int | str:
    """Return the identity of a sample's problem: a test problem's number, else its text.

    >>> problem_of({"problem": 3, "query": "Play."}), problem_of({"query": "1+1="})
    (3, '1+1=')
    """
    number: int | None = row.get("problem")
    return str(row.get("query")) if number is None else number


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a ``samples.jsonl`` without their tokens, one at a time, because the file may
    be larger than the memory; none if it does not exist.
    """
    if path.exists():
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                head, tokens, _ = line.partition(TOKENS)
                row = read_row(head + "}" * bool(tokens)) if line.endswith("\n") else {}
                if is_row(row):
                    yield row


def valid_reward(row: Mapping[str, Any]) -> Any:
    """Return a sample's reward; None if it is invalid."""
    return None if row.get("valid") is False else row.get("reward")


def passes(
    row: Mapping[str, Any],
    minimum: float | None = None,
    maximum: float | None = None,
    text: str | None = None,
) -> bool:
    """Return whether a sample's reward is within bounds and its prompt or response contains the
    text, ignoring case.

    An invalid reward is neither high nor low.
    """
    reward = valid_reward(row)
    if (minimum, maximum) != (None, None) and reward is None:
        return False
    texts = f"{row.get('query')}\0{row.get('response')}".casefold()
    return (
        (minimum is None or reward >= minimum)
        and (maximum is None or reward <= maximum)
        and (text is None or text.casefold() in texts)
    )


def run_title(config: str, hydra: str) -> str:
    """Return model, data and algorithm from the texts of Hydra's ``config.yaml`` and
    ``hydra.yaml``; of a path its last three parts.
    """
    try:
        settings = load_yaml(config)
        env = settings["env"]
        sets = [_short_path(str(entry["dataset"])) for entry in env.get("datasets") or [env]]
        task = env.get("task") or {}
        target = task if isinstance(task, str) else task.get("_target_")
        data = target or env.get("environment") or " and ".join(sets)
        title = f"{_short_path(settings['model']['name'])} on {data}"
        if not hydra:  # a run from Python
            return title
        return f"{title} with {load_yaml(hydra)['hydra']['runtime']['choices']['algo']}"
    except (yaml.YAMLError, AttributeError, KeyError, TypeError):
        return "GRPO run"


def _short_path(path: str) -> str:
    return "/".join(path.split("/")[-3:])


def overrides_of(text: str) -> dict[str, str]:
    """Return the values that the command line of a job set, by key, from its ``overrides.yaml``;
    empty if that is malformed.

    >>> overrides_of("[seed=1, +a.b=c]"), overrides_of("a: 1")
    ({'seed': '1', 'a.b': 'c'}, {})
    """
    try:
        texts = load_yaml(text)
    except yaml.YAMLError:
        return {}
    lines = texts if isinstance(texts, list) else []
    return dict(line.lstrip("+").partition("=")[::2] for line in lines if isinstance(line, str))


def short_value(value: str) -> str:
    """Return a value of an override, with fractions of many digits rounded to three.

    >>> short_value("0.00012345678"), short_value("10240000"), short_value("dapo")
    ('0.000123', '10240000', 'dapo')
    """
    try:
        number = float(value)
    except ValueError:
        return value
    is_long_fraction = "." in value and len(value) > 7
    return f"{number:.3g}" if is_long_fraction and math.isfinite(number) else value


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return names of runs: for one run the last two parts of its path, for several as many parts
    as distinguish them; for jobs of a sweep the overrides in which they differ, with the last part
    of each key where this is clear.
    """
    parts = [folder.resolve().parts for folder in folders]
    for count in range(2 if len(folders) == 1 else 1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            break
    values = [overrides_of(read_inside(folder, OVERRIDES)) for folder in folders]
    varied = [
        key
        for key in dict.fromkeys(key for overrides in values for key in overrides)
        if len({overrides.get(key) for overrides in values}) > 1 or len(folders) == 1
    ]
    last_parts = [key.rpartition(".")[2] for key in varied]
    short = {
        key: last if last_parts.count(last) == 1 else key
        for key, last in zip(varied, last_parts, strict=True)
    }
    for at, (path, overrides) in enumerate(zip(parts, values, strict=True)):
        text = " ".join(
            f"{short[key]}={short_value(overrides[key])}" for key in varied if key in overrides
        )
        if path[-1].isdigit() and text:  # a job of a sweep
            names[at] = text if values.count(overrides) == 1 else f"{names[at]} {text}"
    return [printable_lines(name) for name in names]

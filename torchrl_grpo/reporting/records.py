"""Helpers for the rows of a run's files: samples, steps, titles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from torchrl_grpo.host.files import load_yaml
from torchrl_grpo.host.text import MISSING, number

OVERRIDES = ".hydra/overrides.yaml"


def one_of_each(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return rows of ``samples.jsonl``, reordered: the first of each group, then the second ones,
    and so on.

    >>> [row["n"] for row in one_of_each([{"group": 4, "n": 1}, {"group": 4, "n": 2}, {"group": 5, "n": 3}])]
    [1, 3, 2]
    """
    counts = Counter[Any]()
    order = []
    for position, row in enumerate(rows):
        group = row.get("group", f"row {position}")  # older runs have no group
        order.append((counts[group], position))
        counts[group] += 1
    return [rows[position] for _, position in sorted(order)]


def problem_of(row: Mapping[str, Any]) -> int | str:
    """Return the identity of a sample's problem: a test problem's number, else its text.

    >>> problem_of({"problem": 3, "query": "Play."}), problem_of({"query": "1+1="})
    (3, '1+1=')
    """
    number: int | None = row.get("problem")
    return str(row.get("query")) if number is None else number


def valid_reward(row: Mapping[str, Any]) -> Any:
    """Return a sample's reward; None if it is invalid."""
    return None if row.get("valid") is False else row.get("reward")


def passes(
    row: Mapping[str, Any],
    least: float | None = None,
    most: float | None = None,
    text: str | None = None,
) -> bool:
    """Return whether a sample's reward is within bounds and its prompt or response contains the
    text, ignoring case.

    An invalid reward is neither high nor low.
    """
    reward = valid_reward(row)
    if (least, most) != (None, None) and reward is None:
        return False
    texts = f"{row.get('query')}\0{row.get('response')}".casefold()
    return (
        (least is None or reward >= least)
        and (most is None or reward <= most)
        and (text is None or text.casefold() in texts)
    )


def reward_text(row: Mapping[str, Any]) -> str:
    """Format a sample's reward, with those of its turns; one that crashed or timed out is
    ``invalid``, not 0.
    """
    if "reward" not in row:  # a demonstration
        return MISSING
    if row.get("valid") is False or row["reward"] is None:
        return "invalid"
    turns = row.get("turn_rewards")
    return number(row["reward"]) + (f" (turns: {', '.join(map(number, turns))})" if turns else "")


def merge_steps(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one mapping per step, in order; later lines of a step are merged into earlier ones."""
    records: dict[int, dict[str, Any]] = {}
    for row in rows:
        records.setdefault(row["step"], {}).update(row)
    return [records[step] for step in sorted(records)]


def run_title(config: str, hydra: str) -> str:
    """Return model, data and algorithm from the texts of Hydra's ``config.yaml`` and
    ``hydra.yaml``.
    """
    try:
        settings = load_yaml(config)
        choices = load_yaml(hydra)["hydra"]["runtime"]["choices"]
        env = settings["env"]
        data = " and ".join(str(entry["dataset"]) for entry in env.get("datasets") or [env])
        task = env.get("task") or {}
        target = task if isinstance(task, str) else task.get("_target_")
        data = target or env.get("environment") or data
        return f"{settings['model']['name']} on {data} with {choices['algo']}"
    except (yaml.YAMLError, AttributeError, KeyError, TypeError):
        return "GRPO run"


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

"""Parser of ``env.reward``: functions, their names, weights and options. It loads nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SingleReward = str | Callable[..., Any] | Mapping[str, Any]
RewardSpec = SingleReward | Sequence[SingleReward]
"""A function or its name; ``{fn, weight, name, per, ...options}``; or a list of these."""
PartWeights = Mapping[str, float] | Mapping[str, Mapping[str, float]]
"""Weights of parts, see ``reward_weights``; for several data sets, by the name of the data set."""
CORRECT = "correct"
"""Name of the part that counts for accuracy only."""


@dataclass(frozen=True)
class RewardEntry:
    """One function of a spec.

    Attributes:
        fn: the function, or its name, see ``load_function``.
        name: name in logs.
        weight: weight of its result, or of each part by name; its other parts are then only logged.
        options: arguments by name.
        per: ``"response"`` or ``"group"``, see ``RewardFunction``; None if its parameters decide.
    """

    fn: str | Callable[..., Any]
    name: str
    weight: float | Mapping[str, float]
    options: Mapping[str, Any]
    per: str | None = None


def parse_rewards(spec: RewardSpec, field: str = "env.reward") -> list[RewardEntry]:
    """Parse a spec.

    Args:
        spec: see ``RewardSpec``.
        field: config key of the spec.

    Raises:
        ValueError: an entry is invalid.

    >>> [entry.name for entry in parse_rewards(["math", {"fn": "my_rewards.py:short", "weight": 0.1}])]
    ['math', 'short']
    """
    specs: Any = [spec]
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        specs = spec
    entries = [_entry(entry, field) for entry in specs]
    if not entries:
        raise ValueError(
            f"{field}=[] must name a reward: for example, [gsm8k], or leave {field} out to use the "
            "task's own."
        )
    names = [entry.name for entry in entries]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"{field} must have different names, but {', '.join(duplicates)} occurs twice: set "
            "`name` of one."
        )
    return entries


def _entry(spec: SingleReward, field: str) -> RewardEntry:
    options: dict[str, Any] = dict(spec) if isinstance(spec, Mapping) else {"fn": spec}
    fn = options.pop("fn", None)
    if not (isinstance(fn, str) or callable(fn)):
        raise ValueError(
            f"{field} must name a function as fn, got {spec!r}: for example, {{fn: gsm8k, weight: "
            "1}."
        )
    default = fn if isinstance(fn, str) else getattr(fn, "__name__", type(fn).__name__)
    default = default.rpartition(":")[2].rpartition("/")[2]
    name = options.pop("name", default)
    weight = options.pop("weight", 1.0)
    per = options.pop("per", None)
    if per not in (None, "response", "group"):
        raise ValueError(
            f"{field}.per={per!r} of {name} must be response or group: use group for a function "
            "that compares the responses to a problem."
        )
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(
            f"{field}.name={name!r} must be text without '/', which separates a part: use "
            f"{default}."
        )
    for value in weight.values() if isinstance(weight, Mapping) else [weight]:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value)):
            raise ValueError(
                f"{field}.weight={weight!r} of {name} must be a finite number, or one number for "
                "each part: use 1."
            )
    return RewardEntry(fn, name, weight, options, per)


def reward_weights(entries: Sequence[RewardEntry]) -> dict[str, float]:
    """Return the weights of entries, by the name of a function, or ``name/part``.

    >>> reward_weights(parse_rewards({"fn": "ifeval", "weight": {"prompt_strict": 0.5}}))
    {'ifeval': 0.0, 'ifeval/prompt_strict': 0.5}
    """
    weights: dict[str, float] = {}
    for entry in entries:
        parts = entry.weight if isinstance(entry.weight, Mapping) else {}
        weights[entry.name] = 0.0 if isinstance(entry.weight, Mapping) else float(entry.weight)
        weights |= {f"{entry.name}/{part}": float(weight) for part, weight in parts.items()}
    return weights


def part_weight(part: str, parts: Collection[str], weights: Mapping[str, float]) -> float:
    """Return the weight of a part in the reward.

    It is the part's weight, else its function's, else 1. A part ``correct`` is only logged, and so
    is ``name/x`` if there is a part ``name``: verl's functions return one score with other numbers.

    Args:
        part: ``name``, or ``name/part`` if a function returned a dict.
        parts: all parts.
        weights: see ``reward_weights``.

    >>> [part_weight(part, ["f/a", "f/correct"], {"f": 0.5}) for part in ("f/a", "f/correct")]
    [0.5, 0.0]
    >>> part_weight("f/accuracy", ["f", "f/accuracy"], {})
    0.0
    """
    if part in weights:
        return weights[part]
    name, slash, key = part.partition("/")
    return 0.0 if slash and (key == CORRECT or name in parts) else weights.get(name, 1.0)

"""Parser of ``env.reward``: functions, their names, weights and options. Nothing is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OneReward = str | Callable[..., Any] | Mapping[str, Any]
RewardSpec = OneReward | Sequence[OneReward]
"""A function, by its name or itself; ``{fn, weight, name, ...options}``; or a list of these."""
PartWeights = Mapping[str, float] | Mapping[str, Mapping[str, float]]
"""Weights of parts, see ``reward_weights``; of several data sets, these by the name of the set."""
CORRECT = "correct"
"""Name of the part that counts for accuracy only."""


@dataclass(frozen=True)
class RewardEntry:
    """One function of a spec.

    Attributes:
        fn: its name, see ``load_function``, or the function itself.
        name: under which it is logged.
        weight: of what it returns, or of each part that is named; its other parts are then only
            logged.
        options: arguments by name.
    """

    fn: str | Callable[..., Any]
    name: str
    weight: float | Mapping[str, float]
    options: Mapping[str, Any]


def parse_rewards(spec: RewardSpec, field: str = "env.reward") -> list[RewardEntry]:
    """The entries of a spec.

    Args:
        spec: see ``RewardSpec``.
        field: what the user who wrote it calls it.

    Raises:
        ValueError: an entry is not as it must be.

    >>> [entry.name for entry in parse_rewards(["math", {"fn": "my_rewards.py:short", "weight": 0.1}])]
    ['math', 'short']
    """
    several: list[Any] = (
        list(spec) if isinstance(spec, Sequence) and not isinstance(spec, str) else [spec]
    )
    entries = [_entry(one, field) for one in several]
    if not entries:
        raise ValueError(
            f"{field}=[] must name a reward: for example, [gsm8k], or leave {field} out for the "
            "task's own."
        )
    names = [entry.name for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{field} must have different names, {', '.join(twice)} is there twice: give one a "
            "`name`."
        )
    return entries


def _entry(one: OneReward, field: str) -> RewardEntry:
    given: dict[str, Any] = dict(one) if isinstance(one, Mapping) else {"fn": one}
    fn = given.pop("fn", None)
    if not (isinstance(fn, str) or callable(fn)):
        raise ValueError(
            f"{field} must name a function as fn, got {one!r}: for example, {{fn: gsm8k, weight: "
            "1}."
        )
    default = (
        fn.rpartition(":")[2] if isinstance(fn, str) else getattr(fn, "__name__", type(fn).__name__)
    )
    name = given.pop("name", default)
    weight = given.pop("weight", 1.0)
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(
            f"{field}.name={name!r} must be a text without '/', which comes before a part: use "
            f"{default}."
        )
    for value in weight.values() if isinstance(weight, Mapping) else [weight]:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ValueError(
                f"{field}.weight={weight!r} of {name} must be a finite number, or one for each "
                "part: use 1."
            )
    return RewardEntry(fn, name, weight, given)


def reward_weights(entries: Sequence[RewardEntry]) -> dict[str, float]:
    """The weights that entries give, by the name of a function, or ``name/part``.

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
    """Weight of a part in the reward.

    A weight is that of the part, else that of its function, else 1. A part ``correct`` is only
    logged; so is ``name/x`` where there is a part ``name``: verl's functions return one score, and
    other numbers beside it.

    Args:
        part: ``name``, or ``name/part`` where a function returned a dict.
        parts: all of them.
        weights: see ``reward_weights``.

    >>> part_weight("f/a", ["f/a", "f/correct"], {"f": 0.5}), part_weight("f/correct", ["f/a", "f/correct"], {"f": 0.5})
    (0.5, 0.0)
    >>> part_weight("f/accuracy", ["f", "f/accuracy"], {})
    0.0
    """
    if part in weights:
        return weights[part]
    name, slash, key = part.partition("/")
    return 0.0 if slash and (key == CORRECT or name in parts) else weights.get(name, 1.0)

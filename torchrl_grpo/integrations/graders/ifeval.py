"""IFEval: whether a response follows the instructions of its prompt (arXiv:2311.07911)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torchrl_grpo.integrations.graders.ifeval_checks import CHECKS

METRICS = ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose")
MAX_CHARACTERS = 1_000_000  # a longer response follows no instruction


def loose_variants(response: str) -> list[str]:
    """Return the eight texts of the loose metrics: with and without asterisks, and each of these in
    full, without its first line, without its last line, and without both.

    >>> len(loose_variants("Sure:\\n*yes*\\nBye")), loose_variants("Sure:\\n*yes*\\nBye")[-1]
    (8, 'yes')
    """
    lines = response.split("\n")
    variants = [
        response,
        *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])),
    ]
    return [*variants, *(text.replace("*", "") for text in variants)]


def follows(
    response: str,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[Mapping[str, Any]],
    loose: bool = False,
) -> list[bool]:
    """Return whether the response follows each instruction; an empty response follows none.

    Args:
        response: the response.
        instruction_id_list: the prompt's instructions; see ``ifeval_checks.CHECKS``.
        kwargs: the arguments of each; None means no argument.
        loose: whether it suffices that one of ``loose_variants`` follows an instruction.

    Raises:
        ValueError: there is no such instruction, or its arguments are wrong.
    """
    if len(instruction_id_list) != len(kwargs):
        raise ValueError(
            "kwargs of an IFEval prompt must have one entry for each of its "
            f"{len(instruction_id_list)} instructions, but it has {len(kwargs)}: fix that row of "
            "the data."
        )
    checks = [
        _check(name, arguments) for name, arguments in zip(instruction_id_list, kwargs, strict=True)
    ]
    if len(response) > MAX_CHARACTERS:
        return [False] * len(checks)
    variants = dict.fromkeys(loose_variants(response) if loose else [response])
    texts = [text for text in variants if text.strip()]
    return [any(check(text) for text in texts) for check in checks]


def _check(name: str, arguments: Mapping[str, Any]) -> Callable[[str], bool]:
    if name not in CHECKS:
        raise ValueError(
            f"instruction_id_list must name IFEval's instructions, got {name!r}: use "
            f"{sorted(CHECKS)}."
        )
    options = {key: value for key, value in arguments.items() if value is not None}
    check = CHECKS[name]
    _, *expected = inspect.signature(check).parameters
    if set(options) != set(expected):
        raise ValueError(
            f"kwargs of the instruction {name} must be {sorted(expected)}, got {sorted(options)}: "
            "fix that row of the data."
        )
    return partial(check, **options)


def ifeval(
    response: str,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[Mapping[str, Any]],
    metric: str | None = None,
) -> dict[str, float] | float:
    """Return the four accuracies of the paper for one response, as parts of a reward.

    Args:
        response: the response.
        instruction_id_list: the prompt's instructions (a column of the data set).
        kwargs: their arguments (a column of the data set).
        metric: ``prompt_strict`` (1.0 if every instruction is followed), ``instruction_strict``
            (the share of followed instructions), ``prompt_loose``, or ``instruction_loose``; None
            returns all four.

    Raises:
        ValueError: the columns are not IFEval's, or there is no such metric.
        ImportError: an instruction needs langdetect, which is not installed.

    >>> ifeval("no commas here", ["punctuation:no_comma", "startend:quotation"], [{}, {}], metric="instruction_strict")
    0.5
    """
    if metric not in (None, *METRICS):
        raise ValueError(
            f"metric of the reward ifeval must be one of {list(METRICS)} or None, got {metric!r}."
        )
    parts: dict[str, float] = {}
    for level in ("strict", "loose"):
        if metric is None or metric.endswith(level):
            followed = follows(response, instruction_id_list, kwargs, loose=level == "loose")
            parts[f"prompt_{level}"] = float(all(followed))
            parts[f"instruction_{level}"] = sum(followed) / max(len(followed), 1)
    return parts if metric is None else parts[metric]

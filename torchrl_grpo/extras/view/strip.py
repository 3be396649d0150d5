"""A response as a strip of tokens, with its turns and the values that can color its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.files import is_number
from torchrl_grpo.host.text import printable_lines

_MAX_DIFFERENCE = 50.0
"""Difference of log-probs beyond which the exponential is meaningless."""

Numbers = list[float | None]


def strip_of(row: Mapping[str, Any], call_format: str = "") -> dict[str, Any] | None:
    """Return the tokens of a row of ``samples.jsonl`` for display; None without tokens.

    Args:
        row: the row.
        call_format: name of the format of the run's tool calls.

    Returns:
        the ``text`` of each token, whether it was ``sampled``, ``values`` by name (one per token,
        None if unknown), and ``turns``: runs of tokens that the policy sampled or did not, each
        with ``start``, ``end`` and a ``label``.

    Examples:
        >>> tokens = {"text": ["4", "2"], "log_prob": [-0.5, -1.0], "trainer": [-0.5, -0.5]}
        >>> strip = strip_of({"tokens": tokens, "advantage": 1.0})
        >>> [round(ratio, 3) for ratio in strip["values"]["ratio"]], strip["turns"]
        ([1.0, 1.649], [{'start': 0, 'end': 2, 'sampled': True, 'label': 'turn 1, 2 tokens'}])
    """
    tokens = row.get("tokens") or {}
    text = tokens.get("text") if isinstance(tokens, dict) else None
    if not text or not isinstance(text, list) or not all(isinstance(part, str) for part in text):
        return None
    columns: dict[str, Numbers] = {
        name: column for name, column in tokens.items() if _is_column(column, len(text))
    }
    log_probs = columns.get("log_prob", [])
    sampled = [value is not None for value in log_probs] if log_probs else [True] * len(text)
    trainer = columns.get("trainer", log_probs)
    values = {
        "log_prob": log_probs,
        "ratio": _pairwise(trainer, log_probs, _ratio) if "trainer" in columns else [],
        "kl": _pairwise(columns.get("reference", []), trainer, _k3),
        "entropy": columns.get("entropy", []),
        "advantage": columns.get("advantage") or _constant(row.get("advantage"), sampled),
    }
    return {
        "text": [printable_lines(part) for part in text],
        "sampled": sampled,
        "values": {name: column for name, column in values.items() if len(column) == len(text)},
        "turns": _turns(text, sampled, str(row.get("prompt") or ""), call_format),
    }


def _is_column(values: Any, count: int) -> bool:
    """Return whether a value is a list with a number or None for each token."""
    has_all = isinstance(values, list) and len(values) == count
    return has_all and all(value is None or is_number(value) for value in values)


def _pairwise(
    first: Sequence[float | None], second: Sequence[float | None], function: Any
) -> Numbers:
    pairs = zip(first, second, strict=False)
    return [None if None in pair else function(*pair) for pair in pairs]


def _ratio(trainer: float, sampler: float) -> float:
    return math.exp(min(trainer - sampler, _MAX_DIFFERENCE))


def _k3(reference: float, policy: float) -> float:
    """Return the k3 estimate of the KL to the reference for one token."""
    difference = min(reference - policy, _MAX_DIFFERENCE)
    return math.exp(difference) - 1 - difference


def _constant(value: float | None, sampled: Sequence[bool]) -> Numbers:
    return [] if value is None else [value if is_sampled else None for is_sampled in sampled]


def _turns(
    text: Sequence[str], sampled: Sequence[bool], prompt: str, call_format: str
) -> list[dict[str, Any]]:
    turns = []
    start = 0
    count = 0
    for is_sampled, run in groupby(sampled):
        end = start + len(list(run))
        size = f"{end - start:,} token{'s' if end - start > 1 else ''}"
        if is_sampled:
            count += 1
            prefill = load_extra("prefill_of")(prompt + "".join(text[:start]), call_format)
            turn = load_extra("parse_turn")("".join(text[start:end]), prefill, call_format)
            calls = [
                f"{call.name or 'a tool'}{' (unreadable)' if call.error else ''}"
                for call in turn.calls
            ]
            label = f"turn {count}, {size}"
            if calls:
                label += f", calls {printable_lines(', '.join(calls))}"
        else:
            label = f"not sampled (a tool's answer, another's turn or the template), {size}"
        turns.append({"start": start, "end": end, "sampled": is_sampled, "label": label})
        start = end
    return turns

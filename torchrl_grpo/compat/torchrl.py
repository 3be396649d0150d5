"""TorchRL's private names, and names of its choices that ours replace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CHOICES: dict[str, Any] = {"prompt_mean": "sequence_mean"}
"""TorchRL's names of choices that have another name here."""


def group_names(advantage: Any) -> list[int | str]:
    """Return the names of the groups that wait in an ``MCAdvantage``; its shared queues cannot be
    iterated over.
    """
    return list(getattr(advantage.queues, "_queues", advantage.queues))


def set_schemes(collector: Any, schemes: dict[str, Any]) -> None:
    """Give a collector that exists weight synchronization schemes by model."""
    collector._weight_sync_schemes = schemes


def check_choice(name: str, choice: object, choices: Sequence[str]) -> None:
    """Refuse an unknown choice.

    Raises:
        ValueError: ``choice`` is not one of ``choices``.
    """
    if choice not in choices:
        raise ValueError(f"{name}={choice!r} must be one of {tuple(choices)}: use {choices[0]!r}.")

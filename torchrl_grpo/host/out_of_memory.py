"""Out-of-memory messages: what the device's memory holds, and what each setting would save."""

from __future__ import annotations

from collections.abc import Mapping

from torchrl_grpo.errors import MemoryShortError
from torchrl_grpo.host.text import size

_MIN_SHARE = 0.01
"""Minimum share of the memory that a setting must save to be named."""


def memory_short(
    error: BaseException, what: str, holds: Mapping[str, float], knobs: Mapping[str, float]
) -> MemoryShortError:
    """Return the error that ends the run.

    Args:
        error: the error that PyTorch raised.
        what: subject of the message, such as "The training step".
        holds: bytes on each device, by purpose.
        knobs: bytes that an override would save, by the override.
    """
    first = str(error).split(". ")[0].strip() or "out of memory"
    worth = sorted(
        (
            (name, saved)
            for name, saved in knobs.items()
            if saved > _MIN_SHARE * sum(holds.values())
        ),
        key=lambda knob: -knob[1],
    )
    saves = (
        ", ".join(f"{name} (about {size(saved)})" for name, saved in worth)
        or "nothing; use a smaller model"
    )
    return MemoryShortError(
        f"{what} ran out of memory ({first}). On each device it holds about {in_words(holds)}, "
        f"besides other allocations. Options that save memory: {saves}."
    )


def in_words(holds: Mapping[str, float]) -> str:
    """Return bytes by purpose in words: "1.0 kB of weights and 2.0 kB of activations"."""
    *parts, last = [f"{size(count)} of {name}" for name, count in holds.items()]
    return f"{', '.join(parts)}{' and ' * bool(parts)}{last}"

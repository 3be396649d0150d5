"""Progress of scoring, as lines in the log when it takes long. Imports nothing heavy."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
EVERY_S = 30.0
"""Seconds between two lines."""
_log = logging.getLogger("torchrl")  # TorchRL's logger: importing that takes seconds


def scoring(scores: Iterable[T], total: int) -> Iterator[T]:
    """Yield scores as they come, and log how many there are.

    Args:
        scores: computed, or waited for, when it is their turn.
        total: their number.
    """
    start = last = time.monotonic()
    for done, score in enumerate(scores, start=1):
        yield score
        now = time.monotonic()
        if now - last > EVERY_S and done < total:
            last = now
            _log.info(
                f"scored {done} of {total} responses, {(now - start) / done:.3g} s each: more "
                "env.reward_workers score several at a time."
            )

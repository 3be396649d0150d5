"""The time of day, for what is timed."""

from __future__ import annotations

import time

_AT_ZERO = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds, as the machine's clock was when this was imported: setting the clock makes no span negative."""
    return _AT_ZERO + time.monotonic()

"""The time of day, for timing."""

from __future__ import annotations

import time

_AT_ZERO = time.time() - time.monotonic()


def now() -> float:
    """Return Unix time: the machine's clock at import plus the time since, so no span is negative
    if the clock is set back.
    """
    return _AT_ZERO + time.monotonic()

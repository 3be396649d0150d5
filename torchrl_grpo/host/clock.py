"""The time of day, for timing."""

from __future__ import annotations

import time

_AT_ZERO = time.time() - time.monotonic()


def now() -> float:
    """Return Unix seconds by the machine's clock at import, plus elapsed time: setting the clock
    makes no span negative.
    """
    return _AT_ZERO + time.monotonic()

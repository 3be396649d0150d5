"""The time of day, for timing, and the date of a run."""

from __future__ import annotations

import os
import time
from datetime import datetime

DATE = "TORCHRL_GRPO_DATE"
"""Environment variable with the date of the run, for all of its processes."""
_AT_ZERO = time.time() - time.monotonic()


def now() -> float:
    """Return Unix time: the machine's clock at import plus the time since, so no span is negative
    if the clock is set back.
    """
    return _AT_ZERO + time.monotonic()


def run_date() -> datetime:
    """Return when the run was started first, for what depends on the date; without a run, now."""
    date = os.environ.get(DATE)
    return datetime.fromisoformat(date) if date else datetime.now()

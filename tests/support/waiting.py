"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300.0
"""Longest wait. Nothing takes as long, but a busy machine may be slow."""


def until(condition: Callable[[], object], every_s: float = 0.01) -> None:
    """Return when a condition holds; fail if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {PATIENCE_S:g} s"
        time.sleep(every_s)

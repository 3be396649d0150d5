"""Ranks on CPUs, without the time for imports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import multiprocessing

from tests.support import forks


def start_ranks(
    work: Callable[..., None], count: int, *arguments: object, join: bool = True
) -> Any:
    """Call ``work(rank, *arguments)`` in processes of their own.

    Args:
        work: function of a module.
        count: number of ranks.
        *arguments: of the function, after the rank.
        join: whether to wait until all have ended; otherwise torch's context is returned.
    """
    if sys.platform == "linux":
        forks.start()
    return multiprocessing.start_processes(work, arguments, count, join=join, start_method="spawn")

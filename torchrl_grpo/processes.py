"""Processes of our own that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal


def die_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when the thread that started it ends, also by SIGKILL (Linux only).

    Args:
        parent: process id of the parent.

    Raises:
        SystemExit: it has already ended.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"the process {parent} that started this one has ended.")

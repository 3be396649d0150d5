"""Processes of our own that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any


def die_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when the thread that started it ends, also by SIGKILL (Linux only).

    Args:
        parent: process id of the parent.

    Raises:
        SystemExit: it has already ended.
    """
    _ask_kernel(parent, signal.SIGKILL)


def go_on_in_guarded_child(parent: int, *, closing: int) -> None:
    """Returns in a child process, and stays behind as its guard (Linux only).

    When the child or the parent ends, however it does, or at SIGTERM, the guard kills the child and all that it
    started, in sessions of their own too, and ends with the child's status.

    Args:
        parent: process id of the parent.
        closing: a file that only the child keeps open.

    Raises:
        SystemExit: the parent has already ended.
    """
    pr_set_child_subreaper = 36  # who loses its parent becomes a child of the guard
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)
    _ask_kernel(parent, signal.SIGTERM)
    guard, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(guard)
        return
    os.close(closing)

    def end(*_: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    ended, status = os.wait()
    while ended != child:
        ended, status = os.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(ChildProcessError):  # until none is left
        while True:
            for pid in _children(guard):
                os.kill(pid, signal.SIGKILL)
            os.wait()
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(guard, os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) % 256)


def _children(pid: int) -> list[int]:
    """The processes whose parent has this number."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def _ask_kernel(parent: int, number: int) -> None:
    """Has the kernel send this process a signal when the thread that started it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
    if os.getppid() != parent:
        raise SystemExit(f"the process {parent} that started this one has ended.")

"""Child processes that must not outlive the process that started them."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even by SIGKILL
    (Linux only).

    Args:
        parent: process id of the parent.

    Raises:
        SystemExit: the parent has already ended.
    """
    _signal_when_parent_ends(parent, signal.SIGKILL)


def continue_in_guarded_child(parent: int, *, closing: int) -> None:
    """Return in a forked child, while this process stays behind as its guard (Linux only).

    When the child or the parent ends for any reason, or on SIGTERM, the guard kills the child and
    everything that it started, even in new sessions, and exits with the child's status.

    Args:
        parent: process id of the parent.
        closing: file descriptor that only the child keeps open.

    Raises:
        SystemExit: the parent has already ended.
    """
    pr_set_child_subreaper = 36  # orphans become children of the guard
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)
    _signal_when_parent_ends(parent, signal.SIGTERM)
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
    _stop_descendants(guard)
    with suppress(ChildProcessError):  # until no child is left
        while True:
            for pid in descendants(guard):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.wait()
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(guard, os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) % 256)


def _stop_descendants(pid: int) -> None:
    """Stop the descendants of a process: a fork bomb would fork faster than they can be killed."""
    stopped: set[int] = set()
    while new := set(descendants(pid)) - stopped:
        for descendant in new:
            with suppress(ProcessLookupError):
                os.kill(descendant, signal.SIGSTOP)
        stopped |= new


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, each after its parent (Linux only)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    pids = [pid]
    for parent in pids:
        pids += children.get(parent, [])
    return pids[1:]


_STACKS = "torchrl_grpo-stacks"
_SIGNAL_TO_SHOW = signal.SIGUSR2


def enable_stack_dump() -> None:
    """Enable ``stack_of`` for this process, even while it holds the GIL (Linux only). Can be called
    more than once.

    The stack is written to an anonymous file, so nothing is left behind and nobody else can plant
    one.
    """
    if hasattr(os, "memfd_create"):
        faulthandler.register(_SIGNAL_TO_SHOW, file=os.memfd_create(_STACKS))


def stack_of(pid: int) -> str:
    """Return the command line and stack of a process that called ``enable_stack_dump``; empty for
    other processes.
    """
    timeout_s = 2.0
    with suppress(OSError):
        files = [path for path in Path(f"/proc/{pid}/fd").iterdir() if _STACKS in os.readlink(path)]
        if files:
            os.kill(pid, _SIGNAL_TO_SHOW)
            deadline = time.monotonic() + timeout_s
            text = ""
            while not text and time.monotonic() < deadline:
                time.sleep(0.1)
                text = files[-1].read_text()
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            return f"{command:.100}\n{text or f'(no answer within {timeout_s:g} s: it is stopped)'}"
    return ""


def stacks_of(pids: Sequence[int]) -> str:
    """Return the command lines and stacks of these processes and their descendants; see
    ``stack_of``.
    """
    below = {descendant for pid in pids for descendant in descendants(pid)}
    stacks = ((pid, stack_of(pid)) for pid in sorted({*pids, *below}))
    return "".join(f"\nprocess {pid}, {stack}\n" for pid, stack in stacks if stack)


def _signal_when_parent_ends(parent: int, number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
    if os.getppid() != parent:
        raise SystemExit(f"the process {parent} that started this one has ended.")


def guarded(words: Sequence[str]) -> list[str]:
    """Return a command line that runs another one under a guard: when the command, the calling
    thread or this process ends, or on SIGTERM, everything that the command started ends, including
    daemons. On other systems than Linux, return the command unchanged.
    """
    if sys.platform != "linux":
        return list(words)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *words]


if __name__ == "__main__":
    continue_in_guarded_child(int(sys.argv[1]), closing=0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python; a command inherits that
        signal.signal(number, signal.SIG_DFL)
    os.execvp(sys.argv[2], sys.argv[2:])

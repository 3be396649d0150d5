"""Queries about running processes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support import forks
from tests.support.waiting import PATIENCE_S


def worker_processes() -> list[psutil.Process]:
    """Return our child processes, except those that Python, wandb, `math` and `forks` (of other
    tests) keep until we exit.
    """
    others = f"resource_tracker|forkserver|wandb|graders.math|^{forks.SERVER}$"
    lines = [(child, command_line(child)) for child in psutil.Process().children(recursive=True)]
    return [child for child, line in lines if line and not re.search(others, line)]


def command_line(process: psutil.Process) -> str:
    """Return a process's command line, its name if it is a server of ``forks``, or nothing once it
    has ended.
    """
    with suppress(psutil.Error):
        return forks.SERVER if process.name() == forks.SERVER else " ".join(process.cmdline())
    return ""


def socket_files() -> list[str]:
    """Return the socket files that this process and its children have open."""
    names = []
    for process in [psutil.Process(), *worker_processes()]:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            names += [connection.laddr for connection in process.net_connections("unix")]
    return [name for name in names if isinstance(name, str) and os.path.exists(name)]


def shared_memory() -> tuple[list[str], list[str]]:
    """Return the shared memory of this process and its children: segments with a file in /dev/shm,
    and unlinked ones.
    """
    lines = []
    for process in [psutil.Process(), *worker_processes()]:
        with suppress(OSError):  # it has just ended
            lines += Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    used = {line.split()[5] for line in lines if "/dev/shm/psm_" in line}
    return [name for name in used if os.path.exists(name)], [
        name for name in used if not os.path.exists(name)
    ]


def below(pid: int | None = None) -> list[int]:
    """Return the descendants of a process, of this one by default."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def has_ended(process: int | psutil.Process) -> bool:
    """Return whether a process has ended, even if its parent, such as a container's first process,
    never waits for it.
    """
    with suppress(psutil.NoSuchProcess):
        if isinstance(process, int):
            process = psutil.Process(process)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def alive(processes: Iterable[int | psutil.Process]) -> list[str]:
    """Return the status and command line of those processes that do not end soon."""
    remaining = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            remaining.append(psutil.Process(process) if isinstance(process, int) else process)
    deadline = time.monotonic() + PATIENCE_S
    while remaining := [process for process in remaining if not has_ended(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return [f"{process} {command_line(process)}" for process in remaining]


def listening(pids: Iterable[int]) -> set[str]:
    """Return the addresses on which processes listen."""
    there = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            there |= {
                c.laddr.ip
                for c in psutil.Process(pid).net_connections("tcp")
                if c.status == psutil.CONN_LISTEN
            }
    return {address.removeprefix("::ffff:") for address in there}

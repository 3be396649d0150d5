"""Queries about running processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support import forks


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
    processes = [psutil.Process(), *worker_processes()]
    names = [
        connection.laddr for process in processes for connection in process.net_connections("unix")
    ]
    return [name for name in names if isinstance(name, str) and os.path.exists(name)]


def shared_memory() -> tuple[list[str], list[str]]:
    """Return the shared memory of this process and its children: segments with a file in /dev/shm,
    and unlinked ones.
    """
    lines = []
    for process in [psutil.Process(), *worker_processes()]:
        lines += Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    used = {line.split()[5] for line in lines if "/dev/shm/psm_" in line}
    return [name for name in used if os.path.exists(name)], [
        name for name in used if not os.path.exists(name)
    ]


def below(pid: int | None = None) -> list[int]:
    """Return the descendants of a process, of this one by default."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def alive(pids: Iterable[int]) -> list[str]:
    """Return command lines of those processes that do not end soon."""
    processes = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, remaining = psutil.wait_procs(processes, timeout=120)
    lines = []
    for process in remaining:
        with suppress(psutil.NoSuchProcess):
            lines.append(command_line(process) or process.name())
    return lines


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

"""Which processes there are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support import forks


def worker_processes() -> list[psutil.Process]:
    """Our child processes, without those that Python, wandb, `math` and `forks` (of other tests) keep until we exit."""
    children = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    children = [one for one in children if one.name() != forks.SERVER]
    return [
        one
        for one in children
        if not re.search("resource_tracker|forkserver|wandb|rewards.math", " ".join(one.cmdline()))
    ]


def socket_files() -> list[str]:
    """The files of sockets that we and our child processes have open."""
    processes = [psutil.Process(), *worker_processes()]
    names = [connection.laddr for process in processes for connection in process.net_connections("unix")]
    return [name for name in names if isinstance(name, str) and os.path.exists(name)]


def shared_memory() -> tuple[list[str], list[str]]:
    """The shared memory that we and our child processes use: what has a file in /dev/shm, and what has none now."""
    lines = []
    for process in [psutil.Process(), *worker_processes()]:
        lines += Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    used = {line.split()[5] for line in lines if "/dev/shm/psm_" in line}
    return [name for name in used if os.path.exists(name)], [name for name in used if not os.path.exists(name)]


def below(pid: int | None = None) -> list[int]:
    """The processes that a process, or this one, has started, and those that they have."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def alive(pids: Iterable[int]) -> list[str]:
    """Command lines of those processes that do not end soon."""
    processes = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, remaining = psutil.wait_procs(processes, timeout=120)
    lines = []
    for process in remaining:
        with suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()) or process.name())
    return lines


def listening(pids: Iterable[int]) -> set[str]:
    """The addresses on which processes listen."""
    there = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            there |= {c.laddr.ip for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return {address.removeprefix("::ffff:") for address in there}

"""Which processes there are."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil


def worker_processes() -> list[psutil.Process]:
    """Our child processes, without those that Python and wandb (of other tests) keep until we exit."""
    children = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in children if not re.search("resource_tracker|forkserver|wandb", " ".join(one.cmdline()))]


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

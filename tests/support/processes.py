"""Which processes there are."""

from __future__ import annotations

import os
import re

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

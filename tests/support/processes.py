"""Which processes there are."""

from __future__ import annotations

import re

import psutil


def worker_processes() -> list[psutil.Process]:
    """Our child processes, without those that Python and wandb (of other tests) keep until we exit."""
    children = psutil.Process().children(recursive=True)
    return [one for one in children if not re.search("resource_tracker|forkserver|wandb", " ".join(one.cmdline()))]

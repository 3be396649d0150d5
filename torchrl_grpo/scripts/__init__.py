"""The commands ``grpo`` and ``grpo-async``; ``sota/grpo/grpo.py`` and ``sota/grpo/grpo-async.py`` are the same.

``grpo.py`` and ``grpo_async.py`` here have a ``main`` each, ``job.py`` what it does. Nothing heavy is imported before
``main`` knows that there is something to do.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module


def start_grpo() -> None:
    """Synchronous GRPO, from this process' command line."""
    _start("grpo")


def start_grpo_async() -> None:
    """Asynchronous GRPO, from this process' command line."""
    _start("grpo_async")


def _start(name: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is a run to save, Ctrl-C just ends the process
    from torchrl_grpo.host.startup import leave
    from torchrl_grpo.scripts.job import command

    status = 0
    try:
        command(import_module(f"torchrl_grpo.scripts.{name}").main)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    if sys.orig_argv[1:2] == sys.argv[:1]:  # no test, debugger or profiler runs the script
        leave(status)
    sys.exit(status)

"""The commands ``grpo`` and ``grpo-async``; ``sota/grpo/grpo.py`` and ``sota/grpo/grpo-async.py``
are the same.

``grpo.py`` here is the entry of both, ``job.py`` what a job does. Nothing heavy is imported before
it is known that there is something to do.
"""

from __future__ import annotations

import signal
import sys


def start_grpo() -> None:
    """Synchronous GRPO, from this process' command line."""
    _start(asynchronous=False)


def start_grpo_async() -> None:
    """Asynchronous GRPO, from this process' command line."""
    _start(asynchronous=True)


def _start(*, asynchronous: bool) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # until there is a run to save, Ctrl-C just ends the process
    from torchrl_grpo.host.startup import leave
    from torchrl_grpo.scripts.grpo import job
    from torchrl_grpo.scripts.job import command

    status = 0
    try:
        command(job(asynchronous=asynchronous))
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    if sys.orig_argv[1:2] == sys.argv[:1]:  # no test, debugger or profiler runs the script
        leave(status)
    sys.exit(status)

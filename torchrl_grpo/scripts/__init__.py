"""The commands ``grpo`` and ``grpo-async``, which ``sota/grpo/grpo.py`` and
``sota/grpo/grpo-async.py`` also start.

``grpo.py`` is the entry point of both, and ``job.py`` runs a job. Nothing heavy is imported before
it is clear that there is something to do.
"""

from __future__ import annotations

import signal


def start_grpo() -> None:
    """Run synchronous GRPO from this process's command line."""
    _start(asynchronous=False)


def start_grpo_async() -> None:
    """Run asynchronous GRPO from this process's command line."""
    _start(asynchronous=True)


def _start(*, asynchronous: bool) -> None:
    # Until there is a run to save, Ctrl-C just ends the process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torchrl_grpo.scripts.grpo import job
    from torchrl_grpo.scripts.job import start

    start(job(asynchronous=asynchronous))

"""A pytest run whose death ends all processes that it has started, even those in other sessions."""

from __future__ import annotations

import os
import signal

from torchrl_grpo.host.processes import continue_in_guarded_child


def go_on_guarded() -> None:
    """Return in a grandchild, behind a guard that kills all processes below it when this process or
    the grandchild ends.

    This process waits and exits with the grandchild's status. It must not have threads yet.
    """
    pid = os.getpid()
    group = os.getpgrp()
    if guard := os.fork():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the grandchild
        status = os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    os.setpgid(0, 0)  # a signal to the process group is not for the guard
    continue_in_guarded_child(pid, closing=os.open(os.devnull, os.O_RDONLY))
    os.setpgid(0, group)

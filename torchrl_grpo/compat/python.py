"""Private names of Python's standard library."""

from __future__ import annotations

import atexit
import threading


def run_exit_functions() -> None:
    """Wait for this process's threads and call the functions registered with ``atexit``, as a
    normal exit does.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()

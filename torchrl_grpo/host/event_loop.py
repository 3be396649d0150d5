"""Event loops in threads, for coroutines that ordinary functions wait for: one of the process, and
one of each thread whose coroutines may block."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_loop: tuple[int, asyncio.AbstractEventLoop] | None = None
_lock = threading.Lock()
_own = threading.local()


def event_loop() -> asyncio.AbstractEventLoop:
    """This process' loop: one, so that clients that a function keeps stay usable from call to call."""
    global _loop
    with _lock:
        if _loop is None or _loop[0] != os.getpid():
            _loop = os.getpid(), _started()
        return _loop[1]


def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:  # its end cancels what still runs
            runner.get_loop().run_forever()

    threading.Thread(target=run, name="event loop", daemon=True).start()
    return loop


@contextmanager
def own_event_loop() -> Iterator[None]:
    """Have coroutines that this thread waits for run in a loop of its own: one that blocks it stops
    no other thread's.

    It is started for the first of them, and stopped at the end.
    """
    _own.wanted = True
    try:
        yield
    finally:
        if (loop := vars(_own).pop("loop", None)) is not None:
            loop.call_soon_threadsafe(loop.stop)
        _own.wanted = False


def settled(result: Any, timeout_s: float | None = None) -> Any:
    """Return the result of a function or, if it is a coroutine, what it comes to.

    Raises:
        TimeoutError: a coroutine took longer than ``timeout_s`` seconds; it is cancelled.
    """
    if not inspect.iscoroutine(result):
        return result
    if not getattr(_own, "wanted", False):
        loop = event_loop()
    else:
        loop = _own.loop = getattr(_own, "loop", None) or _started()
    return asyncio.run_coroutine_threadsafe(asyncio.wait_for(result, timeout_s), loop).result()

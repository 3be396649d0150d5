"""Event loops in threads, for coroutines that synchronous functions wait for: one for the process,
and one for each thread whose coroutines may block.
"""

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
_thread = threading.local()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return this process's loop. There is only one, so clients that a function keeps remain usable
    in later calls.
    """
    global _loop
    with _lock:
        if _loop is None or _loop[0] != os.getpid():
            _loop = os.getpid(), _start_loop()
        return _loop[1]


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        # The runner cancels the remaining coroutines when the loop stops.
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.get_loop().run_forever()

    threading.Thread(target=run, name="event loop", daemon=True).start()
    return loop


@contextmanager
def own_event_loop() -> Iterator[None]:
    """Run the coroutines that this thread waits for in a loop of its own, so that a blocking one
    does not stop other threads' coroutines.

    The loop is started for the first coroutine and stopped at the end of the context.
    """
    _thread.enabled = True
    try:
        yield
    finally:
        if (loop := vars(_thread).pop("loop", None)) is not None:
            loop.call_soon_threadsafe(loop.stop)
        _thread.enabled = False


def wait_for_result(result: Any, timeout_s: float | None = None) -> Any:
    """Return the result of a function, after waiting for it if it is a coroutine.

    Raises:
        TimeoutError: a coroutine took longer than ``timeout_s`` seconds; it is cancelled.
    """
    if not inspect.iscoroutine(result):
        return result
    if not getattr(_thread, "enabled", False):
        loop = event_loop()
    else:
        loop = _thread.loop = getattr(_thread, "loop", None) or _start_loop()
    return asyncio.run_coroutine_threadsafe(asyncio.wait_for(result, timeout_s), loop).result()

"""An event loop of this process in a thread, for coroutines that ordinary functions wait for."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from typing import Any

_loop: tuple[int, asyncio.AbstractEventLoop] | None = None
_lock = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """This process' loop: one, so that clients that a function keeps stay usable from call to call."""
    global _loop
    with _lock:
        if _loop is None or _loop[0] != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
            _loop = os.getpid(), loop
        return _loop[1]


def settled(result: Any, timeout_s: float | None = None) -> Any:
    """Return the result of a function or, if it is a coroutine, what it comes to.

    Raises:
        TimeoutError: a coroutine took longer than ``timeout_s`` seconds; it is cancelled.
    """
    if not inspect.iscoroutine(result):
        return result
    return asyncio.run_coroutine_threadsafe(asyncio.wait_for(result, timeout_s), event_loop()).result()

"""``Instance``: the environment of one dialog, in its own thread."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from torchrl_grpo.host.event_loop import own_event_loop, wait_for_result
from torchrl_grpo.tasks.base import harmless

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 10.0
_closing: set[Instance] = set()


class Instance:
    """Thread that constructs, plays and closes one environment, with an event loop for its
    coroutines.

    So environments run concurrently, and each may hold thread-bound resources, such as a browser.
    One that hangs does not block others; its thread ends with the process.

    Attributes:
        environment: the object; None before it is constructed.
        rewards: rewards of its steps so far.
        timeout_s: seconds that a coroutine of the environment may take; None is unbounded.
    """

    def __init__(self) -> None:
        self.environment: Any = None
        self.rewards: list[float] = []
        self.timeout_s: float | None = None
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._ended = threading.Event()
        threading.Thread(target=self._serve, name="environment", daemon=True).start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have the thread call a function, after earlier calls."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return future

    def close(self) -> None:
        """Close the environment, if it has ``close``, and end the thread. A process that exits
        waits some seconds for it.
        """
        _closing.add(self)
        self.call(self._close)
        self._calls.put(None)

    def _serve(self) -> None:
        with own_event_loop():
            while (call := self._calls.get()) is not None:
                future, function = call
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(harmless(error))
        _closing.discard(self)
        self._ended.set()

    def _close(self) -> None:
        try:
            if callable(close := getattr(self.environment, "close", None)):
                wait_for_result(close(), _CLOSE_TIMEOUT_S)
        except Exception:
            sys.stderr.write(f"an environment failed to close.\n{traceback.format_exc()}")
            sys.stderr.flush()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is closed; return whether it is closed."""
        return self._ended.wait(timeout_s)


@atexit.register
def _wait_for_closing() -> None:
    end = time.monotonic() + _CLOSE_TIMEOUT_S
    for instance in list(_closing):
        instance.wait(max(0.0, end - time.monotonic()))

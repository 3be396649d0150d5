"""``Instance``: an environment of one dialog, in a thread of its own."""

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

from torchrl_grpo.host.event_loop import own_event_loop, settled
from torchrl_grpo.tasks.base import harmless

T = TypeVar("T")

_LONGEST_CLOSE_S = 10.0
_closing: set[Instance] = set()


class Instance:
    """A thread in which one environment is constructed, played and closed, with an event loop for
    its coroutines.

    Environments thus run concurrently, and each may hold resources of a thread, such as a browser.
    One that hangs blocks no other; its thread ends with the process.

    Attributes:
        environment: the object; None before it is constructed.
        rewards: of its steps so far.
    """

    def __init__(self) -> None:
        self.environment: Any = None
        self.rewards: list[float] = []
        self._orders: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._ended = threading.Event()
        threading.Thread(target=self._serve, name="environment", daemon=True).start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have the thread call a function, after those before it."""
        future: Future[T] = Future()
        self._orders.put((future, function))
        return future

    def close(self) -> None:
        """End the environment, by its ``close`` if it has one, and the thread. A process that ends
        waits some seconds for it.
        """
        _closing.add(self)
        self.call(self._close)
        self._orders.put(None)

    def _serve(self) -> None:
        with own_event_loop():
            while (order := self._orders.get()) is not None:
                future, function = order
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(harmless(error))
        _closing.discard(self)
        self._ended.set()

    def _close(self) -> None:
        try:
            if callable(close := getattr(self.environment, "close", None)):
                settled(close(), _LONGEST_CLOSE_S)
        except Exception:
            sys.stderr.write(f"an environment failed to close.\n{traceback.format_exc()}")
            sys.stderr.flush()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is closed; return whether it is."""
        return self._ended.wait(timeout_s)


@atexit.register
def _wait_for_closing() -> None:
    end = time.monotonic() + _LONGEST_CLOSE_S
    for instance in list(_closing):
        instance.wait(max(0.0, end - time.monotonic()))

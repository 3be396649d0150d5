"""Driver-side handles on actors that may die and are made again: their state, and the references that they owe."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torchrl_grpo.generation.base import EngineDeadError

_LONGEST_PAUSE_S = 30.0


class Events:
    """Answers of actors, in the order in which they come; ``run_next`` calls the handler of the next one.

    Ray tells of an answer in a thread of its own, in which nothing may be asked of Ray: so the handlers wait in a queue
    until the thread that owns the state takes them out.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def when(self, reference: Any, done: Callable[[Any], None], failed: Callable[[BaseException], None]) -> None:
        """Calls ``done`` with the value of an object reference, or ``failed`` with what was raised instead."""

        def answered(future: Any) -> None:
            error = future.exception()
            self._queue.put(partial(failed, error) if error is not None else partial(done, future.result()))

        reference.future().add_done_callback(answered)

    def wake(self) -> None:
        """Lets ``run_next`` return."""
        self._queue.put(lambda: None)

    def next(self, timeout_s: float) -> Callable[[], None] | None:
        """The next handler, None when there is none in time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None


class Worker:
    """One actor and its successors.

    Attributes:
        name: for messages.
        actor: the handle of the current actor, None while there is none.
        ready: whether its parts are made.
        pid: its process, once it is ready.
        restarts: how many successors there were.
        units: what it is at work on.
        owes: the references that it has not answered yet, oldest first: what it was to do, and since when.
        alive_at: when the last of its actors was lost that had done something, or had nothing to do; at first when it
            was made itself (``time.monotonic``).

    Args:
        name: for messages.
        make: makes an actor and returns its handle.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name = name
        self.actor: Any = None
        self.ready = False
        self.pid = 0
        self.restarts = 0
        self.units: list[Any] = []
        self.owes: dict[Any, tuple[str, float]] = {}
        self.alive_at = time.monotonic()
        self.error: BaseException | None = None
        self._make = make
        self._failures = 0
        self._useful = True
        self._start_at = 0.0

    def start(self) -> Any:
        """Makes the actor; returns the reference to the process id that ``setup`` answers."""
        self.actor = self._make()
        return self.actor.setup.remote(*self._setup_arguments())

    def _setup_arguments(self) -> tuple[Any, ...]:
        return ()

    def started(self, pid: int) -> None:
        """Notes that the parts are made."""
        self.ready, self.pid = True, pid

    def did(self) -> None:
        """Notes that it has done what it is there for: only that ends a row of failures."""
        self._failures, self._useful = 0, True

    def late(self, actor_timeout_s: float) -> str | None:
        """What the actor was to do and has not done in so many seconds, in words; None if it is not late."""
        what, since = next(iter(self.owes.values()), ("", time.monotonic()))
        if time.monotonic() - since <= actor_timeout_s:
            return None
        return f"it was to {what}, and did not within {actor_timeout_s:g} s"

    def lost(self, error: BaseException) -> list[Any]:
        """Notes that the actor is gone; the next one may start at once, after repeated failures only after a pause.

        Returns:
            what it was at work on.
        """
        if self._useful or (self.ready and not self.owes):
            self.alive_at = time.monotonic()
        self._useful = False
        self.kill()
        self.restarts += 1
        self.error = error
        self._start_at = time.monotonic() + (0 if not self._failures else min(2.0**self._failures, _LONGEST_PAUSE_S))
        self._failures += 1
        units, self.units = self.units, []
        return units

    @property
    def must_start(self) -> bool:
        """Whether there is no actor and it is time to make one."""
        return self.actor is None and time.monotonic() >= self._start_at

    def kill(self) -> None:
        """Ends the actor's process at once. May be called again."""
        if self.actor is not None:
            import ray

            ray.kill(self.actor)
        self.actor, self.ready, self.owes = None, False, {}


def is_loss(error: BaseException) -> bool:
    """Whether an error says that an actor or its engine is gone, and not that its work raised."""
    from ray import exceptions

    gone = (
        exceptions.RayActorError,
        exceptions.ActorUnschedulableError,
        exceptions.OutOfMemoryError,
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
    )
    return isinstance(error, gone) or isinstance(cause_of(error), EngineDeadError)


def cause_of(error: BaseException) -> BaseException:
    """What was raised in the actor, without Ray's wrapping."""
    return getattr(error, "cause", None) or error

"""``InlineDriver``: steps the coroutines of ``Rollouts`` in the caller's thread, without an event
loop.

A job runs only while a caller waits: nothing is sampled before a batch is requested, or while
weights are published. The workers are ``LocalWorker`` and never wait, so a job either completes, or
finds nothing to do and is dropped. Signals, random states and accelerators are those of the one
thread, and an error arrives as the part raised it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from torchrl_grpo.runtime.workers import Worker

T = TypeVar("T")
WorkerJob = Callable[[], Coroutine[Any, Any, None]]
"""Work at a place: waits until there is something to do, and does it once."""
Make = Callable[[Any], Coroutine[Any, Any, None]]
"""Makes the part of a place."""
Work = Mapping[Worker, Sequence[WorkerJob]]
"""The rounds of each place of a kind; the first gives it its weights."""


class InlineDriver:
    """Drives parts that take turns in this thread.

    Attributes:
        overlaps: whether work goes on between two questions.
    """

    overlaps = False

    def __init__(self) -> None:
        self._jobs: list[WorkerJob] = []
        self._missing: Callable[[], str] = str

    def start(self, make: Make, kinds: Sequence[Work], missing: Callable[[], str]) -> None:
        """Make the parts, one after another.

        Args:
            make: makes the part of a place.
            kinds: the places of each kind, in the order in which a task comes to them.
            missing: says what is waited for, in words.
        """
        self._missing = missing
        for worker in chain(*kinds):
            self.run(make(worker))
        # Weights first; then tasks, from the end of their way, so that none is begun before others
        # are done.
        last_first = [jobs for work in reversed(kinds) for jobs in work.values()]
        self._jobs = [jobs[0] for jobs in last_first] + [
            one for jobs in last_first for one in jobs[1:]
        ]

    def run(self, coro: Coroutine[Any, Any, T], progress_note: str = "") -> T:
        """Return the answer to a question; while it waits, run one round after another.

        Args:
            question: waits with ``until``.
            noted: what takes long, in words; the loop's stages say it here.

        Raises:
            RuntimeError: the question waits for what no round can bring about.
            Exception: what a part raised.
        """
        try:
            while True:
                done, answer = _go_on(coro)
                if done:
                    return answer
                for one in (
                    self._jobs
                ):  # no ``any``, which would take a part's StopIteration for its own end
                    if _make(one):
                        break
                else:
                    raise RuntimeError(
                        f"what is asked for never comes: {self._missing()}. Publish weights before "
                        "the first batch and after each one."
                    )
        finally:
            coro.close()

    async def until(self, get: Callable[[], T | None]) -> T:
        """Wait until ``get`` returns something true; it is called again after each round."""
        while not (value := get()):
            await _pause()
        return value

    def notify(self) -> None:
        """Report a change of state, which nobody waits for here."""

    def close(self, closing: Sequence[Worker]) -> None:
        """Close the parts that have something to finish. May be called again."""
        for worker in closing:
            self.run(worker.close())


def _make(one: WorkerJob) -> bool:
    """Run a round, if it has something to do; return whether it had."""
    coroutine = one()
    try:
        return _go_on(coroutine)[0]
    finally:
        coroutine.close()


def _go_on(coroutine: Coroutine[Any, Any, T]) -> tuple[bool, Any]:
    """Resume a coroutine; return whether it is done, and its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return True, done.value
    except RuntimeError as error:
        if error.args == ("coroutine raised StopIteration",) and error.__cause__ is not None:
            raise error.__cause__ from None
        raise
    return False, None


@types.coroutine
def _pause() -> Generator[None, None, None]:
    yield

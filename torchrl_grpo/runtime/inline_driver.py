"""``InlineDriver``: steps the coroutines of ``Rollouts`` in the caller's thread, without an event
loop.

A job runs only while a caller waits: nothing is sampled before a batch is requested, or while
weights are published. The workers are instances of ``LocalWorker`` and never wait, so a job either
completes, or has nothing to do and is dropped. There is only one thread, so signals, random states
and accelerators are the caller's, and exceptions reach the caller unchanged.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from torchrl_grpo.runtime.workers import Worker

T = TypeVar("T")
WorkerJob = Callable[[], Coroutine[Any, Any, None]]
"""Coroutine of a worker that waits until there is something to do and does it once."""
Make = Callable[[Any], Coroutine[Any, Any, None]]
"""Makes the part of a worker."""
Work = Mapping[Worker, Sequence[WorkerJob]]
"""Jobs of each worker of a kind; the first one gives it its weights."""


class InlineDriver:
    """Driver of workers that take turns in this thread.

    Attributes:
        overlaps: whether jobs also run between two calls of ``run``.
    """

    overlaps = False

    def __init__(self) -> None:
        self._jobs: list[WorkerJob] = []
        self._missing: Callable[[], str] = str

    def start(self, make: Make, kinds: Sequence[Work], missing: Callable[[], str]) -> None:
        """Make the parts of all workers, one after another.

        Args:
            make: makes the part of a worker.
            kinds: workers of each kind and their jobs, in the order in which a task visits them.
            missing: describes what the run waits for.
        """
        self._missing = missing
        for worker in chain(*kinds):
            self.run(make(worker))
        # Weights first. Then tasks, the last kind of worker first, so that a task is finished before
        # another one starts.
        last_first = [jobs for work in reversed(kinds) for jobs in work.values()]
        self._jobs = [jobs[0] for jobs in last_first]
        for jobs in last_first:
            self._jobs += jobs[1:]

    def run(self, coro: Coroutine[Any, Any, T], progress_note: str = "") -> T:
        """Return the result of a coroutine. While it waits, run one job after another.

        Args:
            coro: coroutine that waits with ``until``.
            progress_note: ignored here, because the loop's stages note progress.

        Raises:
            RuntimeError: the coroutine waits for something that no job can bring about.
            Exception: any error of a part.
        """
        try:
            while True:
                done, result = _resume(coro)
                if done:
                    return result
                for job in self._jobs:
                    if _run_job(job):
                        break
                else:
                    raise RuntimeError(
                        f"no worker can make progress: {self._missing()}. Publish weights before "
                        "the first batch and after each one."
                    )
        finally:
            coro.close()

    async def until(self, get: Callable[[], T | None]) -> T:
        """Wait until ``get`` returns a true value. It is called again after each job."""
        while not (value := get()):
            await _pause()
        return value

    def notify(self) -> None:
        """Do nothing, because ``run`` checks the condition of ``until`` after each job anyway."""

    def close(self, closing: Sequence[Worker]) -> None:
        """Close the workers that have something to finish. May be called again."""
        for worker in closing:
            self.run(worker.close())


def _run_job(job: WorkerJob) -> bool:
    """Run a job. Return whether it had something to do."""
    coroutine = job()
    try:
        return _resume(coroutine)[0]
    finally:
        coroutine.close()


def _resume(coroutine: Coroutine[Any, Any, T]) -> tuple[bool, Any]:
    """Resume a coroutine. Return whether it is done, and its result."""
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

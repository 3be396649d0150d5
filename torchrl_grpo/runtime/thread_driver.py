"""``ThreadDriver``: runs the coroutines of ``Rollouts`` in an event loop in its own thread, also
between questions.

Each question waits for its answer with a bound. All else runs in that loop, and a state changes
between two ``await`` only: so no lock is needed, what ``until`` waits for holds when it returns,
and the caller's thread never touches it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torchrl_grpo.errors import WaitedTooLongError, WorkersLostError
from torchrl_grpo.host import stalls
from torchrl_grpo.runtime.inline_driver import Make, Work, WorkerJob
from torchrl_grpo.runtime.workers import ActorLostError, RayWorker, first_line

_TICK_S = 0.5
_CLOSING_S = 10.0

T = TypeVar("T")


class ThreadDriver:
    """Runs actors, each with a life: start, work, be lost, start again.

    Every method but ``close`` raises what has ended the work of the actors:

    - ``WorkersLostError``: all actors of a kind have been gone for too long;
    - ``WaitedTooLongError``: no answer, and no sign of life from any actor;
    - what an actor's work raised.

    Attributes:
        overlaps: whether work goes on between two questions.

    Keyword Args:
        actor_timeout_s: seconds in which an actor must do what it is asked, or be replaced.
        recovery_timeout_s: how long all actors of a kind may be gone before the run ends.
    """

    overlaps = True

    def __init__(
        self, *, actor_timeout_s: float = 1800.0, recovery_timeout_s: float = 900.0
    ) -> None:
        self.actor_timeout_s = actor_timeout_s
        self._recovery_timeout_s = recovery_timeout_s
        self._workers: list[RayWorker] = []
        self._missing: Callable[[], str] = str
        self._actor_tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def start(self, make: Make, kinds: Sequence[Work], missing: Callable[[], str]) -> None:
        """Begin the lives of all actors; return at once.

        Args:
            make: makes the part of a place.
            kinds: the places of each kind, with the rounds of work that are made there again and
                again.
            missing: says what is waited for, in words.
        """
        self._missing = missing
        self.run(self._begin(make, kinds))

    async def _begin(self, make: Make, kinds: Sequence[Any]) -> None:
        self._workers = [worker for work in kinds for worker in work]
        # Who comes last in a task's way begins first: samplers may wait for reference models.
        actor_tasks = [
            self._supervise(worker, make, jobs)
            for work in reversed(kinds)
            for worker, jobs in work.items()
        ]
        actor_tasks += [self._watch(list(work)) for work in kinds if work]
        self._actor_tasks = [asyncio.create_task(self._guard(task)) for task in actor_tasks]

    def run(self, coro: Coroutine[Any, Any, T], progress_note: str = "") -> T:
        """Return the answer to a question; it must come while some actor shows signs of life.

        An actor that is late and then replaced is silent for twice its time-out: only a longer
        silence ends the wait.

        Args:
            question: waits with ``until``.
            noted: what takes long, in words; the limit of a call, and not of a stage, ends it.
        """
        if self._closed or self._error is not None:
            coro.close()
            raise self._error or RuntimeError("the rollouts are closed: make new ones.")
        start, longest_s = time.monotonic(), 2 * self.actor_timeout_s
        answer = asyncio.run_coroutine_threadsafe(coro, self._loop)
        try:
            while True:
                try:
                    return answer.result(_TICK_S)
                except TimeoutError:
                    if answer.done():
                        raise
                if progress_note:
                    stalls.note(progress_note)
                if (
                    time.monotonic() - max([start, *(worker.heard_at for worker in self._workers)])
                    > longest_s
                ):
                    raise WaitedTooLongError(
                        f"heard nothing from any actor for {longest_s:g} s, twice "
                        f"ray.actor_timeout_s: {self._missing()}."
                    )
        finally:
            answer.cancel()

    async def until(self, get: Callable[[], T | None]) -> T:
        """Wait until ``get`` returns something true; it is called again after each ``notify``.

        Raises:
            Exception: what has ended one of the lives.
        """
        while True:
            if self._error is not None:
                raise self._error
            value = get()
            if value:
                return value
            await self._changed.wait()

    def notify(self) -> None:
        """Wake those who wait for a change of the state."""
        self._changed.set()
        self._changed.clear()

    def close(self, closing: Sequence[Any]) -> None:
        """End all actors, asking those with something to finish. May be called again."""
        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._end(closing), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _end(self, closing: Sequence[Any]) -> None:
        for task in self._actor_tasks:
            task.cancel()
        await asyncio.gather(*self._actor_tasks, return_exceptions=True)
        with suppress(TimeoutError):
            ending = asyncio.gather(*(worker.close() for worker in closing), return_exceptions=True)
            await asyncio.wait_for(ending, _CLOSING_S)
        for worker in self._workers:
            worker.kill()

    async def _guard(self, task: Coroutine[Any, Any, None]) -> None:
        """Keep the error that ends a life, for the driver to raise."""
        try:
            await task
        except Exception as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]  # type: ignore[assignment]
            self._error = self._error or error
            self.notify()

    async def _supervise(self, worker: RayWorker, make: Make, jobs: Sequence[WorkerJob]) -> None:
        """Start, work until the actor is lost, start again."""
        while True:
            await self._start(worker, make)
            if not worker.ready:
                continue
            self.notify()
            try:
                async with asyncio.TaskGroup() as group:
                    for job in (worker.until_lost(), *map(_again, jobs)):
                        group.create_task(job)
            except* ActorLostError:
                self.notify()

    async def _start(self, worker: RayWorker, make: Make) -> None:
        """Make an actor. The first one must start; a replacement that cannot be made is tried
        again.
        """
        first = not worker.restarts
        try:
            await make(worker)
        except ActorLostError as lost:
            if first:
                raise WorkersLostError(
                    f"{worker.name} could not start: {first_line(lost.args[0])}"
                ) from lost.args[0]
        except Exception as error:
            if first or error is self._error:
                raise
            worker.lose(error)

    async def _watch(self, workers: Sequence[RayWorker]) -> None:
        """End the run when all actors of a kind have been gone for too long."""
        while True:
            await asyncio.sleep(_TICK_S)
            if any(worker.ready or not worker.restarts for worker in workers):
                continue
            dead_for = time.monotonic() - max(worker.alive_at for worker in workers)
            if dead_for > self._recovery_timeout_s:
                last = next(worker.error for worker in workers if worker.error is not None)
                raise WorkersLostError(
                    f"all of {', '.join(worker.name for worker in workers)} have been dead for "
                    f"{dead_for:.0f} s, more than the {self._recovery_timeout_s:g} s of "
                    "ray.recovery_timeout_s, and could not be replaced. The last error was: "
                    f"{first_line(last)}"
                ) from last


async def _again(one: WorkerJob) -> None:
    while True:
        await one()

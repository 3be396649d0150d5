"""``ThreadDriver``: runs the coroutines of ``Rollouts`` in an event loop in a separate thread.

The caller waits in ``run``, with a time limit. Everything else runs in the event loop, where other
coroutines run only at an ``await``. So no lock is needed, and a condition that ``until`` waits for
still holds when it returns.
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
    """Driver of actors. It starts each actor, runs its jobs, and restarts it when it is lost.

    Every method but ``close`` raises the error that has ended the run:

    - ``WorkersLostError``: all actors of a kind have been dead for too long;
    - ``WaitedTooLongError``: there is no result, and no sign of life from any actor;
    - an exception from an actor's method.

    Attributes:
        overlaps: whether jobs also run between two calls of ``run``.

    Keyword Args:
        actor_timeout_s: time limit of an actor's method, in seconds; a late actor is replaced.
        recovery_timeout_s: how long all actors of a kind may be dead before the run ends.
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
        """Begin to start all actors, without waiting for them.

        Args:
            make: makes the part of a worker.
            kinds: workers of each kind, with the jobs that each repeats.
            missing: describes what the run waits for.
        """
        self._missing = missing
        self.run(self._begin(make, kinds))

    async def _begin(self, make: Make, kinds: Sequence[Any]) -> None:
        self._workers = [worker for work in kinds for worker in work]
        # Workers that a task visits last start first: samplers may wait for reference models.
        actor_tasks = [
            self._supervise(worker, make, jobs)
            for work in reversed(kinds)
            for worker, jobs in work.items()
        ]
        actor_tasks += [self._watch(list(work)) for work in kinds if work]
        self._actor_tasks = [asyncio.create_task(self._guard(task)) for task in actor_tasks]

    def run(self, coro: Coroutine[Any, Any, T], progress_note: str = "") -> T:
        """Return the result of a coroutine, as long as some actor shows signs of life.

        An actor that is late and then replaced is silent for twice its time limit, so only a longer
        silence ends the wait.

        Args:
            coro: coroutine that waits with ``until``.
            progress_note: names work that may take longer than ``train.stall_timeout_s``. It is
                repeated as a sign of progress, so that the time limit of a call applies instead.
        """
        if self._closed or self._error is not None:
            coro.close()
            raise self._error or RuntimeError("the rollouts are closed: make new ones.")
        start = time.monotonic()
        longest_s = 2 * self.actor_timeout_s
        future = asyncio.run_coroutine_threadsafe(coro, self._loop)
        try:
            while True:
                try:
                    return future.result(_TICK_S)
                except TimeoutError:
                    if future.done():
                        raise
                if progress_note:
                    stalls.note(progress_note)
                heard_at = max([start, *(worker.heard_at for worker in self._workers)])
                if time.monotonic() - heard_at > longest_s:
                    raise WaitedTooLongError(
                        f"heard nothing from any actor for {longest_s:g} s, twice "
                        f"ray.actor_timeout_s: {self._missing()}."
                    )
        finally:
            future.cancel()

    async def until(self, get: Callable[[], T | None]) -> T:
        """Wait until ``get`` returns a true value. It is called again after each ``notify``.

        Raises:
            Exception: the error that has permanently ended an actor's work.
        """
        while True:
            if self._error is not None:
                raise self._error
            value = get()
            if value:
                return value
            await self._changed.wait()

    def notify(self) -> None:
        """Wake the coroutines that wait for a change of state."""
        self._changed.set()
        self._changed.clear()

    def close(self, closing: Sequence[Any]) -> None:
        """Close the actors that have something to finish, and stop all. May be called again."""
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
        """Await a task, and store any error that ends it, for ``run`` to raise."""
        try:
            await task
        except Exception as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]  # type: ignore[assignment]
            self._error = self._error or error
            self.notify()

    async def _supervise(self, worker: RayWorker, make: Make, jobs: Sequence[WorkerJob]) -> None:
        """Start an actor, run its jobs until it is lost, and repeat."""
        while True:
            await self._start(worker, make)
            if not worker.ready:
                continue
            self.notify()
            try:
                async with asyncio.TaskGroup() as group:
                    for job in (worker.until_lost(), *map(_repeat, jobs)):
                        group.create_task(job)
            except* ActorLostError:
                self.notify()

    async def _start(self, worker: RayWorker, make: Make) -> None:
        """Start an actor. The first start must succeed; starting a replacement is retried."""
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
        """End the run when all actors of a kind have been dead for too long."""
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


async def _repeat(job: WorkerJob) -> None:
    while True:
        await job()

"""``InThread``: runs the coroutines of ``Rollouts`` in an event loop in its own thread, also between questions.

Each question waits for its answer with a bound. All else runs in that loop, and a state changes between two ``await``
only: so no lock is needed, what ``until`` waits for holds when it returns, and the caller's thread never touches it.
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
from torchrl_grpo.runtime.in_turn import Make, Round, Work
from torchrl_grpo.runtime.places import ActorLostError, OnRay, first_line

_TICK_S = 0.5
_CLOSING_S = 10.0

T = TypeVar("T")


class InThread:
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

    def __init__(self, *, actor_timeout_s: float = 1800.0, recovery_timeout_s: float = 900.0) -> None:
        self.actor_timeout_s = actor_timeout_s
        self._recovery_timeout_s = recovery_timeout_s
        self._places: list[OnRay] = []
        self._missing: Callable[[], str] = str
        self._lives: list[asyncio.Task[None]] = []
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
            kinds: the places of each kind, with the rounds of work that are made there again and again.
            missing: says what is waited for, in words.
        """
        self._missing = missing
        self.ask(self._begin(make, kinds))

    async def _begin(self, make: Make, kinds: Sequence[Any]) -> None:
        self._places = [place for work in kinds for place in work]
        # Who comes last in a task's way begins first: samplers may wait for reference models.
        lives = [self._live(place, make, rounds) for work in reversed(kinds) for place, rounds in work.items()]
        lives += [self._watch(list(work)) for work in kinds if work]
        self._lives = [asyncio.create_task(self._guard(life)) for life in lives]

    def ask(self, question: Coroutine[Any, Any, T], noted: str = "") -> T:
        """Return the answer to a question; it must come while some actor shows signs of life.

        An actor that is late and then replaced is silent for twice its time-out: only a longer silence ends the wait.

        Args:
            question: waits with ``until``.
            noted: what takes long, in words; the limit of a call, and not of a stage, ends it.
        """
        if self._closed or self._error is not None:
            question.close()
            raise self._error or RuntimeError("the rollouts are closed: make new ones.")
        start, longest_s = time.monotonic(), 2 * self.actor_timeout_s
        answer = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            while True:
                try:
                    return answer.result(_TICK_S)
                except TimeoutError:
                    if answer.done():
                        raise
                if noted:
                    stalls.note(noted)
                if time.monotonic() - max([start, *(place.heard_at for place in self._places)]) > longest_s:
                    raise WaitedTooLongError(
                        f"heard nothing from any actor for {longest_s:g} s, twice ray.actor_timeout_s: "
                        f"{self._missing()}."
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
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        with suppress(TimeoutError):
            ending = asyncio.gather(*(place.close() for place in closing), return_exceptions=True)
            await asyncio.wait_for(ending, _CLOSING_S)
        for place in self._places:
            place.kill()

    async def _guard(self, life: Coroutine[Any, Any, None]) -> None:
        """Keep the error that ends a life, for the driver to raise."""
        try:
            await life
        except Exception as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]  # type: ignore[assignment]
            self._error = self._error or error
            self.notify()

    async def _live(self, place: OnRay, make: Make, rounds: Sequence[Round]) -> None:
        """Start, work until the actor is lost, start again."""
        while True:
            await self._start(place, make)
            if not place.ready:
                continue
            self.notify()
            try:
                async with asyncio.TaskGroup() as group:
                    for job in (place.until_lost(), *map(_again, rounds)):
                        group.create_task(job)
            except* ActorLostError:
                self.notify()

    async def _start(self, place: OnRay, make: Make) -> None:
        """Make an actor. The first one must start; a replacement that cannot be made is tried again."""
        first = not place.restarts
        try:
            await make(place)
        except ActorLostError as lost:
            if first:
                raise WorkersLostError(f"{place.name} could not start: {first_line(lost.args[0])}") from lost.args[0]
        except Exception as error:
            if first or error is self._error:
                raise
            place.lose(error)

    async def _watch(self, places: Sequence[OnRay]) -> None:
        """End the run when all actors of a kind have been gone for too long."""
        while True:
            await asyncio.sleep(_TICK_S)
            if any(place.ready or not place.restarts for place in places):
                continue
            dead_for = time.monotonic() - max(place.alive_at for place in places)
            if dead_for > self._recovery_timeout_s:
                last = next(place.error for place in places if place.error is not None)
                raise WorkersLostError(
                    f"all of {', '.join(place.name for place in places)} have been dead for {dead_for:.0f} s, more "
                    f"than the {self._recovery_timeout_s:g} s of ray.recovery_timeout_s, and could not be replaced. "
                    f"The last error was: {first_line(last)}"
                ) from last


async def _again(one: Round) -> None:
    while True:
        await one()

"""``RolloutManager``: the samplers and reference models of a run as actors, and the tasks between them.

A ``RolloutTask`` is played by a sampler and scored by a reference model; then its groups wait in the ``GroupBuffer``.
Each actor has a life, a coroutine: start, work, be lost, start again. While it lives, a few coroutines work with it:
one gives it new weights, the others take a task, ask the actor for it, and hand on what it gives. A coroutine that
loses its actor puts its task back. All of them run in one event loop, and a state changes between two ``await`` only:
so no lock is needed, and what ``_until`` waits for holds when it returns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from torchrl_grpo.checks import InFlight
from torchrl_grpo.collectors.sampler import Sampler
from torchrl_grpo.errors import TransferRefusedError, WorkersLostError
from torchrl_grpo.runtime.actors import make_seeded
from torchrl_grpo.runtime.reference import Reference
from torchrl_grpo.runtime.tasks import Progress, TaskQueue
from torchrl_grpo.runtime.workers import ActorLostError, ReferenceWorker, SamplerWorker, Worker, first_line

MOST_ATTEMPTS = 3
"""After so many actors were lost over the same thing, another one is not tried."""
_SCORED_AT_A_TIME = 2  # by one reference actor: one task is computed, one is on its way there
_TICK_S = 0.5

T = TypeVar("T")
Job = Coroutine[Any, Any, None]


class RolloutManager:
    """Actors and their tasks.

    Lifecycle: ``start`` in the event loop that all else is called in, ``publish`` and ``next_groups`` in turns, and
    ``close``. The first ``publish`` starts the sampling.

    Attributes:
        tasks: what is to be played, is being played, and waits for a batch.
        published: the latest version, None before the first.
        heard_at: when an actor last did something (``time.monotonic``).

    Args:
        tasks: what is to be played; the samplers have environments of as many groups as a task.

    Keyword Args:
        samplers: for each sampler, its factory and Ray's options for the actor.
        references: the same for each reference model.
        concurrent_tasks: tasks that one sampler plays at a time.
        in_flight: what happens to tasks that are being played when weights arrive; see ``AsyncVLLMEngine``.
        references_first: whether samplers start only while the reference models are there: for those that share an
            accelerator, whose free memory an engine measures while it starts.
        seed: of the engines' draws; each sampler has another one.
        release: called with each published version that no sampler reads or will read any more.
        resend: gives another handle of a version, because a sampler refused the first one for this reason.
        together: whether all samplers must take a version at the same time.
        actor_timeout_s: seconds in which an actor must do what it is asked, or be replaced.
        recovery_timeout_s: how long all samplers, or all reference models, may be gone before the run ends.
    """

    def __init__(
        self,
        tasks: TaskQueue,
        *,
        samplers: Sequence[tuple[Callable[[], Sampler], Mapping[str, Any]]],
        references: Sequence[tuple[Callable[[], Reference], Mapping[str, Any]]] = (),
        concurrent_tasks: int = 1,
        in_flight: InFlight = "wait",
        references_first: bool = False,
        seed: int = 0,
        release: Callable[[int], None] = lambda version: None,
        resend: Callable[[int, str], Any] | None = None,
        together: bool = False,
        actor_timeout_s: float = 1800.0,
        recovery_timeout_s: float = 900.0,
    ) -> None:
        self.tasks = tasks
        self._concurrent_tasks = concurrent_tasks
        self._in_flight = in_flight
        self._references_first = references_first
        self._release = release
        self._resend = resend
        self._together = together
        self._recovery_timeout_s = recovery_timeout_s
        self.actor_timeout_s = actor_timeout_s
        self.published: int | None = None
        self.heard_at = time.monotonic()
        # Beside the tasks, an update and an evaluation, where the engine can take several calls at a time.
        threads = concurrent_tasks + 2 if concurrent_tasks > 1 or in_flight != "wait" else 1
        self.samplers = [
            SamplerWorker(
                f"sampler {index}",
                partial(make_seeded, factory, seed + index),
                {**options, "max_concurrency": threads},
                actor_timeout_s,
            )
            for index, (factory, options) in enumerate(samplers)
        ]
        self.references = [
            ReferenceWorker(f"reference model {index}", factory, options, actor_timeout_s)
            for index, (factory, options) in enumerate(references)
        ]
        self.workers: list[Worker] = [*self.samplers, *self.references]
        self._handles: dict[int, Any] = {}  # the published one, and older ones that samplers still read
        self._reference_weights: Any = None
        self._update_s = 0.0
        self._error: BaseException | None = None
        self._lives: list[asyncio.Task[None]] = []
        self._changed: asyncio.Future[None]

    async def start(self) -> None:
        """Begins the lives of all actors; returns at once."""
        self._changed = asyncio.get_running_loop().create_future()
        scoring = [self._keep_reference_current, *[self._score] * _SCORED_AT_A_TIME]
        playing = [self._keep_current, *[self._play] * self._concurrent_tasks]
        lives: list[Job] = [self._live(worker, scoring) for worker in self.references]
        lives += [self._live(worker, playing) for worker in self.samplers]
        lives += [self._watch(kind) for kind in (self.samplers, self.references) if kind]
        self._lives = [asyncio.create_task(self._guard(life)) for life in lives]

    async def wait_until_ready(self) -> None:
        """Waits until the parts of all actors are made."""
        await self._until(lambda: all(worker.ready for worker in self.workers))

    async def publish(self, handle: Any, version: int) -> None:
        """Takes the weights of a trained batch, a reference to a ``WeightHandle``, for each sampler when it can."""
        if version == self.published:  # the weights are sent once more, in another way
            for sampler in self.samplers:
                sampler.version = None
        self._handles[version], self.published = handle, version
        self.tasks.buffer.publish(version)
        self._release_old()
        self._notify()
        self._raise_error()

    async def update_reference(self, handle: Any) -> None:
        """Replaces the weights of the reference models, for all that they score from now on."""
        self._reference_weights = handle
        self._notify()

    async def next_groups(self) -> tuple[list[tuple[int, Any]], dict[str, float]]:
        """The next batch as (group, reference to its data), and what is known of it and of the actors."""
        groups, metrics = await self._until(self.tasks.take)
        self._notify()
        metrics["workers/update_s"] = self._update_s
        metrics["workers/restarts_rollout"] = sum(worker.restarts for worker in self.samplers)
        metrics["workers/restarts_reference"] = sum(worker.restarts for worker in self.references)
        metrics |= {f"workers/responses_rollout_{i}": worker.responses for i, worker in enumerate(self.samplers)}
        return groups, metrics

    async def ask_any(self, what: str, method: str, *arguments: Any) -> Any:
        """The answer of a sampler that has the published weights; of another one if it is lost.

        Raises:
            WorkersLostError: sampler after sampler was lost over it.
        """
        for _ in range(MOST_ATTEMPTS):
            sampler = await self._until(lambda: next(filter(self._is_current, self.samplers), None))
            try:
                return await sampler.ask(what, method, *arguments)
            except ActorLostError:
                continue
        raise WorkersLostError(f"{MOST_ATTEMPTS} samplers were lost while they were to {what}.")

    async def ask_each(self, what: str, method: str) -> list[Any]:
        """The answers of the samplers that are there, each with the published weights; at least one."""
        answers = []
        for sampler in [sampler for sampler in self.samplers if sampler.ready]:
            restarts = sampler.restarts

            def settled(sampler: SamplerWorker = sampler, restarts: int = restarts) -> bool:
                return self._is_current(sampler) or sampler.restarts > restarts

            await self._until(settled)
            with suppress(ActorLostError):
                if sampler.restarts == restarts:
                    answers.append(await sampler.ask(what, method))
        return answers or [await self.ask_any(what, method)]

    async def state_dict(self) -> dict[str, Any]:
        """Where the problems are, which tasks no batch has taken whole, and the engines' states."""
        return self.tasks.state_dict() | {"engines": [sampler.engine_state for sampler in self.samplers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave; before ``start``."""
        self.tasks.load_state_dict(state)
        for sampler, engine_state in zip(self.samplers, state["engines"], strict=False):
            sampler.engine_state = engine_state

    def what_is_missing(self) -> str:
        """Where the actors and the groups of the next batch are, in words."""
        playing = [f"{s.name} {'has' if s.ready else 'is starting, with'} {len(s.tasks)}" for s in self.samplers]
        scoring = sum(len(worker.tasks) for worker in self.references) + len(self.tasks.unscored)
        lost = [f"; {w.name} was last lost with: {first_line(w.error)}" for w in self.workers if w.error is not None]
        return (
            f"{self.tasks.buffer.waiting} of the {self.tasks.buffer.groups_per_batch} groups of a batch wait, "
            f"{', '.join(playing)} tasks, {scoring} tasks are being scored{''.join(lost)}"
        )

    async def close(self) -> None:
        """Ends all actors. May be called again."""
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        closing = [asyncio.wrap_future(s.actor.call.remote("close").future()) for s in self.samplers if s.ready]
        if closing:
            await asyncio.wait(closing, timeout=10)
        for worker in self.workers:
            worker.kill()

    async def _guard(self, life: Job) -> None:
        """Keeps what ends a life, for the driver to raise."""
        try:
            await life
        except Exception as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]  # type: ignore[assignment]
            self._error = self._error or error
            self._notify()

    async def _live(self, worker: Any, jobs: Sequence[Callable[[Any], Job]]) -> None:
        """Start, work until the actor is lost, start again."""
        while True:
            if self._references_first and worker in self.samplers:
                await self._until(lambda: all(reference.ready for reference in self.references))
            await self._start(worker)
            if not worker.ready:
                continue
            self._heard()
            try:
                async with asyncio.TaskGroup() as group:
                    for job in (worker.until_lost(), *(work(worker) for work in jobs)):
                        group.create_task(job)
            except* ActorLostError:
                self._notify()

    async def _start(self, worker: Any) -> None:
        """Makes an actor; one that cannot be made again is tried once more, the first one must start."""
        first = not worker.restarts
        try:
            if worker in self.samplers:
                worker.version = worker.updating = None
                await worker.start(worker.engine_state)
            else:
                worker.weights = None
                await worker.start()
        except ActorLostError as lost:
            if first:
                raise WorkersLostError(f"{worker.name} could not start: {first_line(lost.args[0])}") from lost.args[0]
        except Exception as error:
            if first:
                raise
            worker.lose(error)

    async def _watch(self, workers: Sequence[Worker]) -> None:
        """Ends the run when all actors of a kind have been gone for too long."""
        while True:
            await asyncio.sleep(_TICK_S)
            if any(worker.ready or not worker.restarts for worker in workers):
                continue
            dead_for = time.monotonic() - max(worker.alive_at for worker in workers)
            if dead_for > self._recovery_timeout_s:
                last = next(worker.error for worker in workers if worker.error is not None)
                raise WorkersLostError(
                    f"all of {', '.join(worker.name for worker in workers)} have been dead for {dead_for:.0f} s, more "
                    f"than the {self._recovery_timeout_s:g} s of ray.recovery_timeout_s, and could not be replaced. "
                    f"The last error was: {first_line(last)}"
                ) from last

    # What is done with an actor while it lives

    async def _keep_current(self, sampler: SamplerWorker) -> None:
        """Gives a sampler the published weights, again and again."""

        while True:
            await self._until(lambda: self._next_version(sampler) is not None)
            sampler.updating = version = self._next_version(sampler)
            assert version is not None
            what = f"load the weights of version {version}"
            handle = self._handles[version]
            try:
                self._update_s = await sampler.ask(what, "update", handle, version)
            except TransferRefusedError as refusal:
                if self._resend is None:
                    raise
                if self._handles[version] is handle:  # or another sampler was faster
                    self._handles[version] = self._resend(version, str(refusal))
                self._together, sampler.updating = False, None
            else:
                sampler.version, sampler.updating = version, None
            self._release_old()
            self._heard()

    def _next_version(self, sampler: SamplerWorker) -> int | None:
        """The version that a sampler takes now, None while there is none."""

        def may_update(one: SamplerWorker) -> bool:
            return self._in_flight != "wait" or not one.tasks

        if not self._together or sampler.restarts:
            return self.published if may_update(sampler) and sampler.version != self.published else None
        begun = next((other.updating for other in self.samplers if other.updating is not None), None)
        if begun is not None:
            return begun if sampler.version != begun else None
        ready = all(other.ready and may_update(other) for other in self.samplers)
        return self.published if ready and sampler.version != self.published else None

    async def _play(self, sampler: SamplerWorker) -> None:
        """Takes a task, has the sampler play it, and hands on what it gives."""

        def next_task() -> Progress | None:
            current = [other for other in self.samplers if self._is_current(other)]
            return self.tasks.next_unplayed() if _is_next(sampler, current, self._concurrent_tasks) else None

        while True:
            progress = await self._until(next_task)
            with self._at(sampler, progress, self.tasks.give_back):
                what = f"sample {progress.task}"
                report, groups = await sampler.ask(what, "play", progress.task, groups=len(progress.task.groups))
            sampler.engine_state = report.engine
            sampler.responses += self.tasks.played(progress, report, groups)
            if progress.kept and self.references:
                self.tasks.unscored.append(progress)
            else:
                self.tasks.finish(progress)
            self._notify()

    async def _score(self, reference: ReferenceWorker) -> None:
        """Takes a task that was played, has the reference model score it, and hands on what it gives."""

        def next_task() -> Progress | None:
            current = [r for r in self.references if r.ready and r.weights is self._reference_weights]
            mine = self.tasks.unscored and _is_next(reference, current, _SCORED_AT_A_TIME)
            return self.tasks.unscored.pop(0) if mine else None

        while True:
            progress = await self._until(next_task)
            with self._at(reference, progress, self.tasks.unscored.append):
                what = f"score {progress.task}"
                progress.reference_s, progress.refs = await reference.ask(
                    what, "score", *progress.refs, groups=len(progress.refs)
                )
            self.tasks.finish(progress)
            self._notify()

    async def _keep_reference_current(self, reference: ReferenceWorker) -> None:
        """Gives a reference model the weights that are to be its own."""
        while True:
            await self._until(lambda: reference.weights is not self._reference_weights)
            weights = self._reference_weights
            await reference.ask("load weights", "update", weights)
            reference.weights = weights
            self._heard()

    @contextmanager
    def _at(self, worker: Worker, progress: Progress, put_back: Callable[[Progress], None]) -> Iterator[None]:
        """While an actor has a task: if the actor is lost, the task is put back, unless it was the end of too many."""
        progress.attempts += 1
        worker.tasks.append(progress)
        self._notify()  # who has the fewest tasks may be another one now
        try:
            yield
        except (ActorLostError, asyncio.CancelledError):
            put_back(progress)
            if progress.attempts == MOST_ATTEMPTS and worker.error is not None:
                raise WorkersLostError(
                    f"{progress.task} ended {worker.name} or others like it {MOST_ATTEMPTS} times, the last time with: "
                    f"{first_line(worker.error)}"
                ) from worker.error
            raise
        finally:
            worker.tasks.remove(progress)
        worker.did()
        self._heard()

    def _is_current(self, sampler: SamplerWorker) -> bool:
        """Whether a sampler is there and has the published weights."""
        there = sampler.ready and sampler.updating is None and sampler.version is not None
        return there and sampler.version == self.published

    def _release_old(self) -> None:
        """Gives back the weights that nobody reads and nobody will be given."""
        used = {self.published, *(sampler.updating for sampler in self.samplers if sampler.ready)}
        for version in self._handles.keys() - used:
            del self._handles[version]
            self._release(version)

    async def _until(self, get: Callable[[], T | None]) -> T:
        """Waits until ``get`` gives something that is true; it is called again after each change of the state.

        Raises:
            Exception: what has ended one of the lives.
        """
        while True:
            self._raise_error()
            value = get()
            if value:
                return value
            await asyncio.wait({self._changed})

    def _notify(self) -> None:
        """Wakes those who wait for a change of the state."""
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    def _heard(self) -> None:
        self.heard_at = time.monotonic()
        self._notify()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _is_next(worker: Worker, workers: Sequence[Worker], most: int) -> bool:
    """Whether a worker is the first of those with the fewest tasks, and has room for one more."""
    return bool(workers) and min(workers, key=lambda other: len(other.tasks)) is worker and len(worker.tasks) < most

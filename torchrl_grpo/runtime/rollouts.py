"""``Rollouts``: the samplers and reference models of a run, and the tasks between them.

A ``RolloutTask`` is played by a sampler and scored by a reference model and a teacher, where there
are such; then its groups wait in the ``GroupBuffer``. The parts live in places, in this thread or
as actors, and are called the same way in both. The work is done in rounds, small coroutines: one
gives a part new weights, the others take a task, have the part do it, and hand on what it gives.
Who loses its part puts its task back. A driver says when a round goes on: ``InlineDriver`` while
the loop waits, and ``ThreadDriver`` all the time, at several places at once.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torchrl_grpo.checks import InFlight
from torchrl_grpo.errors import TransferRefusedError, WorkersLostError
from torchrl_grpo.runtime.inline_driver import InlineDriver
from torchrl_grpo.runtime.tasks import Progress, TaskQueue
from torchrl_grpo.runtime.thread_driver import ThreadDriver
from torchrl_grpo.runtime.workers import ActorLostError, Worker, first_line

MOST_ATTEMPTS = 3
"""Number of actors that may be lost over the same work before the run ends."""
_SCORED_AT_A_TIME = 2  # by one reference actor: one task is computed, one is on its way there
_SECONDS = {f"workers/{name}": f"time/{name}" for name in ("generate_s", "reward_s", "reference_s")}
"""Metrics of workers that count toward the step's time if nothing overlaps."""


class Rollouts:
    """Delivers batches of finished, scored groups, and takes new weights.

    ``learner_version - policy_version`` of a sequence in a batch never exceeds the bound of the
    tasks' ``GroupBuffer``.

    Lifecycle: ``start``, with actors ``wait_until_ready``, then ``publish`` and ``next_batch`` in
        turns, then
    ``close``, once or more. Nothing is sampled before the first ``publish``. Every method but
    ``close`` raises what a part raised, and with actors what ``ThreadDriver`` says, and
    ``WorkersLostError`` when a task ended every actor that played it.

    Attributes:
        tasks: what is to be played, is being played, and waits for a batch.
        samplers: places of the samplers.
        references: places of the reference models.
        teachers: places of the teachers.
        published: the latest version, None before the first.

    Args:
        tasks: what is to be played; the samplers have environments of as many groups as a task.
        driver: of the places: ``InlineDriver`` if they are ``LocalWorker``, ``ThreadDriver`` if
            they are ``RayWorker``.

    Keyword Args:
        samplers: places that make a sampler of an engine's state, which is None at first
            (``make_seeded``).
        references: places of reference models; none where that is not needed, or the learner
            scores.
        teachers: places of teachers, which score what the reference models have scored; each is a
            ``Reference`` too.
        concurrent_tasks: tasks that one sampler plays at a time.
        in_flight: what happens to tasks that are being played when weights arrive; see
            ``AsyncVLLMEngine``.
        references_first: whether samplers start only while the reference models are there: for
            those that share an accelerator, whose free memory an engine measures while it starts.
        release: called with each published version that no sampler reads or will read any more.
        resend: gives another handle of a version, because a sampler refused the first one for this
            reason.
        together: whether all samplers must take a version at the same time.
        turns: whether the samplers sleep while a batch is trained, from the end of ``next_batch``
            to ``publish``: then no sampler is started or given weights either.
        evaluates: whether the samplers have a test split.
    """

    def __init__(
        self,
        tasks: TaskQueue,
        driver: InlineDriver | ThreadDriver,
        *,
        samplers: Sequence[Worker],
        references: Sequence[Worker] = (),
        teachers: Sequence[Worker] = (),
        concurrent_tasks: int = 1,
        in_flight: InFlight = "wait",
        references_first: bool = False,
        release: Callable[[int], None] = lambda version: None,
        resend: Callable[[int, str], Any] | None = None,
        together: bool = False,
        turns: bool = False,
        evaluates: bool = True,
    ) -> None:
        self.tasks = tasks
        self.samplers = samplers
        self.references = references
        self.teachers = teachers
        self.published: int | None = None
        self._driver = driver
        self._concurrent_tasks = concurrent_tasks
        self._in_flight = in_flight
        self._references_first = references_first
        self._release = release
        self._resend = resend
        self._together = together
        self._turns = turns
        self._evaluates = evaluates
        self._trains = False  # it is the learner's turn
        self._starting = 0  # samplers that are being made
        self._handles: dict[
            int, Any
        ] = {}  # the published one, and older ones that samplers still read
        self._reference_weights: Any = None
        self._update_s = 0.0
        self._metrics: dict[str, float] = {}

    # What the loop asks for

    def start(self) -> None:
        """Make the parts; with actors, return at once."""
        of_samplers = [self._keep_current, *[self._play] * self._concurrent_tasks]
        of_references = [self._keep_reference_current, *[self._score] * _SCORED_AT_A_TIME]
        playing = {
            worker: [partial(work, worker) for work in of_samplers] for worker in self.samplers
        }
        scoring, teaching = (
            {worker: [partial(work, worker) for work in of_references] for worker in workers}
            for workers in (self.references, self.teachers)
        )
        self._driver.start(self._make, (playing, scoring, teaching), self.what_is_missing)

    def wait_until_ready(self) -> None:
        """Wait until all parts are made."""
        self._driver.run(self._driver.until(lambda: all(worker.ready for worker in self._workers)))

    def next_batch(self) -> list[Any]:
        """Return the groups of the next batch, when it is there: lazy stacks of sequences, or
        references to them.

        Raises:
            RuntimeError: a sequence was sampled by weights that are older than those that it was
                begun with.
        """
        groups, self._metrics = self._driver.run(self._next_groups())
        return [group for _, group in groups]

    def publish(self, handle: Any, version: int) -> None:
        """Publish the weights of a trained batch. With actors, return at once: each sampler takes
        them when it can.

        Args:
            handle: a ``WeightHandle``, or a reference to one.
            version: of the weights.
        """
        self._driver.run(self._publish(handle, version))

    def update_reference(self, handle: Any) -> None:
        """Replace the reference model's weights for everything that is scored from here on; see
        ``publish``.
        """
        self._driver.run(self._update_reference(handle))

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return what ``Evaluator.evaluate`` gives for the published weights; nothing without a
        test split.
        """
        if not self._evaluates:
            return {}, []
        what = "evaluate the test split"
        return self._driver.run(self._ask_any(what, "evaluate", sampled), what)

    def probes(self) -> list[Any]:
        """Return what ``Sampler.probe`` gives for each sampler, with the published weights.

        A sampler that is being made again is left out, unless there is no other.
        """
        return self._driver.run(self._ask_each("sample a probe", "probe"))

    def metrics(self) -> dict[str, float]:
        """Return metrics of the latest batch, named ``section/name``: seconds, staleness, counts."""
        return dict(self._metrics)

    def spans(self) -> list[dict[str, Any]]:
        """Return what the parts did since the last call, as spans of ``timeline.jsonl``
        (``RolloutReport.spans``).
        """
        return [
            worker.spans.popleft() for worker in self._workers for _ in range(len(worker.spans))
        ]

    def pids(self) -> dict[str, int]:
        """Return the process of each part that is made, by its name."""
        return {worker.name: worker.pid for worker in self._workers if worker.ready}

    def state_dict(self) -> dict[str, Any]:
        """Return what the next batches depend on, apart from the weights.

        ``drawing`` (where the problems are), ``ahead`` (group and problem of what was drawn and no
        batch has taken: it is played again after a restore) and ``engines`` (the state of each,
        None where it cannot be told).
        """
        return self._driver.run(self._state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave; before ``start``."""
        self.tasks.load_state_dict(state)
        for sampler, engine_state in zip(self.samplers, state["engines"], strict=False):
            sampler.engine_state = engine_state or None

    def what_is_missing(self) -> str:
        """Describe the state of the parts and of the next batch's groups."""
        playing = [
            f"{s.name} {'has' if s.ready else 'is starting, with'} {len(s.tasks)}"
            for s in self.samplers
        ]
        scorers = [*self.references, *self.teachers]
        scoring = sum(len(worker.tasks) for worker in scorers) + len(self.tasks.unscored)
        lost = [
            f"; {p.name} was last lost with: {first_line(p.error)}"
            for p in self._workers
            if p.error is not None
        ]
        return (
            f"{self.tasks.buffer.waiting} of the {self.tasks.buffer.groups_per_batch} groups of a "
            f"batch wait, {', '.join(playing)} tasks, {scoring} tasks are being "
            f"scored{''.join(lost)}"
        )

    def close(self) -> None:
        """End the parts. May be called again."""
        self._driver.close(self.samplers)

    # The answers

    async def _publish(self, handle: Any, version: int) -> None:
        if version == self.published:  # the weights are sent once more, in another way
            for sampler in self.samplers:
                sampler.version = None
        self._handles[version], self.published = handle, version
        self._trains = False
        self.tasks.buffer.publish(version)
        self._release_old()
        self._driver.notify()
        if not self._driver.overlaps:
            await self._driver.until(lambda: all(map(self._is_current, self.samplers)))

    async def _update_reference(self, handle: Any) -> None:
        self._reference_weights = handle
        self._driver.notify()
        if not self._driver.overlaps:
            await self._driver.until(
                lambda: all(worker.weights is handle for worker in self.references)
            )

    async def _next_groups(self) -> tuple[list[tuple[int, Any]], dict[str, float]]:
        """Return the next batch as (group, its data), and metrics of it and of the parts."""
        groups, metrics = await self._driver.until(self.tasks.take)
        if self._turns:
            await self._end_turn()
        self._driver.notify()
        if (
            not self._driver.overlaps
        ):  # what waits and who was replaced is nothing that could differ
            del metrics["workers/groups_resampled"]
            known = {
                name: value for name, value in metrics.items() if not name.startswith("buffer/")
            }
            return groups, {_SECONDS.get(name, name): value for name, value in known.items()}
        metrics["workers/update_s"] = self._update_s
        metrics["workers/restarts_rollout"] = sum(worker.restarts for worker in self.samplers)
        metrics["workers/restarts_reference"] = sum(
            worker.restarts for worker in [*self.references, *self.teachers]
        )
        metrics |= {
            f"workers/responses_rollout_{i}": worker.responses
            for i, worker in enumerate(self.samplers)
        }
        return groups, metrics

    async def _end_turn(self) -> None:
        """Have all samplers release their devices to the learner."""
        self._trains = True

        def settled() -> bool:
            return not self._starting and all(
                worker.updating is None for worker in self.samplers if worker.ready
            )

        await self._driver.until(settled)
        for sampler in self.samplers:
            with suppress(ActorLostError):
                if sampler.ready:
                    await sampler.call("sleep", "sleep")

    async def _ask_any(self, what: str, method: str, *arguments: Any) -> Any:
        """Return the answer of a sampler with the published weights; of another one if it is lost.

        Raises:
            WorkersLostError: sampler after sampler was lost over it.
        """
        for _ in range(MOST_ATTEMPTS):
            sampler = await self._driver.until(
                lambda: next(filter(self._is_current, self.samplers), None)
            )
            with suppress(ActorLostError):
                return await sampler.call(what, method, *arguments)
        raise WorkersLostError(f"{MOST_ATTEMPTS} samplers were lost while they were to {what}.")

    async def _ask_each(self, what: str, method: str) -> list[Any]:
        """Return the answers of all available samplers, at least one, each with the published
        weights.
        """
        answers = []
        for sampler in [sampler for sampler in self.samplers if sampler.ready]:
            restarts = sampler.restarts

            def settled(sampler: Worker = sampler, restarts: int = restarts) -> bool:
                return self._is_current(sampler) or sampler.restarts > restarts

            await self._driver.until(settled)
            with suppress(ActorLostError):
                if sampler.restarts == restarts:
                    answers.append(await sampler.call(what, method))
        return answers or [await self._ask_any(what, method)]

    async def _state(self) -> dict[str, Any]:
        return self.tasks.state_dict() | {
            "engines": [sampler.engine_state for sampler in self.samplers]
        }

    # What is done at a place

    async def _make(self, worker: Worker) -> None:
        """Make the part of a place, which then has its initial weights."""
        if worker not in self.samplers:
            worker.weights = None
            await worker.start()
            return
        if self._references_first:
            await self._driver.until(
                lambda: all(worker.ready for worker in [*self.references, *self.teachers])
            )
        await self._driver.until(lambda: not self._trains)
        worker.version = worker.updating = None
        self._starting += 1
        try:
            await worker.start(worker.engine_state)
        finally:
            self._starting -= 1
            self._driver.notify()

    async def _keep_current(self, sampler: Worker) -> None:
        """Give a sampler the published weights."""
        await self._driver.until(lambda: self._next_version(sampler) is not None)
        sampler.updating = version = self._next_version(sampler)
        assert version is not None
        handle = self._handles[version]
        try:
            self._update_s = await sampler.call(
                f"load the weights of version {version}", "update", handle, version
            )
        except TransferRefusedError as refusal:
            if self._resend is None:
                raise
            if self._handles[version] is handle:  # or another sampler was faster
                self._handles[version] = self._resend(version, str(refusal))
            self._together, sampler.updating = False, None
        else:
            sampler.version, sampler.updating = version, None
        self._release_old()
        self._driver.notify()

    def _next_version(self, sampler: Worker) -> int | None:
        """Return the version that a sampler should take now, None if there is none."""

        def may_update(one: Worker) -> bool:
            return not self._trains and (self._in_flight != "wait" or not one.tasks)

        if not self._together or sampler.restarts:
            return (
                self.published
                if may_update(sampler) and sampler.version != self.published
                else None
            )
        begun = next(
            (other.updating for other in self.samplers if other.updating is not None), None
        )
        if begun is not None:
            return begun if sampler.version != begun else None
        ready = all(other.ready and may_update(other) for other in self.samplers)
        return self.published if ready and sampler.version != self.published else None

    async def _keep_reference_current(self, reference: Worker) -> None:
        """Give a reference model its new weights."""
        await self._driver.until(lambda: reference.weights is not self._weights_of(reference))
        weights = self._reference_weights
        await reference.call("load weights", "update", weights)
        reference.weights = weights
        self._driver.notify()

    async def _play(self, sampler: Worker) -> None:
        """Take a task, have the sampler play it, and pass on the groups."""

        def next_task() -> Progress | None:
            current = [other for other in self.samplers if self._is_current(other)]
            return (
                self.tasks.next_unplayed()
                if _is_next(sampler, current, self._concurrent_tasks)
                else None
            )

        progress = await self._driver.until(next_task)
        with self._at(sampler, progress, self.tasks.give_back):
            what, count = f"sample {progress.task}", len(progress.task.groups)
            report, groups = await sampler.call(what, "play", progress.task, groups=count)
        sampler.engine_state = report.engine
        sampler.responses += self.tasks.played(progress, report, groups)
        progress.scorers = [
            workers for workers in (self.references, self.teachers) if progress.kept and workers
        ]
        self._hand_on(progress)

    async def _score(self, reference: Worker) -> None:
        """Take a task that was played, have the reference model score it, and pass on the groups."""

        def next_task() -> Progress | None:
            progress = next(
                (one for one in self.tasks.unscored if reference in one.scorers[0]), None
            )
            others = () if progress is None else progress.scorers[0]
            current = [
                other
                for other in others
                if other.ready and other.weights is self._weights_of(other)
            ]
            if progress is None or not _is_next(reference, current, _SCORED_AT_A_TIME):
                return None
            self.tasks.unscored.remove(progress)
            return progress

        progress = await self._driver.until(next_task)
        with self._at(reference, progress, self.tasks.unscored.append):
            what, count = f"score {progress.task}", len(progress.refs)
            scored = await reference.call(what, "score", *progress.refs, groups=count)
        seconds, progress.refs = scored
        progress.reference_s += seconds
        del progress.scorers[0]
        self._hand_on(progress)

    def _hand_on(self, progress: Progress) -> None:
        """Let a task wait for those who score it next, or its groups for a batch."""
        progress.attempts = 0
        if progress.scorers:
            self.tasks.unscored.append(progress)
        else:
            self.tasks.finish(progress)
        self._driver.notify()

    def _weights_of(self, worker: Worker) -> Any:
        """Return the weights that a reference model is to have; None are those that it was made
        with.
        """
        return self._reference_weights if worker in self.references else None

    @contextmanager
    def _at(
        self, worker: Worker, progress: Progress, put_back: Callable[[Progress], None]
    ) -> Iterator[None]:
        """Context in which a part has a task: if the part is lost, the task is put back, unless it
        was lost over it too often.
        """
        progress.attempts += 1
        worker.tasks.append(progress)
        self._driver.notify()  # who has the fewest tasks may be another one now
        try:
            yield
        except BaseException as error:
            put_back(progress)
            gone = isinstance(error, ActorLostError | CancelledError) and worker.error is not None
            if gone and progress.attempts == MOST_ATTEMPTS:
                raise WorkersLostError(
                    f"{progress.task} ended {worker.name} or others like it {MOST_ATTEMPTS} times, "
                    f"the last time with: {first_line(worker.error)}"
                ) from worker.error
            raise
        finally:
            worker.tasks.remove(progress)
        worker.did()
        self._driver.notify()

    def _is_current(self, sampler: Worker) -> bool:
        """Whether a sampler is there and has the published weights."""
        there = sampler.ready and sampler.updating is None and sampler.version is not None
        return there and sampler.version == self.published

    def _release_old(self) -> None:
        """Release weights that nobody reads or will read."""
        used = {self.published, *(sampler.updating for sampler in self.samplers if sampler.ready)}
        for version in self._handles.keys() - used:
            del self._handles[version]
            self._release(version)

    @property
    def _workers(self) -> list[Worker]:
        return [*self.samplers, *self.references, *self.teachers]


def _is_next(worker: Worker, workers: Sequence[Worker], most: int) -> bool:
    """Whether a place is the first of those with the fewest tasks, and has room for another one."""
    return (
        bool(workers)
        and min(workers, key=lambda other: len(other.tasks)) is worker
        and len(worker.tasks) < most
    )

"""``Rollouts``: the samplers and reference models of a run, and the tasks between them.

A ``RolloutTask`` is played by a sampler, and scored by a reference model and a teacher if there are
any. Then its groups wait in the ``GroupBuffer``. Samplers, reference models and teachers are
workers, in this thread or as actors. Each worker has jobs, which are small coroutines: one gives it
new weights; the others take a task, have the worker do it, and pass on the result. If its worker
dies, a job requeues its task. A driver runs the jobs: ``InlineDriver`` while the loop waits,
``ThreadDriver`` all the time and for several workers at once.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torchrl_grpo.errors import TransferRefusedError, WorkersLostError
from torchrl_grpo.runtime.inline_driver import InlineDriver
from torchrl_grpo.runtime.tasks import Progress, TaskQueue
from torchrl_grpo.runtime.thread_driver import ThreadDriver
from torchrl_grpo.runtime.workers import ActorLostError, Worker, first_line

MOST_ATTEMPTS = 3
"""Number of actors that may be lost over the same work before the run ends."""
_SCORED_AT_A_TIME = 2  # per reference actor: one task is computed while the next one arrives
_SECONDS = {f"workers/{name}": f"time/{name}" for name in ("generate_s", "reward_s", "reference_s")}
"""Metrics of workers that count toward the step's time if nothing overlaps."""


class Rollouts:
    """Source of batches of finished, scored groups, sampled with the published weights.

    ``learner_version - policy_version`` of a sequence in a batch never exceeds the bound of the
    tasks' ``GroupBuffer``.

    Lifecycle: ``start``, with actors ``wait_until_ready``, then ``publish`` and ``next_batch`` in
    alternation, then ``close``, at least once. Nothing is sampled before the first ``publish``.
    Every method but ``close`` raises any error of a worker's part and, with actors, the errors of
    ``ThreadDriver``, and ``WorkersLostError`` if every actor that played a task was lost.

    Attributes:
        tasks: all tasks that have not been trained yet.
        samplers: workers that sample.
        references: workers with a reference model.
        teachers: workers with a teacher.
        published: the latest published version; None before the first.
        receipt_s: seconds that the receipts of a sampler's latest weights took.

    Args:
        tasks: queue of tasks, each with as many groups as the samplers' environments.
        driver: ``InlineDriver`` for ``LocalWorker``, ``ThreadDriver`` for ``RayWorker``.

    Keyword Args:
        samplers: workers whose factory takes an engine's state, or None at first
            (``make_seeded``).
        references: workers with a reference model; empty if the learner scores, or if there is no
            scoring.
        teachers: workers of each teacher, which is a ``Reference`` too and scores after the
            reference models.
        concurrent_tasks: number of tasks that a sampler plays at once.
        waits: whether a sampler finishes its tasks before it takes new weights.
        references_first: whether samplers start after the reference models. Required if they share
            an accelerator, because an engine measures free memory when it starts.
        release: function called with each published version that no sampler will read anymore.
        resend: function that returns another handle of a version that a sampler refused, for the
            reason in its argument.
        together: whether all samplers must load a version at the same time.
        turns: whether the samplers sleep while a batch is trained, from the end of ``next_batch``
            to ``publish``. Meanwhile no sampler is started or receives weights either.
        evaluates: whether the samplers have a test split.
    """

    def __init__(
        self,
        tasks: TaskQueue,
        driver: InlineDriver | ThreadDriver,
        *,
        samplers: Sequence[Worker],
        references: Sequence[Worker] = (),
        teachers: Sequence[Sequence[Worker]] = (),
        concurrent_tasks: int = 1,
        waits: bool = True,
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
        self.teachers = [worker for workers in teachers for worker in workers]
        self._scorers = [references, *teachers]
        self.published: int | None = None
        self._driver = driver
        self._concurrent_tasks = concurrent_tasks
        self._waits = waits
        self._references_first = references_first
        self._release = release
        self._resend = resend
        self._together = together
        self._turns = turns
        self._evaluates = evaluates
        self._learners_turn = False
        self._starting = 0  # samplers that are being made
        # By version: the published one, and older ones that samplers still read.
        self._handles: dict[int, Any] = {}
        self._reference_weights: Any = None
        self._update_s = self.receipt_s = 0.0
        self._metrics: dict[str, float] = {}

    # Called by the loop

    def start(self) -> None:
        """Start the workers. With actors, return at once."""
        sample = [self._keep_current, *[self._play] * self._concurrent_tasks]
        score = [self._keep_reference_current, *[self._score] * _SCORED_AT_A_TIME]
        kinds = [
            {worker: [partial(job, worker) for job in jobs] for worker in workers}
            for workers, jobs in (
                (self.samplers, sample),
                (self.references, score),
                (self.teachers, score),
            )
        ]
        self._driver.start(self._make, kinds, self.what_is_missing)

    def wait_until_ready(self) -> None:
        """Wait until all workers are ready."""
        self._driver.run(self._driver.until(lambda: all(worker.ready for worker in self.workers)))

    def next_batch(self) -> list[Any]:
        """Wait for the next batch. Return its groups: lazy stacks of sequences, or references to
        them.

        Raises:
            RuntimeError: groups are older than the staleness bound allows.
        """
        groups, self._metrics = self._driver.run(self._next_groups())
        return [group for _, group in groups]

    def publish(self, handle: Any, version: int) -> None:
        """Publish the weights of a trained batch. With actors, return at once: each sampler loads
        them when it can.

        Args:
            handle: a ``WeightHandle``, or a reference to one.
            version: version of the weights.
        """
        self._driver.run(self._publish(handle, version))

    def update_reference(self, handle: Any) -> None:
        """Replace the reference model's weights for all later scores; see ``publish``."""
        self._driver.run(self._update_reference(handle))

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return ``Evaluator.evaluate`` of the published weights; empty without a test split."""
        if not self._evaluates:
            return {}, []
        what = "evaluate the test split"
        return self._driver.run(self._ask_any(what, "evaluate", sampled), what)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the latest batch, named ``section/name``: seconds, staleness, counts."""
        return dict(self._metrics)

    def spans(self) -> list[dict[str, Any]]:
        """Return the workers' spans since the last call (``RolloutReport.spans``)."""
        return [worker.spans.popleft() for worker in self.workers for _ in range(len(worker.spans))]

    def pids(self) -> dict[str, int]:
        """Return the process id of each worker that is ready, by name."""
        return {worker.name: worker.pid for worker in self.workers if worker.ready}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next batches depend on, apart from the weights.

        ``drawing`` is the position in the problems. ``ahead`` has the group and problem of all
        drawn groups that no batch has taken; they are played again after a restore. ``engines`` has
        ``Sampler.state_dict`` of each sampler, None if it is unknown.
        """
        return self._driver.run(self._state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from ``state_dict``. Call this before ``start``."""
        self.tasks.load_state_dict(state)
        for sampler, engine_state in zip(self.samplers, state["engines"], strict=False):
            sampler.engine_state = engine_state or None

    def what_is_missing(self) -> str:
        """Describe the state of the workers and of the next batch's groups."""
        playing = [
            f"{sampler.name} {'has' if sampler.ready else 'is starting, with'} {len(sampler.tasks)}"
            for sampler in self.samplers
        ]
        scorers = [*self.references, *self.teachers]
        scoring = sum(len(worker.tasks) for worker in scorers) + len(self.tasks.unscored)
        lost = [
            f"; {worker.name} was last lost with: {first_line(worker.error)}"
            for worker in self.workers
            if worker.error is not None
        ]
        return (
            f"{self.tasks.buffer.waiting} of the {self.tasks.buffer.groups_per_batch} groups of a "
            f"batch wait, {', '.join(playing)} tasks, {scoring} tasks are being "
            f"scored{''.join(lost)}"
        )

    def close(self) -> None:
        """Stop the workers. May be called again."""
        self._driver.close(self.samplers)

    # Coroutines of these calls

    async def _publish(self, handle: Any, version: int) -> None:
        self._handles[version], self.published = handle, version
        self._learners_turn = False
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
        """Return the next batch as (group, its data), and metrics of it and of the workers."""
        groups, metrics = await self._driver.until(self.tasks.take)
        if self._turns:
            await self._end_turn()
        self._driver.notify()
        if not self._driver.overlaps:  # the buffer's metrics would be constant
            del metrics["workers/groups_resampled"]
            return groups, {
                _SECONDS.get(name, name): value
                for name, value in metrics.items()
                if not name.startswith("buffer/")
            }
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
        """Have all samplers free their devices for the learner."""
        self._learners_turn = True

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
        """Call a method of a sampler that has the published weights, and of another one if that one
        is lost.

        Raises:
            WorkersLostError: ``MOST_ATTEMPTS`` samplers were lost during this call.
        """
        for _ in range(MOST_ATTEMPTS):
            sampler = await self._driver.until(
                lambda: next(filter(self._is_current, self.samplers), None)
            )
            with suppress(ActorLostError):
                return await sampler.call(what, method, *arguments)
        raise WorkersLostError(f"{MOST_ATTEMPTS} samplers were lost when they had to {what}.")

    async def _state(self) -> dict[str, Any]:
        return self.tasks.state_dict() | {
            "engines": [sampler.engine_state for sampler in self.samplers]
        }

    # Jobs of a worker

    async def _make(self, worker: Worker) -> None:
        """Start a worker, which then has its initial weights."""
        if worker not in self.samplers:
            worker.weights = None
            await worker.start()
            return
        if self._references_first:
            await self._driver.until(
                lambda: all(worker.ready for worker in [*self.references, *self.teachers])
            )
        await self._driver.until(lambda: not self._learners_turn)
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
            self._update_s, self.receipt_s = await sampler.call(
                f"load the weights of version {version}", "update", handle, version
            )
        except TransferRefusedError as refusal:
            if self._resend is None:
                raise
            if self._handles[version] is handle:  # otherwise another sampler was first
                self._handles[version] = self._resend(version, str(refusal))
            self._together, sampler.updating = False, None
        else:
            sampler.version, sampler.updating = version, None
        self._release_old()
        self._driver.notify()

    def _next_version(self, sampler: Worker) -> int | None:
        """Return the version that a sampler should load now; None if there is none."""

        def may_update(other: Worker) -> bool:
            return not self._learners_turn and not (self._waits and other.tasks)

        version = self.published
        if not self._together or sampler.restarts:
            ready = may_update(sampler)
        else:
            updating = [other.updating for other in self.samplers if other.updating is not None]
            ready = bool(updating) or all(
                other.ready and may_update(other) for other in self.samplers
            )
            version = updating[0] if updating else version
        return version if ready and sampler.version != version else None

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
            if _is_next(sampler, current, self._concurrent_tasks):
                return self.tasks.next_unplayed()
            return None

        progress = await self._driver.until(next_task)
        with self._working(sampler, progress, self.tasks.give_back):
            what, count = f"sample {progress.task}", len(progress.task.groups)
            report, groups = await sampler.call(what, "play", progress.task, groups=count)
        sampler.engine_state = report.engine
        sampler.responses += self.tasks.played(progress, report, groups)
        progress.scorers = [workers for workers in self._scorers if progress.kept and workers]
        self._pass_on(progress)

    async def _score(self, reference: Worker) -> None:
        """Take a played task, have the reference model score it, and pass on the groups."""

        def next_task() -> Progress | None:
            for progress in self.tasks.unscored:
                if reference in progress.scorers[0]:
                    break
            else:
                return None
            current = [
                other
                for other in progress.scorers[0]
                if other.ready and other.weights is self._weights_of(other)
            ]
            if not _is_next(reference, current, _SCORED_AT_A_TIME):
                return None
            self.tasks.unscored.remove(progress)
            return progress

        progress = await self._driver.until(next_task)
        with self._working(reference, progress, self.tasks.unscored.append):
            what, count = f"score {progress.task}", len(progress.refs)
            scored = await reference.call(what, "score", *progress.refs, groups=count)
        seconds, progress.refs = scored
        progress.reference_s += seconds
        del progress.scorers[0]
        self._pass_on(progress)

    def _pass_on(self, progress: Progress) -> None:
        """Queue a task for its next scorers or, without any, its groups for a batch."""
        progress.attempts = 0
        if progress.scorers:
            self.tasks.unscored.append(progress)
        else:
            self.tasks.finish(progress)
        self._driver.notify()

    def _weights_of(self, worker: Worker) -> Any:
        """Return the weights that a reference model should have; None for its initial weights."""
        return self._reference_weights if worker in self.references else None

    @contextmanager
    def _working(
        self, worker: Worker, progress: Progress, requeue: Callable[[Progress], None]
    ) -> Iterator[None]:
        """Context in which a worker has a task. After an error the task is requeued. The run ends
        if too many workers were lost over the task.
        """
        progress.attempts += 1
        worker.tasks.append(progress)
        self._driver.notify()  # another worker may have the fewest tasks now
        try:
            yield
        except BaseException as error:
            requeue(progress)
            lost = isinstance(error, ActorLostError | CancelledError) and worker.error is not None
            if lost and progress.attempts == MOST_ATTEMPTS:
                raise WorkersLostError(
                    f"{progress.task} crashed {worker.name} or others like it {MOST_ATTEMPTS} "
                    f"times, the last time with: {first_line(worker.error)}"
                ) from worker.error
            raise
        finally:
            worker.tasks.remove(progress)
        worker.did()
        self._driver.notify()

    def _is_current(self, sampler: Worker) -> bool:
        """Return whether a sampler is ready and has the published weights."""
        has_weights = sampler.updating is None and sampler.version is not None
        return sampler.ready and has_weights and sampler.version == self.published

    def _release_old(self) -> None:
        """Release weights that no sampler reads or will read."""
        used = {self.published, *(sampler.updating for sampler in self.samplers if sampler.ready)}
        for version in self._handles.keys() - used:
            del self._handles[version]
            self._release(version)

    @property
    def workers(self) -> list[Worker]:
        """All workers."""
        return [*self.samplers, *self.references, *self.teachers]


def _is_next(worker: Worker, workers: Sequence[Worker], max_tasks: int) -> bool:
    """Return whether a worker is the first with the fewest tasks, and may take another one."""
    if not workers or len(worker.tasks) >= max_tasks:
        return False
    return min(workers, key=lambda other: len(other.tasks)) is worker

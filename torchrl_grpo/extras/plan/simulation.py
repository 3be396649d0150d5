"""The asynchronous loop as discrete events: the schedule of ``Rollouts``, the actors and ``fit``,
without their work.

The bookkeeping is the real one: a ``GroupBuffer`` admits the groups and makes the batches. Pools do
the work. In a pool of n jobs each job advances at ``speed(n)``: the cores that all actors of a CPU
share are one pool, each accelerator is one, and so is an engine that decodes many groups at a time.
Nothing is random except the order of tasks of different sizes, which ``Costs.sample`` defines.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from torchrl_grpo.runtime.staleness import GroupBuffer

Speed = Callable[[int], float]
Action = Callable[[], Any]


@dataclass(frozen=True)
class Costs:
    """Costs of the stages in units of work. A pool with one job does one unit per second by
    default.

    Attributes:
        sample: work of sampling one task; tasks use these values in turn.
        train: work of training a batch.
        score: work of scoring one task; 0 without reference models.
        publish: work of the learner until new weights can be read.
        update: work of a sampler that reads them.
        reward_s: seconds from the last token of a task to its rewards, in which the sampler's
            device is free.
        hop_s: seconds from a task's end in one actor to its arrival at the next, and from a batch's
            end to training.
    """

    sample: Sequence[float]
    train: float
    score: float = 0.0
    publish: float = 0.0
    update: float = 0.0
    reward_s: float = 0.0
    hop_s: float = 0.0


@dataclass(frozen=True)
class Loop:
    """Actors of a run, and how much work may be in flight.

    Attributes:
        groups_per_batch: groups that train one batch.
        max_staleness: see ``GroupBuffer``.
        samplers: number of samplers.
        references: number of reference models; 0 if the learner's device has it (``Costs.score``
            above 0), or there is none.
        task_groups: groups that a sampler plays as one task.
        concurrent_tasks: maximum number of tasks of a sampler at a time.
        serial: whether a sampler samples them one after another, like the ``transformers`` engine.
        waits: whether a sampler takes new weights only when it has no task
            (``inference_model.in_flight=wait``).
        engine_speed: speed of the concurrent jobs of one sampler; not used if ``serial``.
        cores: speed of the jobs of all actors if they share a machine's cores; None if each has a
            device.
    """

    groups_per_batch: int
    max_staleness: int = 0
    samplers: int = 1
    references: int = 1
    task_groups: int = 1
    concurrent_tasks: int = 1
    serial: bool = False
    waits: bool = True
    engine_speed: Speed = lambda jobs: 1.0
    cores: Speed | None = None


@dataclass(frozen=True)
class Result:
    """Measurements of the simulated loop in its steady state.

    Attributes:
        step_s: seconds per batch.
        sampler_share: share of the samplers' task slots that were used.
        learner_share: share of the time that the learner trained or published.
        reference_share: share of the time that reference models scored; 0 without any.
        staleness_mean, staleness_max: staleness of the trained groups.
        groups_in_progress: mean number of groups with a slot in the buffer.
        group_s: mean seconds that a group holds its slot.
    """

    step_s: float
    sampler_share: float
    learner_share: float
    reference_share: float
    staleness_mean: float
    staleness_max: int
    groups_in_progress: float
    group_s: float


class Clock:
    """Simulated time, and scheduled events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Action]] = []

    def after(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def run(self, should_continue: Callable[[], bool]) -> None:
        while should_continue():
            if not self._events:
                raise RuntimeError(f"nothing happens after {self.now:g} s: the loop is deadlocked.")
            self.now, _, action = heapq.heappop(self._events)
            action()


class Pool:
    """Jobs that run concurrently; each advances at ``speed(jobs)``."""

    def __init__(self, clock: Clock, speed: Speed) -> None:
        self._clock = clock
        self._speed = speed
        self._progress = 0.0  # of a job that was here from the start
        self._updated_at = 0.0
        self._jobs: list[tuple[float, int, Action]] = []
        self._order = count()
        self._stamp = 0
        self._is_paused = False

    def add(self, work: float, done: Action) -> None:
        """Start a job."""
        self._advance()
        heapq.heappush(self._jobs, (self._progress + work, next(self._order), done))
        self._plan()

    def pause(self, seconds: float, done: Action) -> None:
        """Pause all jobs for a while."""
        self._advance()
        self._is_paused = True
        self._stamp += 1
        self._clock.after(seconds, lambda: self._resume(done))

    def _resume(self, done: Action) -> None:
        self._updated_at = self._clock.now
        self._is_paused = False
        self._plan()
        done()

    def _advance(self) -> None:
        if self._jobs and not self._is_paused:
            self._progress += (self._clock.now - self._updated_at) * self._speed(len(self._jobs))
        self._updated_at = self._clock.now

    def _plan(self) -> None:
        self._stamp += 1
        if self._jobs and not self._is_paused:
            stamp = self._stamp
            work = max(0.0, self._jobs[0][0] - self._progress)
            self._clock.after(work / self._speed(len(self._jobs)), lambda: self._end(stamp))

    def _end(self, stamp: int) -> None:
        if stamp == self._stamp:
            self._advance()
            _, _, done = heapq.heappop(self._jobs)
            self._plan()
            done()


class Queue:
    """First-come, first-served work for a few pools."""

    def __init__(self, clock: Clock, pools: Sequence[Pool]) -> None:
        self._clock = clock
        self._free = list(pools)
        self._waiting: deque[tuple[float, Action]] = deque()
        self.busy_s = 0.0

    def add(self, work: float, done: Action) -> None:
        self._waiting.append((work, done))
        self._next()

    def _next(self) -> None:
        if self._free and self._waiting:
            pool = self._free.pop()
            work, done = self._waiting.popleft()
            start = self._clock.now

            def end() -> None:
                self.busy_s += self._clock.now - start
                self._free.append(pool)
                self._next()
                done()

            pool.add(work, end)


class _Sampler:
    def __init__(self, index: int, pool: Pool, queue: Queue | None) -> None:
        self.index = index
        self.pool = pool
        self.queue = queue
        self.version = 0
        self.updating = False
        self.tasks = 0


class Simulation:
    """One run of the loop.

    Args:
        loop: the actors.
        costs: the costs of the stages.

    Examples:
        >>> loop = Loop(groups_per_batch=1, max_staleness=0)
        >>> Simulation(loop, Costs(sample=[2.0], train=1.0, score=0.5)).run().step_s
        3.5
    """

    def __init__(self, loop: Loop, costs: Costs) -> None:
        self.loop = loop
        self.costs = costs
        self.clock = Clock()
        self.buffer = GroupBuffer(loop.groups_per_batch, loop.max_staleness)
        shared = None if loop.cores is None else Pool(self.clock, loop.cores)
        self._learner = shared or Pool(self.clock, _shared_equally)
        self._samplers = []
        for index in range(loop.samplers):
            pool = shared or Pool(self.clock, _full_speed if loop.serial else loop.engine_speed)
            self._samplers.append(
                _Sampler(index, pool, Queue(self.clock, [pool]) if loop.serial else None)
            )
        references = [shared or Pool(self.clock, _full_speed) for _ in range(loop.references)] or [
            self._learner
        ]
        self._references = Queue(self.clock, references)
        # (tasks, sampler); some entries are out of date
        self._idle = [(0, index) for index in range(loop.samplers)]
        self._num_groups = 0
        self._training = False
        self._learner_s = 0.0
        self._task_seconds = 0.0
        self._slot_seconds = 0.0
        self._group_seconds = 0.0
        self._integrated_at = 0.0
        self._num_tasks = 0
        self._started_at: dict[int, float] = {}
        self._num_trained = 0
        self._staleness: list[int] = []

    def run(self, batches: int = 24, warm_up: int = 4) -> Result:
        """Run the loop for a number of batches, after warm-up batches that are not counted."""
        self._sample()
        self.clock.run(lambda: self.buffer.version < warm_up)
        self._integrate()
        start = self.clock.now
        self._learner_s = 0.0
        self._task_seconds = 0.0
        self._slot_seconds = 0.0
        self._group_seconds = 0.0
        self._references.busy_s = 0.0
        self._num_trained = 0
        self._staleness = []
        self.clock.run(lambda: self.buffer.version < warm_up + batches)
        self._integrate()
        loop = self.loop
        seconds = self.clock.now - start
        return Result(
            step_s=seconds / batches,
            sampler_share=self._task_seconds / (seconds * loop.samplers * loop.concurrent_tasks),
            learner_share=self._learner_s / seconds,
            reference_share=self._references.busy_s / (seconds * max(1, loop.references)),
            staleness_mean=sum(self._staleness) / len(self._staleness),
            staleness_max=max(self._staleness),
            groups_in_progress=self._slot_seconds / seconds,
            group_s=self._group_seconds / self._num_trained,
        )

    def _integrate(self) -> None:
        """Integrate the work in progress since the last event; called before each change."""
        passed = self.clock.now - self._integrated_at
        self._integrated_at = self.clock.now
        self._slot_seconds += passed * (self.buffer.capacity - self.buffer.room)
        self._task_seconds += passed * self._num_tasks

    def _sample(self) -> None:
        """Give tasks to the samplers with the fewest tasks while there is room."""
        while self._idle and self.buffer.room >= self.loop.task_groups:
            tasks, index = heapq.heappop(self._idle)
            sampler = self._samplers[index]
            if tasks == sampler.tasks < self.loop.concurrent_tasks and self._is_current(sampler):
                self._start_task(sampler)

    def _is_current(self, sampler: _Sampler) -> bool:
        return not sampler.updating and sampler.version == self.buffer.version

    def _mark_available(self, sampler: _Sampler) -> None:
        """Note that a sampler may have room for a task."""
        heapq.heappush(self._idle, (sampler.tasks, sampler.index))

    def _start_task(self, sampler: _Sampler) -> None:
        self._integrate()
        groups = range(self._num_groups, self._num_groups + self.loop.task_groups)
        work = self.costs.sample[self._num_groups // self.loop.task_groups % len(self.costs.sample)]
        self._num_groups += len(groups)
        for group in groups:
            self.buffer.admit(group)
            self._started_at[group] = self.clock.now
        sampler.tasks += 1
        self._num_tasks += 1
        self._mark_available(sampler)
        version = sampler.version
        later = self.costs.reward_s + self.costs.hop_s

        def done() -> None:
            self.clock.after(later, lambda: self._end_task(sampler, groups, version))

        (sampler.queue or sampler.pool).add(work, done)

    def _end_task(self, sampler: _Sampler, groups: Sequence[int], version: int) -> None:
        self._integrate()
        sampler.tasks -= 1
        self._num_tasks -= 1
        self._update(sampler)
        self._mark_available(sampler)
        if self.costs.score:
            self._references.add(
                self.costs.score,
                lambda: self.clock.after(self.costs.hop_s, lambda: self._ready(groups, version)),
            )
        else:
            self._ready(groups, version)
        self._sample()

    def _ready(self, groups: Sequence[int], version: int) -> None:
        for group in groups:
            self.buffer.finish(group, version, None)
        self._train()

    def _train(self) -> None:
        if self._training:
            return
        batch = self.buffer.take()
        if batch is None:
            return
        self._training = True
        self._staleness += self.buffer.staleness()
        start = self.clock.now + self.costs.hop_s
        groups = [group for group, _ in batch]

        def published() -> None:
            self._integrate()
            self._learner_s += self.clock.now - start
            self._training = False
            self.buffer.publish(self.buffer.version + 1)
            self._num_trained += len(groups)
            self._group_seconds += sum(
                self.clock.now - self._started_at.pop(group) for group in groups
            )
            for sampler in self._samplers:
                self._update(sampler)
            self._train()

        work = self.costs.train + self.costs.publish
        self.clock.after(self.costs.hop_s, lambda: self._learner.add(work, published))

    def _update(self, sampler: _Sampler) -> None:
        """Give a sampler the published weights, if it lacks them and can take them."""
        if sampler.updating or sampler.version == self.buffer.version:
            return
        if self.loop.waits and sampler.tasks:
            return
        version = self.buffer.version
        sampler.updating = True

        def done() -> None:
            sampler.updating = False
            sampler.version = version
            self._update(sampler)
            self._mark_available(sampler)
            self._sample()

        if sampler.queue is not None:
            sampler.queue.add(self.costs.update, done)
        else:
            sampler.pool.pause(self.costs.update, done)


def _full_speed(jobs: int) -> float:
    return 1.0


def _shared_equally(jobs: int) -> float:
    return 1.0 / jobs

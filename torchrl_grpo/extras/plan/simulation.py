"""The asynchronous loop as discrete events: the schedule of ``Rollouts``, the actors and ``fit``,
without their work.

The bookkeeping is the real one: a ``GroupBuffer`` admits the groups and makes the batches. Work is
done by pools. In a pool of n jobs each job advances at ``speed(n)``: the cores that all actors of a
CPU share are one pool, an accelerator is a pool of its own, and so is an engine that decodes many
groups at a time. Nothing is random but the order in which tasks of different sizes come, which
``Costs.sample`` gives.
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
    """Costs of the stages: work, which a pool of one job does at one unit per second unless its
    speed says otherwise.

    Attributes:
        sample: work of sampling one task; tasks take these in turns.
        train: work of training a batch.
        score: work of scoring one task; 0 is a run without reference models.
        publish: work of the learner until new weights are there to be read.
        update: work of a sampler that takes them.
        reward_s: seconds from the last token of a task to its rewards, in which the sampler's
            device is free.
        hop_s: seconds from a task's end in one actor to its arrival where it goes next, and from a
            batch's to training.
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
        samplers: how many.
        references: reference models; 0 where the learner's device has it (``Costs.score`` above 0),
            or there is none.
        task_groups: groups that a sampler plays as one task.
        concurrent_tasks: tasks that a sampler has at a time.
        serial: whether it samples them one after another, as the ``transformers`` engine does.
        waits: whether it takes new weights only when it has no task
            (``inference_model.in_flight=wait``).
        engine_speed: of the jobs of one sampler that samples them together; not read where
            ``serial``.
        cores: speed of the jobs of all actors where they share the cores of a machine, None where
            each has a device.
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
        step_s: seconds a batch.
        sampler_share: share of the samplers' places for tasks that were taken by one.
        learner_share: share of the time in which the learner trained or published.
        reference_share: the same of the reference models; 0 without any.
        staleness_mean, staleness_max: of the trained groups.
        groups_under_way: mean number of groups with a place in the buffer.
        group_s: mean seconds for which a group has it.
    """

    step_s: float
    sampler_share: float
    learner_share: float
    reference_share: float
    staleness_mean: float
    staleness_max: int
    groups_under_way: float
    group_s: float


class Clock:
    """Simulated time, and scheduled events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Action]] = []

    def after(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def run(self, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            if not self._events:
                raise RuntimeError(
                    f"nothing happens after {self.now:g} s: the loop waits for itself."
                )
            self.now, _, action = heapq.heappop(self._events)
            action()


class Pool:
    """Jobs that run concurrently; each advances at ``speed(jobs)``."""

    def __init__(self, clock: Clock, speed: Speed) -> None:
        self._clock, self._speed = clock, speed
        self._done = 0.0  # of the work of a job that was always here
        self._at = 0.0
        self._jobs: list[tuple[float, int, Action]] = []
        self._order = count()
        self._stamp = 0
        self._held = False

    def add(self, work: float, done: Action) -> None:
        """Begins a job."""
        self._advance()
        heapq.heappush(self._jobs, (self._done + work, next(self._order), done))
        self._plan()

    def hold(self, seconds: float, done: Action) -> None:
        """Stops all jobs for a while."""
        self._advance()
        self._held = True
        self._stamp += 1
        self._clock.after(seconds, lambda: self._go_on(done))

    def _go_on(self, done: Action) -> None:
        self._at, self._held = self._clock.now, False
        self._plan()
        done()

    def _advance(self) -> None:
        if self._jobs and not self._held:
            self._done += (self._clock.now - self._at) * self._speed(len(self._jobs))
        self._at = self._clock.now

    def _plan(self) -> None:
        self._stamp += 1
        if self._jobs and not self._held:
            stamp, left = self._stamp, max(0.0, self._jobs[0][0] - self._done)
            self._clock.after(left / self._speed(len(self._jobs)), lambda: self._end(stamp))

    def _end(self, stamp: int) -> None:
        if stamp == self._stamp:
            self._advance()
            _, _, done = heapq.heappop(self._jobs)
            self._plan()
            done()


class Queue:
    """First-come, first-served work of a few servers of a pool."""

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
            pool, (work, done), start = self._free.pop(), self._waiting.popleft(), self._clock.now

            def end() -> None:
                self.busy_s += self._clock.now - start
                self._free.append(pool)
                self._next()
                done()

            pool.add(work, end)


class _Sampler:
    def __init__(self, index: int, pool: Pool, queue: Queue | None) -> None:
        self.index, self.pool, self.queue = index, pool, queue
        self.version = 0
        self.updating = False
        self.tasks = 0


class Simulation:
    """One run of the loop.

    Args:
        loop: who there is.
        costs: what the stages take.

    Examples:
        >>> loop = Loop(groups_per_batch=1, max_staleness=0)
        >>> Simulation(loop, Costs(sample=[2.0], train=1.0, score=0.5)).run().step_s
        3.5
    """

    def __init__(self, loop: Loop, costs: Costs) -> None:
        self.loop, self.costs = loop, costs
        self.clock = Clock()
        self.buffer = GroupBuffer(loop.groups_per_batch, loop.max_staleness)
        shared = None if loop.cores is None else Pool(self.clock, loop.cores)
        self._learner = shared or Pool(self.clock, _in_turns)
        self._samplers = []
        for index in range(loop.samplers):
            pool = shared or Pool(self.clock, _alone if loop.serial else loop.engine_speed)
            self._samplers.append(
                _Sampler(index, pool, Queue(self.clock, [pool]) if loop.serial else None)
            )
        references = [shared or Pool(self.clock, _alone) for _ in range(loop.references)] or [
            self._learner
        ]
        self._references = Queue(self.clock, references)
        self._idle = [
            (0, index) for index in range(loop.samplers)
        ]  # (tasks, sampler); some entries are out of date
        self._drawn = self._finished = 0
        self._training = False
        self._learner_s = self._places_s = self._slots_s = self._sojourn_s = 0.0
        self._looked_at = 0.0
        self._under_way = 0
        self._begun: dict[int, float] = {}
        self._left = 0
        self._staleness: list[int] = []

    def run(self, batches: int = 24, warm_up: int = 4) -> Result:
        """The loop for so many batches, of which the first ones are not counted."""
        self._sample()
        self.clock.run(lambda: self.buffer.version < warm_up)
        self._look()
        start = self.clock.now
        self._learner_s = self._places_s = self._slots_s = self._sojourn_s = (
            self._references.busy_s
        ) = 0.0
        self._left, self._staleness = 0, []
        self.clock.run(lambda: self.buffer.version < warm_up + batches)
        self._look()
        seconds, loop = self.clock.now - start, self.loop
        return Result(
            step_s=seconds / batches,
            sampler_share=self._places_s / (seconds * loop.samplers * loop.concurrent_tasks),
            learner_share=self._learner_s / seconds,
            reference_share=self._references.busy_s / (seconds * max(1, loop.references)),
            staleness_mean=sum(self._staleness) / len(self._staleness),
            staleness_max=max(self._staleness),
            groups_under_way=self._slots_s / seconds,
            group_s=self._sojourn_s / self._left,
        )

    def _look(self) -> None:
        """Integrate the work in progress since the last event; called before each change."""
        passed, self._looked_at = self.clock.now - self._looked_at, self.clock.now
        self._slots_s += passed * (self.buffer.capacity - self.buffer.room)
        self._places_s += passed * self._under_way

    def _sample(self) -> None:
        """Gives tasks to the samplers with the fewest, as long as there is room."""
        while self._idle and self.buffer.room >= self.loop.task_groups:
            tasks, index = heapq.heappop(self._idle)
            sampler = self._samplers[index]
            if tasks == sampler.tasks < self.loop.concurrent_tasks and self._is_current(sampler):
                self._give(sampler)

    def _is_current(self, sampler: _Sampler) -> bool:
        return not sampler.updating and sampler.version == self.buffer.version

    def _offer(self, sampler: _Sampler) -> None:
        """Notes that a sampler may have room for a task."""
        heapq.heappush(self._idle, (sampler.tasks, sampler.index))

    def _give(self, sampler: _Sampler) -> None:
        self._look()
        groups = range(self._drawn, self._drawn + self.loop.task_groups)
        work = self.costs.sample[self._drawn // self.loop.task_groups % len(self.costs.sample)]
        self._drawn += len(groups)
        for group in groups:
            self.buffer.admit(group)
            self._begun[group] = self.clock.now
        sampler.tasks += 1
        self._under_way += 1
        self._offer(sampler)
        version = sampler.version
        later = self.costs.reward_s + self.costs.hop_s

        def done() -> None:
            self.clock.after(later, lambda: self._played(sampler, groups, version))

        (sampler.queue or sampler.pool).add(work, done)

    def _played(self, sampler: _Sampler, groups: Sequence[int], version: int) -> None:
        self._look()
        sampler.tasks -= 1
        self._under_way -= 1
        self._update(sampler)
        self._offer(sampler)
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
        start, groups = self.clock.now + self.costs.hop_s, [group for group, _ in batch]

        def published() -> None:
            self._look()
            self._learner_s += self.clock.now - start
            self._training = False
            self.buffer.publish(self.buffer.version + 1)
            self._left += len(groups)
            self._sojourn_s += sum(self.clock.now - self._begun.pop(group) for group in groups)
            for sampler in self._samplers:
                self._update(sampler)
            self._train()

        work = self.costs.train + self.costs.publish
        self.clock.after(self.costs.hop_s, lambda: self._learner.add(work, published))

    def _update(self, sampler: _Sampler) -> None:
        """Gives a sampler the published weights, if it lacks them and can take them."""
        if (
            sampler.updating
            or sampler.version == self.buffer.version
            or (self.loop.waits and sampler.tasks)
        ):
            return
        sampler.updating, version = True, self.buffer.version

        def done() -> None:
            sampler.updating, sampler.version = False, version
            self._update(sampler)
            self._offer(sampler)
            self._sample()

        if sampler.queue is not None:
            sampler.queue.add(self.costs.update, done)
        else:
            sampler.pool.hold(self.costs.update, done)


def _alone(jobs: int) -> float:
    return 1.0


def _in_turns(jobs: int) -> float:
    return 1.0 / jobs

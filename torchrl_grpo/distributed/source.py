"""``RaySource``: rollout and reference actors that work on while the trainer trains.

Three things run at once: the actors; a thread here (the *pump*), which hears what they have finished and gives them new
work; and the caller's loop, which asks for batches and publishes weights. All state is guarded by one condition. Work
travels as ``Unit``s: a unit is played by a rollout actor, scored by a reference actor, and then its groups wait in the
``GroupBuffer``. An actor that dies is made again, and what it had is given out again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torchrl._utils import logger as torchrl_logger

from torchrl_grpo.collectors.staleness import GroupBuffer
from torchrl_grpo.distributed.actors import ReferenceActor, Replica, RolloutActor, Unit, UnitReport
from torchrl_grpo.distributed.workers import Events, Worker, cause_of, is_loss
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.transforms.kl_scoring import KLScoring

InFlight = Literal["wait", "keep", "abort"]
_MOST_ATTEMPTS = 3
_TICK_S = 0.5


class WorkersLostError(RuntimeError):
    """The run cannot go on, because actors are gone and could not be replaced."""


@dataclass
class RayBatch:
    """A batch as references.

    Attributes:
        groups: id of each group.
        refs: reference to each group's data, a lazy stack of its sequences.
    """

    groups: tuple[int, ...]
    refs: list[Any]


class _Replica(Worker):
    """A rollout actor: its weights, and the units that it plays."""

    def __init__(self, name: str, make: Callable[[], Any], seed: int) -> None:
        super().__init__(name, make)
        self.seed = seed
        self.version: int | None = None
        self.updating = False
        self.units: list[_Work] = []
        self.engine_state: dict[str, Any] | None = None


@dataclass(eq=False)
class _Work:
    """A unit on its way: how often it was begun, its groups that no batch has taken, and what its actors gave."""

    unit: Unit
    left: set[int]
    attempts: int = 0
    report: UnitReport | None = None
    refs: list[Any] = field(default_factory=list)
    reference_s: float = 0.0


class RaySource:
    """Gives batches of references to groups that actors sample and score.

    Lifecycle: ``start`` and ``wait_until_ready``, then ``publish`` and ``next_batch`` in turns, then ``close``, once or
    more. The first ``publish`` starts the sampling.

    Args:
        env: draws the problems; it is never stepped, the actors have environments of their own, of ``unit_groups``
            groups each.

    Keyword Args:
        replicas: for each rollout actor, the factory of its parts and Ray's options for the actor.
        references: for each reference actor, the same; none when there is no reference model of its own.
        slots: units that one replica plays at a time.
        unit_groups: groups in a unit; divides ``groups_per_batch``.
        groups_per_batch: groups that ``next_batch`` gives.
        total_groups: groups of the whole run; no more are sampled.
        max_staleness: largest ``trainer_version - policy_version`` of a group when it is trained.
        in_flight: what happens to units that are being played when weights arrive. ``wait`` ends them before, ``keep``
            goes on with the new weights and ``abort`` has the engine begin them again: both need an engine that can.
        seed: of the engines' draws.
        samples: gives rows of the latest batch for ``samples.jsonl``.
        patience_s: longest wait for anything.
        dead_s: how long all rollout actors, or all reference actors, may be dead before the run ends.

    Raises:
        ValueError: ``unit_groups`` does not divide ``groups_per_batch``.
    """

    def __init__(
        self,
        env: LLMEnv,
        *,
        replicas: Sequence[tuple[Callable[[], Replica], Mapping[str, Any]]],
        references: Sequence[tuple[Callable[[], KLScoring], Mapping[str, Any]]] = (),
        slots: int = 1,
        unit_groups: int,
        groups_per_batch: int,
        total_groups: int,
        max_staleness: int,
        in_flight: InFlight = "wait",
        seed: int = 0,
        samples: Callable[[int], list[dict[str, Any]]] = lambda most: [],
        patience_s: float = 1800.0,
        dead_s: float = 300.0,
    ) -> None:
        if groups_per_batch % unit_groups:
            raise ValueError(
                f"groups_per_batch={groups_per_batch} must be a multiple of unit_groups={unit_groups}: use "
                f"{groups_per_batch // unit_groups * unit_groups or unit_groups}."
            )
        self._env = env
        self._slots = slots
        self._unit_groups = unit_groups
        self._total_groups = total_groups
        self._in_flight = in_flight
        self._samples = samples
        self._patience_s = patience_s
        self._dead_s = dead_s
        self.max_staleness = max_staleness
        self._buffer = GroupBuffer(groups_per_batch, max_staleness)
        import ray

        rollout, reference = ray.remote(RolloutActor), ray.remote(ReferenceActor)
        self._replicas = [
            _Replica(
                f"rollout actor {index}",
                partial(_make, rollout.options(max_concurrency=slots + 2 if slots > 1 else 1, **options), factory),
                seed + index,
            )
            for index, (factory, options) in enumerate(replicas)
        ]
        self._references = [
            Worker(f"reference actor {index}", partial(_make, reference.options(**options), factory))
            for index, (factory, options) in enumerate(references)
        ]
        self._scoring: dict[Worker, list[_Work]] = {worker: [] for worker in self._references}
        self._works: list[_Work] = []
        self._unplayed: deque[_Work] = deque()
        self._unscored: deque[_Work] = deque()
        self._weights: Any = None
        self._reference_weights: Any = None
        self._published: int | None = None
        self._events = Events()
        self._changed = threading.Condition(threading.RLock())
        self._error: BaseException | None = None
        self._closed = False
        self._metrics: dict[str, float] = {}
        self._update_s = 0.0
        self._most_waiting = 0
        self._pump_thread = threading.Thread(target=self._pump, name="rollouts", daemon=True)

    # For the training loop

    def start(self) -> None:
        """Starts the actors; returns at once."""
        with self._changed:
            for worker in self._workers():
                self._start(worker)
        self._pump_thread.start()

    def wait_until_ready(self) -> None:
        """Waits until the parts of all actors are made.

        Raises:
            WorkersLostError: an actor died.
            TimeoutError: an actor was not ready in time.
            Exception: what a factory raised.
        """
        self._wait(
            lambda: all(worker.ready for worker in self._workers()),
            lambda: f"{', '.join(w.name for w in self._workers() if not w.ready)} to be ready",
        )

    def next_batch(self) -> RayBatch:
        """The next batch, when it is there.

        Raises:
            WorkersLostError: all actors of a kind have been dead for too long, or a unit ended every actor it met.
            TimeoutError: no batch in time.
            Exception: what an actor's work raised.
        """
        taken: list[tuple[int, Any]] = []

        def take() -> bool:
            if not taken:
                taken.extend(self._buffer.take() or ())
            return bool(taken)

        self._wait(take, self._what_is_missing)
        with self._changed:
            for group, (work, _) in taken:
                work.left.discard(group)
            self._works = [work for work in self._works if work.left]
            self._note_batch([work for _, (work, _) in taken])
            return RayBatch(tuple(group for group, _ in taken), [ref for _, (_, ref) in taken])

    def publish(self, weights: Any, version: int) -> None:
        """Gives out the weights of a trained batch. Returns at once: each replica takes them when it can.

        Args:
            weights: reference to ``PackedWeights``.
            version: their version.
        """
        with self._changed:
            self._raise_error()
            self._weights, self._published = weights, version
            self._buffer.publish(version)
            self._work()

    def update_reference(self, weights: Any) -> None:
        """Replaces the weights of the reference actors, for all that they score from now on."""
        with self._changed:
            self._reference_weights = weights
            for worker in self._references:
                if worker.ready:
                    self._ask(worker, worker.actor.update.remote(weights), lambda _: None)

    def metrics(self) -> dict[str, float]:
        """See ``RolloutSource``."""
        return dict(self._metrics)

    def samples(self, most: int) -> list[dict[str, Any]]:
        """See ``RolloutSource``."""
        return self._samples(most)

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Evaluates the published weights on one replica, as ``Evaluator.evaluate`` does.

        Raises:
            TimeoutError: no answer in time.
        """
        version, metrics, rows = self._ask_current(self._replicas, "evaluate", sampled)
        if version != self._published:
            raise RuntimeError(f"weights of version {version} were evaluated instead of {self._published}.")
        return metrics, rows

    def probes(self) -> list[Any]:
        """What ``RolloutActor.probe`` of each replica gives, with the published weights."""
        return [self._ask_current([replica], "probe") for replica in self._replicas]

    def state_dict(self) -> dict[str, Any]:
        """See ``RolloutSource``. Groups that are not trained are drawn again after a restore."""
        with self._changed:
            works = sorted(self._works, key=lambda work: work.unit.groups)
            return {
                "env": self._env.state_dict(),
                "units": [
                    {"env": work.unit.state, "groups": list(work.unit.groups), "wanted": sorted(work.left)}
                    for work in works
                ],
                "engines": [replica.engine_state for replica in self._replicas],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave; before the first ``publish``."""
        self._env.load_state_dict(state["env"])
        for unit in state["units"]:
            work = _Work(Unit(unit["env"], tuple(unit["groups"])), set(unit["wanted"]))
            self._works.append(work)
            self._unplayed.append(work)
        for replica, engine_state in zip(self._replicas, state["engines"], strict=False):
            replica.engine_state = engine_state

    def close(self) -> None:
        """Ends all actors. May be called again."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            closing = [replica.actor.close.remote() for replica in self._replicas if replica.ready]
        self._events.wake()
        if self._pump_thread.is_alive():
            self._pump_thread.join(timeout=10)
        if closing:
            import ray

            ray.wait(closing, num_returns=len(closing), timeout=10)
        for worker in self._workers():
            worker.kill()

    # What the pump does, always with the condition held

    def _pump(self) -> None:
        while True:
            handler = self._events.next(_TICK_S)
            with self._changed:
                if self._closed:
                    return
                if self._error is None:
                    try:
                        if handler is not None:
                            handler()
                        self._work()
                    except BaseException as error:
                        self._error = error
                self._changed.notify_all()

    def _work(self) -> None:
        """Gives everyone something to do."""
        for worker in self._workers():
            if worker.must_start:
                self._start(worker)
        for replica in self._replicas:
            idle = self._in_flight != "wait" or not replica.units
            if replica.ready and not replica.updating and replica.version != self._published and idle:
                self._update(replica)
        self._score()
        self._play()
        self._most_waiting = max(self._most_waiting, self._buffer.waiting)
        for kind in (self._replicas, self._references):
            self._check_alive(kind)

    def _start(self, worker: Worker) -> None:
        first = worker.start()
        actor = worker.actor
        self._events.when(first, partial(self._started, worker, actor), partial(self._setup_failed, worker, actor))

    def _started(self, worker: Worker, actor: Any, pid: int) -> None:
        if worker.actor is not actor:
            return
        worker.started(pid)
        if isinstance(worker, _Replica):
            worker.version, worker.updating = None, False
            self._ask(worker, actor.restore.remote(worker.seed, worker.engine_state), lambda _: None)
        elif self._reference_weights is not None:
            self._ask(worker, actor.update.remote(self._reference_weights), lambda _: None)

    def _setup_failed(self, worker: Worker, actor: Any, error: BaseException) -> None:
        if worker.actor is not actor:
            return
        if not worker.restarts and not worker.ready and not is_loss(error):
            raise cause_of(error)
        if not worker.restarts and not worker.ready:
            raise WorkersLostError(f"{worker.name} died while it started: {_first_line(error)}") from error
        self._lost(worker, error)

    def _ask(self, worker: Worker, answer: Any, done: Callable[[Any], None]) -> None:
        """Calls ``done`` with an actor's answer, unless the actor is replaced before."""
        actor = worker.actor

        def answered(value: Any) -> None:
            if worker.actor is actor:
                done(value)

        def failed(error: BaseException) -> None:
            if worker.actor is not actor:
                return
            if not is_loss(error):
                raise cause_of(error)
            self._lost(worker, error)

        self._events.when(answer, answered, failed)

    def _lost(self, worker: Worker, error: BaseException) -> None:
        """Puts what an actor had back into the queues, and lets it be made again."""
        torchrl_logger.warning(f"{worker.name} (process {worker.pid}) is gone, a new one starts: {_first_line(error)}")
        worker.lost(error)
        if isinstance(worker, _Replica):
            for work in reversed(worker.units):
                if work.attempts == _MOST_ATTEMPTS:
                    raise WorkersLostError(
                        f"groups {work.unit.groups[0]} to {work.unit.groups[-1]} ended {work.attempts} rollout actors, "
                        f"the last one with: {_first_line(error)}"
                    ) from error
                for group in work.left:
                    self._buffer.withdraw(group)
                self._unplayed.appendleft(work)
            worker.units = []
        else:
            self._unscored.extendleft(reversed(self._scoring[worker]))
            self._scoring[worker] = []

    def _check_alive(self, workers: Sequence[Worker]) -> None:
        if not workers or any(worker.ready or not worker.restarts for worker in workers):
            return
        dead_for = time.monotonic() - max(worker.alive_at for worker in workers)
        if dead_for > self._dead_s:
            last = next(worker.error for worker in workers if worker.error is not None)
            raise WorkersLostError(
                f"all of {', '.join(worker.name for worker in workers)} have been dead for {dead_for:.0f} s, more than "
                f"the {self._dead_s:.0f} s allowed, and could not be replaced. The last error was: {_first_line(last)}"
            ) from last

    def _update(self, replica: _Replica) -> None:
        assert self._published is not None
        replica.updating = True
        answer = replica.actor.update.remote(self._weights, self._published)
        self._ask(replica, answer, partial(self._updated, replica, self._published))

    def _updated(self, replica: _Replica, version: int, seconds: float) -> None:
        replica.updating, replica.version = False, version
        self._update_s = seconds

    def _play(self) -> None:
        """Gives units to the replicas that have the published weights, the one with the fewest first."""
        while self._published is not None:
            free = [r for r in self._replicas if self._is_current(r) and len(r.units) < self._slots]
            if not free or (not self._unplayed and not self._draw()):
                return
            work = self._unplayed[0]
            if len(work.left) > self._buffer.room:
                return
            self._unplayed.popleft()
            for group in work.left:
                self._buffer.admit(group)
            work.attempts += 1
            replica = min(free, key=lambda r: len(r.units))
            replica.units.append(work)
            returns = 1 + len(work.unit.groups)
            report, *refs = replica.actor.play.options(num_returns=returns).remote(work.unit)
            self._ask(replica, report, partial(self._played, replica, work, refs))

    def _draw(self) -> bool:
        """Draws the next unit, if the run has one more and there is room for it."""
        state = self._env.state_dict()
        first = state["next_group"]
        if first >= self._total_groups or self._buffer.room < self._unit_groups:
            return False
        self._env.skip(self._unit_groups)
        groups = tuple(range(first, first + self._unit_groups))
        work = _Work(Unit(state, groups), set(groups))
        self._works.append(work)
        self._unplayed.append(work)
        return True

    def _played(self, replica: _Replica, work: _Work, refs: list[Any], report: UnitReport) -> None:
        if report.groups != work.unit.groups:
            raise RuntimeError(f"{replica.name} played groups {report.groups} instead of {work.unit.groups}.")
        replica.units.remove(work)
        replica.engine_state = report.engine
        work.report, work.refs = report, refs
        if self._references:
            self._unscored.append(work)
        else:
            self._finish(work)

    def _score(self) -> None:
        while self._unscored:
            ready = [worker for worker in self._references if worker.ready]
            if not ready:
                return
            work = self._unscored.popleft()
            worker = min(ready, key=lambda w: len(self._scoring[w]))
            self._scoring[worker].append(work)
            seconds, *refs = worker.actor.score.options(num_returns=1 + len(work.refs)).remote(*work.refs)
            self._ask(worker, seconds, partial(self._scored, worker, work, refs))

    def _scored(self, worker: Worker, work: _Work, refs: list[Any], seconds: float) -> None:
        self._scoring[worker].remove(work)
        work.refs, work.reference_s = refs, seconds
        self._finish(work)

    def _finish(self, work: _Work) -> None:
        """Lets the groups of a unit wait for a batch."""
        assert work.report is not None
        for group, version, ref in zip(work.report.groups, work.report.versions, work.refs, strict=True):
            if group in work.left:
                self._buffer.finish(group, version, (work, ref))
        work.refs = []  # a group's data lives as long as something waits for it

    # Helpers

    def _workers(self) -> list[Worker]:
        return [*self._replicas, *self._references]

    def _is_current(self, replica: _Replica) -> bool:
        return replica.ready and not replica.updating and replica.version == self._published

    def _note_batch(self, works: Sequence[_Work]) -> None:
        staleness = self._buffer.staleness()
        reports = [work.report for work in works if work.report is not None]
        self._metrics = {
            "staleness/max": float(max(staleness)),
            "staleness/mean": sum(staleness) / len(staleness),
            "buffer/in_flight": self._buffer.in_flight,
            "buffer/waiting": self._buffer.waiting,
            "buffer/waiting_max": self._most_waiting,
            "workers/generate_s": sum(report.generate_s / len(report.groups) for report in reports),
            "workers/reward_s": sum(report.env_s / len(report.groups) for report in reports),
            "workers/update_s": self._update_s,
            "workers/restarts_rollout": sum(worker.restarts for worker in self._replicas),
            "workers/restarts_reference": sum(worker.restarts for worker in self._references),
        }
        if self._references:
            self._metrics["workers/reference_s"] = sum(work.reference_s / len(work.unit.groups) for work in works)
        self._most_waiting = self._buffer.waiting

    def _ask_current(self, replicas: Sequence[_Replica], method: str, *arguments: Any) -> Any:
        """The answer of one of these replicas, asked while it has the published weights; of another one if it dies."""
        while True:
            self._wait(
                lambda: any(self._is_current(replica) for replica in replicas),
                lambda: f"a rollout actor to have the weights of version {self._published}",
            )
            with self._changed:
                replica = next((r for r in replicas if self._is_current(r)), None)
                if replica is None:
                    continue
                actor, answers = replica.actor, list[Any]()
                self._ask(replica, getattr(actor, method).remote(*arguments), answers.append)
            self._wait(
                lambda: bool(answers) or replica.actor is not actor,  # noqa: B023
                lambda: f"{replica.name} to {method}",  # noqa: B023
            )
            if answers:
                return answers[0]

    def _wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Waits until ``ready``, which is called with the condition held."""
        deadline = time.monotonic() + self._patience_s
        with self._changed:
            while True:
                self._raise_error()
                if ready():
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited {self._patience_s:.0f} s for {what()}.")
                self._changed.wait(timeout=1.0)

    def _raise_error(self) -> None:
        if self._closed:
            raise RuntimeError("the source is closed: make a new one.")
        if self._error is not None:
            raise self._error

    def _what_is_missing(self) -> str:
        playing = [f"{r.name} {'has' if r.ready else 'is starting, with'} {len(r.units)}" for r in self._replicas]
        scoring = sum(len(works) for works in self._scoring.values()) + len(self._unscored)
        return (
            f"a batch of {self._buffer.groups_per_batch} groups: {self._buffer.waiting} wait, "
            f"{', '.join(playing)} units, {scoring} units are being scored"
        )


def _make(remote_class: Any, factory: Callable[[], Any]) -> Any:
    return remote_class.remote(factory)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]

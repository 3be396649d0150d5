"""``Fleet``: the rollout and reference actors of a run, what each of them does, and what is given out next.

Work travels as ``Unit``s: a unit is played by a rollout actor, scored by a reference actor, and then its groups wait in
the ``GroupBuffer``. An actor that dies is made again, and what it had is given out again.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_grpo.choices import InFlight
from torchrl_grpo.collectors.staleness import GroupBuffer
from torchrl_grpo.distributed.actors import ReferenceActor, Replica, RolloutActor, Unit, UnitReport
from torchrl_grpo.distributed.workers import Events, Worker, cause_of, is_loss
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.errors import WorkersLostError
from torchrl_grpo.transforms.kl_scoring import KLScoring

MOST_ATTEMPTS = 3
"""After so many actors were lost over the same thing, another one is not tried."""
_SCORED_AT_A_TIME = 2  # by one reference actor: one unit is computed, one is on its way there


@dataclass(eq=False)
class Work:
    """A unit on its way: its groups that no batch has taken, how many actors were given it for what it is in now
    (sampling, scoring), and what actors gave."""

    unit: Unit
    left: set[int]
    attempts: int = 0
    report: UnitReport | None = None
    refs: list[Any] = field(default_factory=list)
    reference_s: float = 0.0


class ReplicaWorker(Worker):
    """A rollout actor: the weights and the engine's state that it has, and how many responses it and its predecessors
    gave."""

    def __init__(self, name: str, make: Callable[[], Any], seed: int) -> None:
        super().__init__(name, make)
        self.seed = seed
        self.version: int | None = None
        self.updating: int | None = None  # the version that it is being given
        self.engine_state: dict[str, Any] | None = None
        self.responses = 0

    def lost(self, error: BaseException) -> list[Any]:
        """See ``Worker``."""
        self.version = self.updating = None
        return super().lost(error)

    def _setup_arguments(self) -> tuple[Any, ...]:
        return self.seed, self.engine_state


class Fleet:
    """Actors and their work.

    No method waits, and none may be called by two threads at a time: ``RaySource`` sees to that. ``work`` is to be
    called after each handler of ``events`` and once in a while.

    Attributes:
        buffer: the groups.
        events: the actors' answers.
        published: the latest version, None before the first.

    Args:
        env: draws the problems.

    Keyword Args: those of ``RaySource``.
    """

    def __init__(
        self,
        env: LLMEnv,
        *,
        replicas: Sequence[tuple[Callable[[], Replica], Mapping[str, Any]]],
        references: Sequence[tuple[Callable[[], KLScoring], Mapping[str, Any]]],
        slots: int,
        unit_groups: int,
        groups_per_batch: int,
        total_groups: int,
        rounds: int,
        max_staleness: int,
        in_flight: InFlight,
        references_first: bool,
        seed: int,
        release: Callable[[int], None],
        actor_timeout_s: float,
        recovery_timeout_s: float,
    ) -> None:
        import ray

        self._env = env
        self._slots = slots
        self._unit_groups = unit_groups
        self._total_groups = total_groups
        self._rounds = rounds
        self._in_flight = in_flight
        self._references_first = references_first
        self._release = release
        self._actor_timeout_s = actor_timeout_s
        self._recovery_timeout_s = recovery_timeout_s
        self.buffer = GroupBuffer(groups_per_batch, max_staleness)
        self.events = Events()
        self.published: int | None = None
        rollout, reference = ray.remote(RolloutActor), ray.remote(ReferenceActor)
        # Beside the units, an update and an evaluation, where the engine can take several calls at a time.
        threads = slots + 2 if slots > 1 or in_flight != "wait" else 1
        self.replicas = [
            ReplicaWorker(
                f"rollout actor {index}",
                partial(_make, rollout.options(max_concurrency=threads, **options), factory),
                seed + index,
            )
            for index, (factory, options) in enumerate(replicas)
        ]
        self.references = [
            Worker(f"reference actor {index}", partial(_make, reference.options(**options), factory))
            for index, (factory, options) in enumerate(references)
        ]
        self.workers: list[Worker] = [*self.replicas, *self.references]
        self._works: list[Work] = []
        self._unplayed: deque[Work] = deque()
        self._unscored: deque[Work] = deque()
        self._handles: dict[int, Any] = {}  # the published one, and older ones that replicas still read
        self._reference_weights: Any = None
        self._dynamic: Counter[str] = Counter()  # what dynamic sampling did since the latest batch
        self._rewards: Counter[str] = Counter()  # what the reward workers counted so far
        self._update_s = 0.0
        self._most_waiting = 0
        self._resampled = 0

    def publish(self, handle: Any, version: int) -> None:
        """Takes the weights of a trained batch, a reference to a ``WeightHandle``."""
        self._handles[version], self.published = handle, version
        self.buffer.publish(version)
        self.work()

    def update_reference(self, weights: Any) -> None:
        """Replaces the weights of the reference actors, for all that they score from now on."""
        self._reference_weights = weights
        for worker in self.references:
            if worker.ready:
                self._give_reference_weights(worker)

    def take(self) -> list[tuple[int, Work, Any]] | None:
        """The next batch, as group, its unit and the reference to its data; None while it is not there."""
        taken = self.buffer.take()
        if taken is None:
            return None
        for group, (work, _) in taken:
            work.left.discard(group)
        self._works = [work for work in self._works if work.left]
        return [(group, work, ref) for group, (work, ref) in taken]

    def state_dict(self) -> dict[str, Any]:
        """Where the problems are, which units no batch has taken whole, and the engines' states."""
        works = sorted(self._works, key=lambda work: work.unit.groups)
        return {
            "env": self._env.state_dict(),
            "units": [
                {
                    "env": work.unit.state,
                    "groups": list(work.unit.groups),
                    "stop": work.unit.stop,
                    "wanted": sorted(work.left),
                }
                for work in works
            ],
            "engines": [replica.engine_state for replica in self.replicas],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave; before the actors start."""
        self._env.load_state_dict(state["env"])
        for unit in state["units"]:
            work = Work(Unit(unit["env"], tuple(unit["groups"]), unit["stop"]), set(unit["wanted"]))
            self._works.append(work)
            self._unplayed.append(work)
        for replica, engine_state in zip(self.replicas, state["engines"], strict=False):
            replica.engine_state = engine_state

    def work(self) -> None:
        """Gives everyone something to do, and replaces those who take too long for it."""
        for worker in self.workers:
            late = worker.late(self._actor_timeout_s)
            if late is not None:
                self._failed(worker, TimeoutError(late))
        for worker in [*self.references, *self.replicas]:
            waits = self._references_first and worker in self.replicas and not all(r.ready for r in self.references)
            if worker.must_start and not waits:
                self._start(worker)
        for replica in self.replicas:
            idle = self._in_flight != "wait" or not replica.units
            if replica.ready and replica.updating is None and replica.version != self.published and idle:
                self._update(replica)
        self._score()
        self._play()
        self._release_old()
        self._most_waiting = max(self._most_waiting, self.buffer.waiting)
        for kind in (self.replicas, self.references):
            self._check_alive(kind)

    def _start(self, worker: Worker) -> None:
        self.ask(worker, worker.start(), "start", partial(self._started, worker))

    def _started(self, worker: Worker, pid: int) -> None:
        worker.started(pid)
        if worker in self.references and self._reference_weights is not None:
            self._give_reference_weights(worker)

    def _give_reference_weights(self, worker: Worker) -> None:
        self.ask(worker, worker.actor.update.remote(self._reference_weights), "load weights", lambda _: None)

    def ask(self, worker: Worker, answer: Any, what: str, done: Callable[[Any], None]) -> None:
        """Calls ``done`` with an actor's answer, unless the actor is replaced before, because it died or is late.

        Args:
            worker: whose actor was asked.
            answer: the reference that it owes.
            what: what it is to do, in words.
            done: takes the answer.
        """
        actor = worker.actor
        worker.owes[answer] = what, time.monotonic()

        def answered(value: Any) -> None:
            if worker.actor is actor:
                del worker.owes[answer]
                done(value)

        def failed(error: BaseException) -> None:
            if worker.actor is actor:
                self._failed(worker, error)

        self.events.when(answer, answered, failed)

    def _failed(self, worker: Worker, error: BaseException) -> None:
        """Replaces an actor that is lost, or does not answer in time; what its work raised is raised here."""
        first_start = not worker.ready and not worker.restarts
        lost = is_loss(error) or isinstance(cause_of(error), TimeoutError)
        if not lost and (worker.ready or first_start):
            raise cause_of(error)
        if first_start:
            raise WorkersLostError(f"{worker.name} could not start: {_first_line(error)}") from error
        self._lost(worker, error)

    def _lost(self, worker: Worker, error: BaseException) -> None:
        """Puts what an actor had back into the queues, and lets it be made again."""
        torchrl_logger.warning(f"{worker.name} (process {worker.pid}) is lost, a new one starts: {_first_line(error)}")
        samples = isinstance(worker, ReplicaWorker)
        for work in reversed(worker.lost(error)):
            if work.attempts == MOST_ATTEMPTS:
                raise WorkersLostError(
                    f"{_groups(work)} ended {MOST_ATTEMPTS} {'rollout' if samples else 'reference'} actors, the last "
                    f"one with: {_first_line(error)}"
                ) from error
            if samples:
                for group in work.left:
                    self.buffer.withdraw(group)
                self._resampled += len(work.left)
            (self._unplayed if samples else self._unscored).appendleft(work)

    def _check_alive(self, workers: Sequence[Worker]) -> None:
        if not workers or any(worker.ready or not worker.restarts for worker in workers):
            return
        dead_for = time.monotonic() - max(worker.alive_at for worker in workers)
        if dead_for > self._recovery_timeout_s:
            last = next(worker.error for worker in workers if worker.error is not None)
            raise WorkersLostError(
                f"all of {', '.join(worker.name for worker in workers)} have been dead for {dead_for:.0f} s, more than "
                f"the {self._recovery_timeout_s:.0f} s allowed, and could not be replaced. The last error was: {_first_line(last)}"
            ) from last

    def _update(self, replica: ReplicaWorker) -> None:
        assert self.published is not None
        replica.updating = self.published
        answer = replica.actor.update.remote(self._handles[self.published], self.published)
        what = f"load the weights of version {self.published}"
        self.ask(replica, answer, what, partial(self._updated, replica, self.published))

    def _updated(self, replica: ReplicaWorker, version: int, seconds: float) -> None:
        replica.updating, replica.version = None, version
        self._update_s = seconds

    def _release_old(self) -> None:
        """Gives back the weights that nobody reads and nobody will be given."""
        used = {self.published, *(replica.updating for replica in self.replicas)}
        for version in self._handles.keys() - used:
            del self._handles[version]
            self._release(version)

    def _play(self) -> None:
        """Gives units to the replicas that have the published weights, the one with the fewest first."""
        while self.published is not None:
            free = [r for r in self.replicas if self.is_current(r) and len(r.units) < self._slots]
            if not free or (not self._unplayed and not self._draw()):
                return
            work = self._unplayed[0]
            if len(work.left) > self.buffer.room:
                return
            self._unplayed.popleft()
            for group in work.left:
                self.buffer.admit(group)
            work.attempts += 1
            replica = min(free, key=lambda r: len(r.units))
            replica.units.append(work)
            returns = 1 + len(work.unit.groups)
            report, *refs = replica.actor.play.options(num_returns=returns).remote(work.unit)
            self.ask(replica, report, f"sample {_groups(work)}", partial(self._played, replica, work, refs))

    def _draw(self) -> bool:
        """Draws the next unit, if the run has one more and there is room for it."""
        state = self._env.state_dict()
        first = state["next_group"]
        if first >= self._total_groups * self._rounds or self.buffer.room < self._unit_groups:
            return False
        self._env.skip(self._unit_groups * self._rounds)
        groups = tuple(range(first, first + self._unit_groups))
        work = Work(Unit(state, groups, first + self._unit_groups * self._rounds), set(groups))
        self._works.append(work)
        self._unplayed.append(work)
        return True

    def _played(self, replica: ReplicaWorker, work: Work, refs: list[Any], report: UnitReport) -> None:
        unit, played = work.unit, report.groups
        own = played == unit.groups if self._rounds == 1 else set(played) <= set(range(unit.groups[0], unit.stop))
        if not own or len(played) != len(unit.groups):
            raise RuntimeError(f"{replica.name} played groups {played} instead of {unit.groups}, before {unit.stop}.")
        replica.did()
        replica.units.remove(work)
        replica.engine_state = report.engine
        work.report, work.refs, work.attempts = report, refs, 0
        replica.responses += self._env.repeats * (report.dynamic.played if report.dynamic else len(played))
        self._rewards.update(report.rewards)
        if report.dynamic is not None:
            self._dynamic.update(asdict(report.dynamic))
        if self.references:
            self._unscored.append(work)
        else:
            self._finish(work)

    def _score(self) -> None:
        while self._unscored:
            ready = [w for w in self.references if w.ready and len(w.units) < _SCORED_AT_A_TIME]
            if not ready:
                return
            work = self._unscored.popleft()
            work.attempts += 1
            worker = min(ready, key=lambda w: len(w.units))
            worker.units.append(work)
            seconds, *refs = worker.actor.score.options(num_returns=1 + len(work.refs)).remote(*work.refs)
            self.ask(worker, seconds, f"score {_groups(work)}", partial(self._scored, worker, work, refs))

    def _scored(self, worker: Worker, work: Work, refs: list[Any], seconds: float) -> None:
        worker.did()
        worker.units.remove(work)
        work.refs, work.reference_s = refs, seconds
        self._finish(work)

    def _finish(self, work: Work) -> None:
        """Lets the groups of a unit wait for a batch."""
        assert work.report is not None
        # Groups that dynamic sampling played instead stand for those that were given out.
        for group, version, ref in zip(work.unit.groups, work.report.versions, work.refs, strict=True):
            if group in work.left:
                self.buffer.finish(group, version, (work, ref))
        work.refs = []  # a group's data lives as long as something waits for it

    def is_current(self, replica: ReplicaWorker) -> bool:
        """Whether a replica is there and has the published weights."""
        return replica.ready and replica.updating is None and replica.version == self.published

    def batch_metrics(self, works: Sequence[Work]) -> dict[str, float]:
        """What is known of the batch that was taken and of the work around it, named ``section/name``."""
        staleness = self.buffer.staleness()
        reports = [work.report for work in works if work.report is not None]
        metrics = {
            "staleness/max": float(max(staleness)),
            "staleness/mean": sum(staleness) / len(staleness),
            "buffer/in_flight": self.buffer.in_flight,
            "buffer/waiting": self.buffer.waiting,
            "buffer/waiting_max": self._most_waiting,
            "workers/generate_s": sum(report.generate_s / len(report.groups) for report in reports),
            "workers/reward_s": sum(report.env_s / len(report.groups) for report in reports),
            "workers/update_s": self._update_s,
            "workers/restarts_rollout": sum(worker.restarts for worker in self.replicas),
            "workers/restarts_reference": sum(worker.restarts for worker in self.references),
            "workers/groups_resampled": self._resampled,
        }
        metrics |= {f"workers/responses_rollout_{i}": worker.responses for i, worker in enumerate(self.replicas)}
        metrics |= self._rewards
        if self._rounds > 1:
            metrics |= {f"rollout/groups_{name}": float(count) for name, count in self._dynamic.items()}
            self._dynamic.clear()
        if self.references:
            metrics["workers/reference_s"] = sum(work.reference_s / len(work.unit.groups) for work in works)
        self._most_waiting = self.buffer.waiting
        return metrics

    def what_is_missing(self) -> str:
        """Where the groups of the next batch are, in words."""
        playing = [f"{r.name} {'has' if r.ready else 'is starting, with'} {len(r.units)}" for r in self.replicas]
        scoring = sum(len(worker.units) for worker in self.references) + len(self._unscored)
        lost = [f"; {w.name} was last lost with: {_first_line(w.error)}" for w in self.workers if w.error is not None]
        return (
            f"a batch of {self.buffer.groups_per_batch} groups: {self.buffer.waiting} wait, "
            f"{', '.join(playing)} units, {scoring} units are being scored{''.join(lost)}"
        )


def _groups(work: Work) -> str:
    return f"groups {work.unit.groups[0]} to {work.unit.groups[-1]}"


def _make(remote_class: Any, factory: Callable[[], Any]) -> Any:
    return remote_class.remote(factory)


def _first_line(error: BaseException) -> str:
    return str(cause_of(error)).strip().split("\n", 1)[0]

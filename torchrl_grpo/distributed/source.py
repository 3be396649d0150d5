"""``RaySource``: rollout and reference actors that work on while the trainer trains.

Three things run at once: the actors; a thread here (the *pump*), which hears what they have finished and gives them new
work; and the caller's loop, which asks for batches and publishes weights. The state is that of the ``Fleet``, and one
condition guards it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torchrl_grpo.choices import InFlight
from torchrl_grpo.distributed.actors import Replica
from torchrl_grpo.distributed.fleet import MOST_ATTEMPTS, Fleet, ReplicaWorker
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.errors import WaitedTooLongError, WorkersLostError
from torchrl_grpo.transforms.kl_scoring import KLScoring

_TICK_S = 0.5

T = TypeVar("T")


@dataclass
class RayBatch:
    """A batch as references.

    Attributes:
        groups: id of each group; with dynamic sampling, of the one that it may stand for.
        refs: reference to each group's data, a lazy stack of its sequences.
    """

    groups: tuple[int, ...]
    refs: list[Any]


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
        rounds: most plays of a unit, which then has as many times its problems to itself: more than 1 where the
            replicas' collectors sample dynamically.
        max_staleness: largest ``trainer_version - policy_version`` of a group when it is trained.
        in_flight: what happens to units that are being played when weights arrive. ``wait`` ends them before, ``keep``
            goes on with the new weights and ``abort`` has the engine begin them again: both need an engine that can.
        references_first: whether rollout actors are made only while the reference actors are there: for those that
            share an accelerator, whose free memory an engine measures while it starts.
        seed: of the engines' draws.
        release: called with each published version that no replica reads or will read any more.
        samples: gives rows of the latest batch for ``samples.jsonl``.
        actor_timeout_s: seconds in which an actor must do what it is asked; after them it is killed, and made again.
        recovery_timeout_s: how long all rollout actors, or all reference actors, may be dead before the run ends.

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
        rounds: int = 1,
        max_staleness: int,
        in_flight: InFlight = "wait",
        references_first: bool = False,
        seed: int = 0,
        release: Callable[[int], None] = lambda version: None,
        samples: Callable[[int], list[dict[str, Any]]] = lambda most: [],
        actor_timeout_s: float = 1800.0,
        recovery_timeout_s: float = 900.0,
    ) -> None:
        if groups_per_batch % unit_groups:
            raise ValueError(
                f"groups_per_batch={groups_per_batch} must be a multiple of unit_groups={unit_groups}: use "
                f"{groups_per_batch // unit_groups * unit_groups or unit_groups}."
            )
        self._fleet = Fleet(
            env,
            replicas=replicas,
            references=references,
            slots=slots,
            unit_groups=unit_groups,
            groups_per_batch=groups_per_batch,
            total_groups=total_groups,
            rounds=rounds,
            max_staleness=max_staleness,
            in_flight=in_flight,
            references_first=references_first,
            seed=seed,
            release=release,
            actor_timeout_s=actor_timeout_s,
            recovery_timeout_s=recovery_timeout_s,
        )
        self.max_staleness = max_staleness
        self._samples = samples
        # An actor that is late and then replaced takes as long as this. It is the bound of what no actor was asked for.
        self._longest_silence_s = 2 * actor_timeout_s
        self._heard_at = time.monotonic()
        self._changed = threading.Condition(threading.RLock())
        self._error: BaseException | None = None
        self._closed = False
        self._metrics: dict[str, float] = {}
        self._pump_thread = threading.Thread(target=self._pump, name="rollouts", daemon=True)

    def start(self) -> None:
        """Starts the actors; returns at once."""
        with self._changed:
            self._fleet.work()
        self._pump_thread.start()

    def wait_until_ready(self) -> None:
        """Waits until the parts of all actors are made.

        Raises:
            WorkersLostError: an actor died, or was not ready in time.
            Exception: what a factory raised.
        """
        workers = self._fleet.workers
        self._wait(
            lambda: all(worker.ready for worker in workers),
            lambda: f"{', '.join(worker.name for worker in workers if not worker.ready)} to be ready",
        )

    def next_batch(self) -> RayBatch:
        """The next batch, when it is there.

        Raises:
            WorkersLostError: all actors of a kind have been dead for too long, or a unit ended every actor it met.
            WaitedTooLongError: no batch, and no sign of life from any actor.
            Exception: what an actor's work raised.
        """
        taken = self._wait(self._fleet.take, self._fleet.what_is_missing)
        with self._changed:
            self._metrics = self._fleet.batch_metrics([work for _, work, _ in taken])
        return RayBatch(tuple(group for group, _, _ in taken), [ref for _, _, ref in taken])

    def publish(self, weights: Any, version: int) -> None:
        """Gives out the weights of a trained batch. Returns at once: each replica takes them when it can.

        Args:
            weights: reference to a ``WeightHandle``.
            version: their version.
        """
        with self._changed:
            self._raise_error()
            self._fleet.publish(weights, version)

    def update_reference(self, weights: Any) -> None:
        """Replaces the weights of the reference actors, for all that they score from now on.

        Args:
            weights: reference to a ``WeightHandle`` that is there as long as the reference.
        """
        with self._changed:
            self._fleet.update_reference(weights)

    def metrics(self) -> dict[str, float]:
        """See ``RolloutSource``."""
        return dict(self._metrics)

    def samples(self, most: int) -> list[dict[str, Any]]:
        """See ``RolloutSource``."""
        return self._samples(most)

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Evaluates the published weights on one replica, as ``Evaluator.evaluate`` does.

        Raises:
            WorkersLostError: replica after replica was lost over it.
        """
        version, metrics, rows = self._ask_any("evaluate", sampled)
        if version != self._fleet.published:
            raise RuntimeError(f"weights of version {version} were evaluated instead of {self._fleet.published}.")
        return metrics, rows

    def probes(self) -> list[Any]:
        """What ``RolloutActor.probe`` of each replica gives, with the published weights.

        A replica that is being made again is left out, unless there is no other.
        """
        there = [replica for replica in self._fleet.replicas if replica.ready]
        answers = [answer for replica in there for answer in self._ask(replica, "probe")]
        return answers or [self._ask_any("probe")]

    def pids(self) -> dict[str, int]:
        """The process of each actor that is ready, by its name."""
        with self._changed:
            return {worker.name: worker.pid for worker in self._fleet.workers if worker.ready}

    def state_dict(self) -> dict[str, Any]:
        """See ``RolloutSource``. Groups that no batch has taken are drawn again after a restore."""
        with self._changed:
            return self._fleet.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave; before ``start``."""
        with self._changed:
            self._fleet.load_state_dict(state)

    def close(self) -> None:
        """Ends all actors. May be called again."""
        import ray

        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._fleet.events.wake()
        if self._pump_thread.is_alive():
            self._pump_thread.join(timeout=10)
        closing = [replica.actor.close.remote() for replica in self._fleet.replicas if replica.ready]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=10)
        for worker in self._fleet.workers:
            worker.kill()

    def _pump(self) -> None:
        while True:
            handler = self._fleet.events.next(_TICK_S)
            with self._changed:
                if self._closed:
                    return
                if self._error is None:
                    try:
                        if handler is not None:
                            self._heard_at = time.monotonic()
                            handler()
                        self._fleet.work()
                    except BaseException as error:  # the loop's thread raises it
                        self._error = error
                self._changed.notify_all()

    def _ask_any(self, method: str, *arguments: Any) -> Any:
        """The answer of a replica that has the published weights; of another one if it is lost."""
        fleet = self._fleet
        for _ in range(MOST_ATTEMPTS):
            replica = self._wait(
                lambda: next(filter(fleet.is_current, fleet.replicas), None),
                lambda: f"a rollout actor to have the weights of version {fleet.published}",
            )
            answers = self._ask(replica, method, *arguments)
            if answers:
                return answers[0]
        raise WorkersLostError(f"{MOST_ATTEMPTS} rollout actors were lost while they were to {method}.")

    def _ask(self, replica: ReplicaWorker, method: str, *arguments: Any) -> list[Any]:
        """Asks a replica as soon as it has the published weights; its answer, or nothing if it is lost before."""
        fleet, actor, answers = self._fleet, replica.actor, list[Any]()
        self._wait(
            lambda: fleet.is_current(replica) or replica.actor is not actor,
            lambda: f"{replica.name} to have the weights of version {fleet.published}",
        )
        with self._changed:
            if replica.actor is actor and fleet.is_current(replica):
                fleet.ask(replica, getattr(actor, method).remote(*arguments), method, answers.append)
        self._wait(lambda: answers or replica.actor is not actor, lambda: f"{replica.name} to {method}")
        return answers

    def _wait(self, get: Callable[[], T | None], what: Callable[[], str]) -> T:
        """Waits until ``get``, which is called with the condition held, gives something that is true."""
        start = time.monotonic()
        with self._changed:
            while True:
                self._raise_error()
                value = get()
                if value:
                    return value
                if time.monotonic() - max(start, self._heard_at) > self._longest_silence_s:
                    raise WaitedTooLongError(
                        f"heard nothing from any actor for {self._longest_silence_s:g} s, while waiting for {what()}."
                    )
                self._changed.wait(timeout=1.0)

    def _raise_error(self) -> None:
        if self._closed:
            raise RuntimeError("the source is closed: make a new one.")
        if self._error is not None:
            raise self._error

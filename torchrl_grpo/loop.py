"""The whole training loop of GRPO (arXiv 2402.03300), synchronous and asynchronous.

::

      draw ------> play ------> score ------> queue ------> train ------> publish
     driver      samplers     reference     staleness      learner     new weights
       ^                                        |                           |
       |     a group whose rewards are all      |                           |
       +---- equal frees its slot <-------------+  (dynamic sampling)       |
       +---- slots are freed when the weights that their groups trained are published

``next_batch`` waits until the queue has a batch. The queue admits ``(max_staleness + 1)`` batches
of groups, so samplers wait for ``publish`` when they are that far ahead. With a bound of 0
everything takes turns (``grpo.py``). With a larger one, samplers, reference models and learner work
at the same time (``grpo-async.py``). The loop is the same for both.

What was left out of GRPO, and why: there is no model of the old policy (the engine gives the
log-probs that it sampled with). The outer loop, which makes the trained policy the reference model,
is off unless ``ref_model.refresh_every`` asks for it (most recipes since do without). PPO's critic
is a head on the policy.

The loop calls observers at each event: metrics, console, checkpoints, alarms and the timeline are
in ``assembly/observers.py``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from torchrl_grpo.host.interrupts import delivered, shielded

if TYPE_CHECKING:
    from torchrl_grpo.learner import Learner
    from torchrl_grpo.runtime.learner import RayLearner
    from torchrl_grpo.runtime.rollouts import Rollouts

    AnyLearner: TypeAlias = Learner | RayLearner

__all__ = ["Observer", "Schedule", "fit"]

Metrics = Mapping[str, float]
SampleRows = Sequence[Mapping[str, Any]]

_LONGEST_SHIELD_S = 20.0
"""Seconds that a training step may continue after the signal that ends the run."""
_LARGEST_ON_POLICY_KL = 0.1
"""Nats per token. Rounding gives about 1e-12 in float32 and 1e-3 with an engine in bfloat16."""
_NO_ROW: Mapping[str, Any] = MappingProxyType({})


class Observer:
    """Listener to a run. Its methods are called in the order of the steps, in the loop's thread.

    An exception that a method raises ends the run, like an error of the loop itself.
    """

    def stage(self, kind: str, step: int, what: str) -> None:
        """A stage of a step begins and the previous one ends: ``("train", 7, "train step 7")``."""

    def began(self, step: int, metrics: Metrics) -> None:
        """The engine has its first weights, and they are evaluated.

        ``metrics`` is empty if a resumed run has already logged them.
        """

    def taken(self) -> None:
        """The rollouts delivered the batch of the next step."""

    def trained(self, metrics: Metrics) -> None:
        """The learner has trained the batch. A signal is held until this method returns."""

    def refreshed(self, version: int) -> None:
        """The reference model has the weights of this version."""

    def evaluated(self, step: int, metrics: Metrics, rows: SampleRows) -> None:
        """The weights of a step were evaluated on the test split."""

    def stepped(self, step: int, metrics: Metrics) -> None:
        """A step is complete. A signal is held until all observers have been called."""

    def checked(self, step: int) -> None:
        """The step is recorded. An observer may end the run here because of its metrics."""

    def interrupted(self) -> None:
        """The run ends early because of an error or a signal, which is raised afterwards."""

    def ended(self, step: int) -> None:
        """The run has completed all steps, or has reached its time limit."""


@dataclass(frozen=True)
class Schedule:
    """Length of a run, and how often it evaluates, saves, exports and refreshes its reference.

    Attributes:
        num_batches: steps of the run; one step trains one batch.
        evaluation_frequency: steps between evaluations; 0 evaluates only before and after the run.
        checkpoint_frequency: steps between checkpoints; 0 saves only at the end.
        export_frequency: steps between models that are written next to the checkpoints; 0 writes
            only the one at the end.
        refresh_every: steps between updates of the reference model; None disables them.
        reference_version: version of a resumed run's reference weights; 0 is the base model.
        on_policy: whether a batch is one optimizer step, so that the first step trains what its own
            weights sampled.
        ends_at: time limit, in the clock of ``time.monotonic``.
    """

    num_batches: int
    evaluation_frequency: int = 0
    checkpoint_frequency: int = 0
    export_frequency: int = 0
    refresh_every: int | None = None
    reference_version: int = 0
    on_policy: bool = False
    ends_at: float | None = None

    def evaluates(self, step: int) -> bool:
        """Return whether a step's weights are evaluated, besides the first and last ones."""
        return _is_due(step, self.evaluation_frequency)

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is written after this step, besides the last one."""
        return _is_due(step, self.checkpoint_frequency)

    def exports(self, step: int) -> bool:
        """Return whether the model of this step is exported, besides the last one."""
        return _is_due(step, self.export_frequency) and step < self.num_batches

    def left(self, done: int) -> int:
        """Return the number of steps that remain after ``done`` steps."""
        return max(0, self.num_batches - done)

    def num_due(self, frequency: int, done: int) -> int:
        """Return how many steps after ``done`` and before the last one are multiples of
        ``frequency``.
        """
        return max(0, (self.num_batches - 1) // frequency - done // frequency) if frequency else 0

    def checkpoints(self, done: int) -> int:
        """Return the number of checkpoints that a run writes after ``done`` steps."""
        return self.num_due(self.checkpoint_frequency, done) + bool(self.left(done))

    def leaves_time_for(self, seconds: float) -> bool:
        """Return whether a step of this many seconds ends before the time limit."""
        return self.ends_at is None or time.monotonic() + seconds <= self.ends_at

    def refreshes(self, version: int) -> bool:
        """Return whether the reference model gets the weights of this version."""
        return version > 0 and _is_due(version, self.refresh_every)


def _is_due(step: int, frequency: int | None) -> bool:
    return bool(frequency) and step % (frequency or 1) == 0


def fit(
    learner: AnyLearner,
    rollouts: Rollouts,
    schedule: Schedule,
    observers: Sequence[Observer] = (),
    *,
    last_row: Mapping[str, Any] = _NO_ROW,
) -> None:
    """Train until ``learner.version`` is ``schedule.num_batches`` or the time limit is reached.
    Without batches, only evaluate.

    The weights are published once before the first batch, so that engine and trainer start equal.
    The test split is evaluated before and after the run.

    Args:
        learner: trains, in this process or in others.
        rollouts: delivers the batches and takes the weights.
        schedule: length of the run, and how often it evaluates and saves.
        observers: called at each event, in this order.
        last_row: latest row of metrics.jsonl, if the run resumes in its own folder.

    Raises:
        RuntimeError: engine and trainer differ by more than rounding.
        NonFiniteError: training has diverged.
        NotSavedError: there is no room for the last checkpoint, or its folder cannot be written to.
        Exception: what an observer raises.
    """
    notify = _Observers(observers)
    first = step = learner.version
    longest_s = 0.0
    _begin(learner, rollouts, schedule, notify, last_row)
    try:
        while schedule.left(step) and schedule.leaves_time_for(longest_s):
            step += 1
            with delivered():
                start = time.perf_counter()
                notify.stage("wait", step, f"sample and score the batch of step {step}")
                groups = rollouts.next_batch()
                notify.taken()
                metrics = {"time/wait_s": time.perf_counter() - start} | rollouts.metrics()
                notify.stage("train", step, f"train step {step}")
                with shielded(_LONGEST_SHIELD_S):
                    metrics |= learner.train_groups(*groups)
                    notify.trained(metrics)
                if step == first + 1 and schedule.on_policy:
                    check_on_policy(metrics)
                refresh = schedule.refreshes(step)
                metrics |= _publish(learner, rollouts, schedule, notify, step, refresh=refresh)
                metrics["time/step_s"] = time.perf_counter() - start
                metrics["throughput/trained_tokens_per_s"] = (
                    metrics["rollout/tokens"] / metrics["time/step_s"]
                )
                is_last = step == schedule.num_batches
                if is_last or schedule.evaluates(step):
                    metrics |= _evaluate(rollouts, notify, step, sampled=is_last)
                notify.stage("save", step, f"write the outputs of step {step}")
                with shielded():
                    notify.stepped(step, metrics)
                longest_s = max(longest_s, time.perf_counter() - start)
                notify.checked(step)
    except BaseException:
        notify.interrupted()
        raise
    notify.stage("save", step, "save")
    with shielded():
        notify.ended(step)


def _begin(
    learner: AnyLearner,
    rollouts: Rollouts,
    schedule: Schedule,
    notify: Observer,
    last_row: Mapping[str, Any],
) -> None:
    """Give the engine the learner's weights, and evaluate them unless a resumed run has done so."""
    step = learner.version
    refresh = 0 < step == schedule.reference_version or schedule.refreshes(step)
    metrics = _publish(learner, rollouts, schedule, notify, step, refresh=refresh)
    is_logged = last_row.get("step") == step and schedule.num_batches > 0
    has_evaluation = any(name.startswith("eval/") for name in last_row)
    is_due = step == 0 or schedule.evaluates(step)
    evaluation = {}
    if not is_logged or (is_due and not has_evaluation):
        evaluation = _evaluate(rollouts, notify, step, sampled=not is_logged or step == 0)
    notify.began(step, metrics | evaluation if evaluation or not is_logged else {})


def _publish(
    learner: AnyLearner,
    rollouts: Rollouts,
    schedule: Schedule,
    notify: Observer,
    version: int,
    *,
    refresh: bool,
) -> dict[str, float]:
    """Give the samplers and, with ``refresh``, the reference model the weights of this version."""
    if refresh:  # before anything is sampled with the new weights
        rollouts.update_reference(learner.reference_weights())
        notify.refreshed(version)
    notify.stage("publish", version, f"give the engine the weights of step {version}")
    start = time.perf_counter()
    rollouts.publish(learner.weights(), version)
    return {
        "time/sync_s": time.perf_counter() - start,
        "sync/receipt_s": rollouts.receipt_s,
    }


def _evaluate(
    rollouts: Rollouts, notify: Observer, step: int, *, sampled: bool
) -> dict[str, float]:
    """Return the evaluation of the published weights; empty without a test split."""
    notify.stage("evaluate", step, f"evaluate the weights of step {step}")
    start = time.perf_counter()
    metrics, rows = rollouts.evaluate(sampled=sampled)
    if metrics:
        metrics["time/eval_s"] = time.perf_counter() - start
        notify.evaluated(step, metrics, rows)
    return metrics


def check_on_policy(metrics: Mapping[str, float]) -> None:
    """Check the metrics of the first step, which trained what its own weights sampled.

    Raises:
        RuntimeError: the engine samples from another distribution than the trainer computes.
    """
    kl = metrics.get("train/kl_k3_to_inference", 0.0)
    if metrics.get("staleness/max") == 0 and kl > _LARGEST_ON_POLICY_KL:
        raise RuntimeError(
            "the first step trained what its own weights sampled, but the KL to the engine's "
            f"policy is {kl:.3g} nats per token, more than the {_LARGEST_ON_POLICY_KL} that "
            "rounding can explain: engine and trainer compute different distributions. Use "
            "another inference_model.backend or dtype, or another model."
        )


class _Observers(Observer):
    """All observers of a run: each call goes to one after another."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        for name in filter(str.isalpha, vars(Observer)):
            if name not in vars(_Observers):
                setattr(self, name, partial(self._call, name))

    def _call(self, name: str, *arguments: Any) -> None:
        for observer in self._observers:
            getattr(observer, name)(*arguments)

    def interrupted(self) -> None:
        """Call all observers in order, even if one raises or a signal arrives."""
        with ExitStack() as stack:
            for observer in reversed(self._observers):
                stack.callback(observer.interrupted)

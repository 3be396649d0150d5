"""The whole training loop of GRPO (arXiv 2402.03300), synchronous and asynchronous.

::

      draw ------> play ------> score ------> queue ------> train ------> publish
     driver      samplers     reference     staleness      learner     new weights
       ^                                        |                           |
       |     a group whose rewards are all      |                           |
       +---- equal gives its place back <-------+  (dynamic sampling)       |
       +---- places are free again when the weights that they trained are published

``next_batch`` waits until the queue has a batch. The queue admits ``(max_staleness + 1)`` batches
of groups, so samplers wait for ``publish`` when they are that far ahead. With a bound of 0
everything takes turns, which is ``grpo.py``; with a larger one samplers, reference models and
learner work at the same time, which is ``grpo-async.py``. Nothing here knows which.

What was left out of GRPO, and why: there is no value network (the mean of the group is the
baseline) and no model of the old policy (the engine gives the log-probs that it sampled with). The
outer loop, which makes the trained policy the reference model, is off unless
``ref_model.refresh_every`` asks for it (most recipes since do without).

The loop says what happens, and observers listen: metrics, console, checkpoints, alarms and the
timeline are ``assembly/observers.py``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torchrl_grpo.host.interrupts import shielded

if TYPE_CHECKING:
    from torchrl_grpo.learner import Learner
    from torchrl_grpo.runtime.learner import RayLearner
    from torchrl_grpo.runtime.rollouts import Rollouts

    AnyLearner = Learner | RayLearner

__all__ = ["Observer", "Schedule", "fit"]

_LONGEST_SHIELD_S = 20.0
"""Seconds that a training step may continue after the signal that ends the run."""
_LARGEST_ON_POLICY_KL = 0.1
"""Nats per token. Rounding gives about 1e-12 in float32 and 1e-3 with an engine in bfloat16."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Observer:
    """Listener to a run. Its methods are called in the order of the steps, in the thread of the
    loop.

    What a method raises ends the run, as an error of the loop itself would.
    """

    def stage(self, kind: str, step: int, what: str) -> None:
        """A stage of a step begins, and the one before has ended: ``("train", 7, "train step 7")``."""

    def began(self, step: int, metrics: Mapping[str, float]) -> None:
        """The engine has its first weights, which were evaluated unless the run's folder has that
        evaluation.
        """

    def taken(self) -> None:
        """The rollouts delivered the batch of the next step."""

    def trained(self, metrics: Mapping[str, float]) -> None:
        """The learner has trained the batch; a signal waits until this method returns."""

    def refreshed(self, version: int) -> None:
        """The reference model has the weights of this version."""

    def evaluated(
        self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """The weights of a step were evaluated on the test split."""

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is complete; a signal waits until all observers were told."""

    def checked(self, step: int) -> None:
        """The step was recorded: the place to end the run because of its metrics."""

    def interrupted(self) -> None:
        """The run ends early, for the error or the signal that is being raised."""

    def ended(self, step: int) -> None:
        """The run has completed all steps, or is out of time."""


@dataclass(frozen=True)
class Schedule:
    """Length of a run, and frequencies of evaluations, checkpoints, exports and reference
    refreshes.

    Attributes:
        num_batches: steps of the run; one step trains one batch.
        evaluation_frequency: between evaluations; 0 is before and after the run alone.
        checkpoint_frequency: between checkpoints; 0 is at the end alone.
        export_frequency: between models that are written beside the checkpoints; 0 is none but the
            one at the end.
        refresh_every: between updates of the reference model with the trained weights; None is
            never.
        reference_version: of the weights that the reference model of a resumed run had; 0 is the
            base model.
        mismatch_tolerance: largest mean difference of the log-probs of engine and trainer after a
            weight sync, in nats; None measures none.
        verify_tolerance: the same after the first sync, where weights travel in a way that is on
            trial: with a larger one they are sent again in another way. None where no way is on
            trial.
        on_policy: whether a batch is one optimizer step, so that the first one trains what its own
            weights sampled.
        ends_at: when the run's time is over (``time.monotonic``).
    """

    num_batches: int
    evaluation_frequency: int = 0
    checkpoint_frequency: int = 0
    export_frequency: int = 0
    refresh_every: int | None = None
    reference_version: int = 0
    mismatch_tolerance: float | None = None
    verify_tolerance: float | None = None
    on_policy: bool = False
    ends_at: float | None = None

    def evaluates(self, step: int) -> bool:
        """Whether the weights after this many steps are evaluated, apart from the first and last
        ones.
        """
        return _is_turn(step, self.evaluation_frequency)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is written after this step, apart from the last one."""
        return _is_turn(step, self.checkpoint_frequency)

    def exports(self, step: int) -> bool:
        """Whether the model of this step is written beside the one of the end."""
        return _is_turn(step, self.export_frequency) and step < self.num_batches

    def left(self, done: int) -> int:
        """Return the number of steps that remain."""
        return max(0, self.num_batches - done)

    def turns(self, frequency: int, done: int) -> int:
        """Return how often something that happens every so many steps occurs after ``done`` steps
        and before the last one.
        """
        return max(0, (self.num_batches - 1) // frequency - done // frequency) if frequency else 0

    def checkpoints(self, done: int) -> int:
        """Return the number of checkpoints that a run writes after this many steps."""
        return self.turns(self.checkpoint_frequency, done) + bool(self.left(done))

    def leaves_time_for(self, seconds: float) -> bool:
        """Whether a step of this many seconds ends before the time limit."""
        return self.ends_at is None or time.monotonic() + seconds <= self.ends_at

    def refreshes(self, version: int) -> bool:
        """Whether the reference model gets the weights of this version."""
        return version > 0 and _is_turn(version, self.refresh_every)


def _is_turn(step: int, frequency: int | None) -> bool:
    return bool(frequency) and step % (frequency or 1) == 0


def fit(
    learner: AnyLearner,
    rollouts: Rollouts,
    schedule: Schedule,
    observers: Sequence[Observer] = (),
    *,
    written: Mapping[str, Any] = _NOTHING,
) -> None:
    """Train until ``learner.version`` is ``schedule.num_batches`` or time is over; with no batches,
    evaluate only.

    The weights are published once before the first batch, so that engine and trainer start equal.
    The test split is evaluated before the run and after it.

    Args:
        learner: makes the steps, in this process or in others.
        rollouts: gives the batches and takes the weights.
        schedule: how long, and how often.
        observers: are told what happens, in this order.
        written: the latest row of metrics in the run's folder, if the run goes on in its own
            folder.

    Raises:
        RuntimeError: engine and trainer differ by more than rounding.
        NonFiniteError: training has diverged.
        NotSavedError: there is no room for the last checkpoint, or its folder cannot be written to.
        Exception: what an observer raises.
    """
    tell = _Everyone(observers)
    first = step = learner.version
    longest_s = 0.0
    _begin(learner, rollouts, schedule, tell, written)
    try:
        while schedule.left(step) and schedule.leaves_time_for(longest_s):
            step, start = step + 1, time.perf_counter()
            tell.stage("wait", step, f"sample and score the batch of step {step}")
            groups = rollouts.next_batch()
            tell.taken()
            metrics = {"time/wait_s": time.perf_counter() - start} | rollouts.metrics()
            tell.stage("train", step, f"train step {step}")
            with shielded(_LONGEST_SHIELD_S):
                metrics |= learner.train_groups(*groups)
                tell.trained(metrics)
            if step == first + 1 and schedule.on_policy:
                _check_on_policy(metrics)
            metrics |= _publish(
                learner, rollouts, schedule, tell, step, refresh=schedule.refreshes(step)
            )
            metrics["time/step_s"] = time.perf_counter() - start
            metrics["throughput/trained_tokens_per_s"] = (
                metrics["rollout/tokens"] / metrics["time/step_s"]
            )
            if step == schedule.num_batches or schedule.evaluates(step):
                metrics |= _evaluate(rollouts, tell, step, sampled=step == schedule.num_batches)
            tell.stage("save", step, f"write what step {step} gave")
            with shielded():
                tell.stepped(step, metrics)
            longest_s = max(longest_s, time.perf_counter() - start)
            tell.checked(step)
    except BaseException:
        tell.interrupted()
        raise
    tell.stage("save", step, "save")
    with shielded():
        tell.ended(step)


def _begin(
    learner: AnyLearner,
    rollouts: Rollouts,
    schedule: Schedule,
    tell: Observer,
    written: Mapping[str, Any],
) -> None:
    """Give the engine the learner's weights, and evaluate them unless the run's folder has that
    evaluation.
    """
    step = learner.version
    refresh = 0 < step == schedule.reference_version or schedule.refreshes(step)
    metrics = _publish(
        learner, rollouts, schedule, tell, step, refresh=refresh, trial=schedule.verify_tolerance
    )
    logged = written.get("step") == step and schedule.num_batches > 0
    known = any(name.startswith("eval/") for name in written) or not (
        step == 0 or schedule.evaluates(step)
    )
    found = (
        {} if logged and known else _evaluate(rollouts, tell, step, sampled=not logged or step == 0)
    )
    tell.began(step, metrics | found if found or not logged else {})


def _publish(
    learner: AnyLearner,
    rollouts: Rollouts,
    schedule: Schedule,
    tell: Observer,
    version: int,
    *,
    refresh: bool,
    trial: float | None = None,
) -> dict[str, float]:
    """Give the samplers, and the reference model if it is its turn, the weights of this version."""
    if refresh:  # before anything is sampled with the new weights
        rollouts.update_reference(learner.reference_weights())
        tell.refreshed(version)
    tell.stage("publish", version, f"give the engine the weights of step {version}")
    start = time.perf_counter()
    rollouts.publish(learner.weights(), version)
    if trial is not None:
        mean, _ = _differences(learner, rollouts)
        if not mean <= trial:
            why = f"with these weights, log-probs of engine and trainer differ by {mean:.3g} nats on average"
            rollouts.publish(learner.resend(version, why), version)
    metrics = {"time/sync_s": time.perf_counter() - start}
    tolerance = schedule.mismatch_tolerance
    if tolerance is None:
        return metrics
    mean, largest = check_mismatch(learner, rollouts, tolerance)
    return metrics | {"sync/mismatch_mean": mean, "sync/mismatch_max": largest}


def _evaluate(rollouts: Rollouts, tell: Observer, step: int, *, sampled: bool) -> dict[str, float]:
    """Return the evaluation of the published weights; empty without a test split."""
    tell.stage("evaluate", step, f"evaluate the weights of step {step}")
    start = time.perf_counter()
    metrics, rows = rollouts.evaluate(sampled=sampled)
    if metrics:
        metrics["time/eval_s"] = time.perf_counter() - start
        tell.evaluated(step, metrics, rows)
    return metrics


def check_mismatch(
    learner: AnyLearner, rollouts: Rollouts, tolerance: float
) -> tuple[float, float]:
    """Return the mean and largest difference of engine and trainer log-probs on a few sampled
    tokens, in nats.

    Raises:
        RuntimeError: the mean is more than the tolerance.
    """
    mean, largest = _differences(learner, rollouts)
    if not mean <= tolerance:
        raise RuntimeError(
            f"after a weight sync, log-probs of engine and trainer differ by {mean:.3g} on average "
            f"({largest:.3g} at most), more than inference_model.check_sync_tolerance={tolerance}: "
            "the engine does not have the trainer's weights, or computes too coarsely: use "
            "inference_model.dtype=float32, or another backend."
        )
    return mean, largest


def _differences(learner: AnyLearner, rollouts: Rollouts) -> tuple[float, float]:
    """Return the mean and the largest difference of log-probs, of the sampler where it is largest."""
    found = [learner.mismatch(probe) for probe in rollouts.probes()]
    means, largest = zip(*found, strict=True)
    return max(means, key=_nan_last), max(largest, key=_nan_last)


def _nan_last(value: float) -> tuple[bool, float]:
    """Sort key that puts NaN last."""
    return math.isnan(value), value


def _check_on_policy(metrics: dict[str, float]) -> None:
    """End a run whose engine samples from another distribution than the trainer computes."""
    kl = metrics.get("train/kl_k3_to_inference", 0.0)
    if metrics.get("staleness/max") == 0 and kl > _LARGEST_ON_POLICY_KL:
        raise RuntimeError(
            "the first step trained what its own weights sampled, and yet the KL to the engine's "
            f"policy is {kl:.3g} nats per token, more than the {_LARGEST_ON_POLICY_KL} that "
            "rounding can explain: engine and trainer compute different distributions. Use "
            "another inference_model.backend or dtype, or another model."
        )


class _Everyone(Observer):
    """All observers, called as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        for name in {name for name in vars(Observer) if not name.startswith("_")} - {"interrupted"}:
            setattr(
                self, name, partial(self._tell, [getattr(observer, name) for observer in observers])
            )

    @staticmethod
    def _tell(listening: Sequence[Callable[..., None]], *given: Any) -> None:
        for hear in listening:
            hear(*given)

    def interrupted(self) -> None:
        """Tell all observers, even if one raises or a signal arrives."""
        with ExitStack() as stack:
            for observer in reversed(self._observers):
                stack.callback(observer.interrupted)

"""``fit``: the only training loop.

It consumes batches from a ``RolloutSource`` and produces weights: next_batch -> train_batch -> publish, until the run
has its number of steps. A synchronous source samples inside ``next_batch``, an asynchronous one all the time; nothing
here knows which, and nothing here looks inside a batch: it may be references to data that is elsewhere. What unblocks
the loop is the source: a batch is ready, or a deadline has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchrl._utils import logger as torchrl_logger

from torchrl_grpo.errors import FolderLostError, NonFiniteError, NoSignalError, NotSavedError, RunLostError
from torchrl_grpo.host import stalls
from torchrl_grpo.host.files import METRICS_FILE, read_jsonl
from torchrl_grpo.host.interrupts import shielded
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.reporting.alarms import Alarms
from torchrl_grpo.reporting.console import Console
from torchrl_grpo.reporting.metrics import MetricsLogger
from torchrl_grpo.reporting.records import one_of_each

__all__ = ["Schedule", "fit"]

_SHOWN = 4
_LONGEST_SHIELD_S = 20.0
"""Seconds for which a training step may go on after the signal that ends the run."""
_LARGEST_ON_POLICY_KL = 0.1
"""Nats per token. Rounding gives about 1e-12 in float32 and 1e-3 with an engine in bfloat16."""


class RolloutSource(Protocol):
    """Gives batches of finished, scored sequences and takes new weights.

    ``learner_version - policy_version`` of a sequence that ``next_batch`` returns never exceeds ``max_staleness``.
    """

    @property
    def max_staleness(self) -> int: ...

    def next_batch(self) -> Any:
        """The next batch, as the learner that goes with this source takes it."""

    def publish(self, handle: Any, version: int) -> None:
        """Gives the samplers the weights of a trained batch, as that learner gives them."""

    def update_reference(self, handle: Any) -> None:
        """Makes other weights the reference model's, for all that is scored from here on."""

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """What ``Evaluator.evaluate`` gives for the published weights; nothing without a test split."""

    def probes(self) -> list[Any]:
        """What ``Sampler.probe`` gives for each sampler, with the published weights."""

    def metrics(self) -> dict[str, float]:
        """What is known here of the latest batch, named ``section/name``: seconds, staleness, counts."""

    def spans(self) -> list[dict[str, Any]]:
        """What the actors did since this was last called, as spans of ``timeline.jsonl`` (``RolloutReport.spans``)."""

    def state_dict(self) -> dict[str, Any]:
        """What the next batches depend on, apart from the weights.

        ``drawing`` (where the problems are), ``ahead`` (group and problem of what was drawn and no batch has taken) and
        ``engines`` (the state of each, None where it cannot be told).
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave."""

    def close(self) -> None:
        """Ends the samplers. May be called again."""


class LearnerLike(Protocol):
    """What ``fit`` asks of a learner, in this process or in others. ``Learner`` says what each member means."""

    @property
    def version(self) -> int: ...

    @property
    def resumable(self) -> bool: ...

    def train_batch(self, batch: Any) -> dict[str, float]: ...

    def samples(self, most: int | None) -> list[dict[str, Any]]: ...

    def weights(self) -> Any: ...

    def reference_weights(self) -> Any: ...

    def mismatch(self, probe: Any) -> tuple[float, float]: ...

    def save(self, checkpointer: Checkpointer, source: dict[str, Any]) -> Path: ...


@dataclass(frozen=True)
class Schedule:
    """How long a run is, and what happens how often; frequencies are steps between two events.

    Attributes:
        num_batches: steps of the run; one step trains one batch.
        sequences_per_batch: for the progress bar.
        evaluation_frequency: between evaluations; 0 is before and after the run alone.
        checkpoint_frequency: between checkpoints; 0 is at the end alone.
        export_frequency: between models that are written beside them; 0 is none.
        sample_frequency: between tables of samples.
        sample_rows: samples that are written then, rounded up to whole groups; None is all.
        refresh_every: between updates of the reference model with the trained weights; None is never.
        reference_version: of the weights that the reference model of a resumed run had; 0 is the base model.
        mismatch_tolerance: largest mean difference of the log-probs of engine and trainer after a weight sync, in nats;
            None measures none.
        on_policy: whether a batch is one optimizer step, so that the first one trains what its own weights sampled.
        max_steps_without_signal: steps in a row without a difference of rewards in any group that end the run; None
            never does.
        ends_at: when the run's time is over (``time.monotonic``).
    """

    num_batches: int
    sequences_per_batch: int
    evaluation_frequency: int = 0
    checkpoint_frequency: int = 0
    export_frequency: int = 0
    sample_frequency: int = 50
    sample_rows: int | None = 32
    refresh_every: int | None = None
    reference_version: int = 0
    mismatch_tolerance: float | None = None
    on_policy: bool = False
    max_steps_without_signal: int | None = None
    ends_at: float | None = None

    def evaluates(self, step: int) -> bool:
        """Whether the weights after so many steps are evaluated, apart from the first and last ones."""
        return self.evaluation_frequency > 0 and step % self.evaluation_frequency == 0

    def refreshes(self, version: int) -> bool:
        """Whether the reference model gets the weights of this version."""
        return self.refresh_every is not None and version > 0 and version % self.refresh_every == 0


class _Saver:
    """Writes checkpoints, each with the state that the source had when the trained batch was taken.

    Attributes:
        reference_version: of the weights that the reference model has.
    """

    reference_version = 0

    def __init__(
        self, learner: LearnerLike, source: RolloutSource, checkpointer: Checkpointer, export: Callable[[], Any]
    ) -> None:
        self._learner, self._source, self._checkpointer, self._export = learner, source, checkpointer, export
        self._first = self._saved = learner.version
        self._evaluated: dict[int, dict[str, float]] = {}
        self._states = {learner.version: source.state_dict()}  # by the version of the learner that it goes with

    def batch_taken(self) -> None:
        version = self._learner.version
        self._states = {version: self._states[version], version + 1: self._source.state_dict()}

    def save(self) -> None:
        """Saves, unless that is done; the middle of a step is not a state to go on from."""
        version = self._learner.version
        if not self._learner.resumable:
            some = self._saved != self._first
            last = f"the last checkpoint is of step {self._saved}" if some else "no checkpoint was written"
            torchrl_logger.warning(f"stopped inside step {version + 1}: {last}.")
        elif self._saved != version:
            state = self._states[version] | {"reference_version": self.reference_version}
            self._checkpointer.metrics = self._evaluated.get(version, {})
            self._learner.save(self._checkpointer, state)
            self._saved = version

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Notes how the current weights did."""
        self._evaluated = {self._learner.version: metrics}

    def save_or_say_why(self, reasons: type[Exception] | tuple[type[Exception], ...]) -> None:
        """Saves, or says in one line why there is no checkpoint of this step."""
        try:
            self.save()
        except reasons as error:
            last = self._checkpointer.latest()
            before = "there is none before it" if last is None else f"the one before it is {last.name}"
            torchrl_logger.warning(f"Step {self._learner.version} is not saved, {before}: {error}.")

    def export_or_say_why(self) -> None:
        """Writes the model of this step, or says in one line why it is not there."""
        self._checkpointer.metrics = self._evaluated.get(self._learner.version, {})
        try:
            self._export()
        except NotSavedError as error:
            torchrl_logger.warning(f"The model of step {self._learner.version} is not written: {error}.")


class _Steps:
    """The steps of a run, and what is written of them.

    Args:
        learner, source, saver, logger, console, schedule, check_folder: see ``fit``.
    """

    def __init__(
        self,
        learner: LearnerLike,
        source: RolloutSource,
        saver: _Saver,
        logger: MetricsLogger,
        console: Console,
        schedule: Schedule,
        check_folder: Callable[[], None],
    ) -> None:
        self._learner, self._source, self._saver = learner, source, saver
        self._check_folder = check_folder
        self._logger, self._console, self._schedule = logger, console, schedule
        self._first = learner.version
        self._unlogged: dict[str, float] | None = None  # of a step that is trained and not written down
        self._longest_s = 0.0
        self._total = schedule.num_batches * schedule.sequences_per_batch
        self._spans: list[dict[str, Any]] = []  # of the timeline, the last one without its end
        self._alarms = Alarms()
        for row in read_jsonl(logger.directory / METRICS_FILE):  # of a run that goes on in its own folder
            self._alarms.take(row)

    def begin(self) -> None:
        """Gives the engine the learner's weights, and evaluates them."""
        step, schedule = self._first, self._schedule
        metrics = self._publish(step, refresh=0 < step == schedule.reference_version or schedule.refreshes(step))
        self._console.start(step * schedule.sequences_per_batch, self._total)
        row = self._logger.last_row  # a run that goes on in its own folder has done what it did before
        logged = row.get("step") == step and schedule.num_batches > 0
        evaluated = any(name.startswith("eval/") for name in row) or not (step == 0 or schedule.evaluates(step))
        found = {} if logged and evaluated else self._evaluate(step, sampled=not logged or step == 0)
        if found or not logged:
            self._logger.log(step, metrics | found)

    def _now(self, kind: str, step: int, what: str) -> None:
        """Says what begins now: ``"train step 7"``, in the timeline of ``"train"``."""
        self._end_span()
        self._spans.append({"step": step, "actor": "learner", "kind": kind, "start": time.time()})
        stalls.note(what)

    def _end_span(self) -> None:
        if self._spans and "seconds" not in self._spans[-1]:
            self._spans[-1]["seconds"] = time.time() - self._spans[-1]["start"]

    def step(self) -> None:
        """Makes a step."""
        schedule, start = self._schedule, time.perf_counter()
        step = self._learner.version + 1
        self._now("wait", step, f"sample and score the batch of step {step}")
        batch = self._source.next_batch()
        self._saver.batch_taken()
        metrics = {"time/wait_s": time.perf_counter() - start} | self._source.metrics()
        self._now("train", step, f"train step {step}")
        with shielded(_LONGEST_SHIELD_S):
            metrics |= self._learner.train_batch(batch)
            self._unlogged = metrics
        step = self._learner.version
        if step == self._first + 1 and schedule.on_policy:
            _check_on_policy(metrics)
        metrics |= self._publish(step, schedule.refreshes(step))
        last = step == schedule.num_batches
        metrics["time/step_s"] = time.perf_counter() - start
        metrics["throughput/trained_tokens_per_s"] = metrics["rollout/tokens"] / metrics["time/step_s"]
        if last or schedule.evaluates(step):
            metrics |= self._evaluate(step, sampled=last)
        self._now("save", step, f"write what step {step} gave")
        self._check_folder()
        with shielded():
            self._record(metrics)
            self._console.step(step, metrics, step * schedule.sequences_per_batch, self._total)
            if schedule.checkpoint_frequency and step % schedule.checkpoint_frequency == 0:
                self._saver.save_or_say_why(NotSavedError)
            if schedule.export_frequency and step % schedule.export_frequency == 0 and not last:
                self._saver.export_or_say_why()
        self._longest_s = max(self._longest_s, time.perf_counter() - start)
        limit, without = schedule.max_steps_without_signal, self._alarms.steps_without_signal
        if limit is not None and without >= limit and not last:
            raise NoSignalError(
                f"{without} steps in a row had no learning signal: all rewards of each group are equal or not valid; "
                f"train.max_steps_without_signal={limit}. The alarms above and docs/troubleshooting.md say what to do."
            )

    def check_rewards(self) -> None:
        """Raises an error if no reward of the run was valid: it has learned nothing, and its figures say nothing."""
        without = self._alarms.steps_without_reward
        if without:
            raise NoSignalError(
                f"env.reward must give valid rewards, it gave none in the {without} steps of the run: the log above "
                "has the first error of each kind. Call the reward function by hand with a row of samples.jsonl."
            )

    def in_time(self) -> bool:
        """Whether another step ends before the run's time is over, if it takes as long as the longest one did."""
        limit = self._schedule.ends_at
        return limit is None or time.monotonic() + self._longest_s <= limit

    def end_early(self) -> None:
        """Writes down a step that was trained, and saves. What ends the run is what the caller raises."""
        try:
            self._check_folder()
        except (FolderLostError, OSError) as error:  # where the rest is written is known from here on
            torchrl_logger.warning(str(error))
        try:
            if self._unlogged is not None and self._learner.resumable:
                self._record(self._unlogged)
        except RunLostError:
            pass
        except Exception as error:  # it must not cost the checkpoint
            why = f"{type(error).__name__}: {error}"
            torchrl_logger.warning(f"Step {self._learner.version} is not all written down ({why}).")
        finally:
            with shielded():
                self._saver.save_or_say_why((NotSavedError, NonFiniteError, OSError))
        with suppress(Exception):  # of actors that may be gone
            self._end_span()
            self._logger.log_spans(self._spans)

    def _record(self, metrics: dict[str, float]) -> None:
        schedule, step = self._schedule, self._learner.version
        self._logger.log(step, metrics)
        for alarm in self._alarms.take({"step": step} | metrics):
            self._console.alarm(step, alarm.text)
        self._unlogged = None
        if step in (1, schedule.num_batches) or step % schedule.sample_frequency == 0:
            rows = self._learner.samples(schedule.sample_rows)
            self._logger.log_samples(step, rows)
            self._console.samples(step, one_of_each(rows)[:_SHOWN])
        self._log_spans(step)

    def _log_spans(self, step: int) -> None:
        """Writes the timeline up to what is being done now."""
        *ended, current = self._spans
        self._logger.log_spans([*ended, *({"step": step, **span} for span in self._source.spans())])
        self._spans = [current]

    def save(self) -> None:
        """Saves at the end of the run."""
        step = self._learner.version
        self._now("save", step, "save")
        self._check_folder()
        with shielded():
            self._saver.save()
            self._end_span()
            self._logger.log_spans(self._spans)

    def _evaluate(self, step: int, sampled: bool) -> dict[str, float]:
        self._now("evaluate", step, f"evaluate the weights of step {step}")
        start = time.perf_counter()
        metrics, rows = self._source.evaluate(sampled=sampled)
        if metrics:
            metrics["time/eval_s"] = time.perf_counter() - start
            self._logger.log_samples(step, rows)
            self._console.evaluation(step, metrics)
            self._saver.evaluated(metrics)
        return metrics

    def _publish(self, version: int, refresh: bool) -> dict[str, float]:
        if refresh:  # before anything is sampled with the new weights
            self._source.update_reference(self._learner.reference_weights())
            self._saver.reference_version = version
        self._now("publish", version, f"give the engine the weights of step {version}")
        start = time.perf_counter()
        self._source.publish(self._learner.weights(), version)
        metrics = {"time/sync_s": time.perf_counter() - start}
        tolerance = self._schedule.mismatch_tolerance
        return metrics if tolerance is None else metrics | _mismatch(self._learner, self._source, tolerance)


def fit(
    learner: LearnerLike,
    source: RolloutSource,
    checkpointer: Checkpointer,
    logger: MetricsLogger,
    console: Console,
    schedule: Schedule,
    export: Callable[[], Any] = lambda: None,
    check_folder: Callable[[], None] = lambda: None,
) -> None:
    """Trains until ``learner.version`` is ``schedule.num_batches`` or time is over; with no batches it only evaluates.

    The weights are published once before the first batch, so that engine and trainer start equal. The test split is
    evaluated before the run and after it; a checkpoint is written at the end, and also when training fails or is
    interrupted after a step.

    Args:
        learner: makes the steps.
        source: gives the batches and takes the weights.
        checkpointer: writes the checkpoints.
        logger: gets the metrics and samples.
        console: shows them.
        schedule: how long, and how often.
        export: writes the model of the current step.
        check_folder: raises ``FolderLostError`` where the files' folder is no longer there, once, and has the rest
            written elsewhere.

    Raises:
        FolderLostError: see ``check_folder``.
        RuntimeError: engine and trainer differ by more than rounding.
        NoSignalError: no reward was ever valid, or too many steps in a row had no learning signal.
        NonFiniteError: training has diverged.
        NotSavedError: there is no room for the last checkpoint, or its folder cannot be written to.
    """
    saver = _Saver(learner, source, checkpointer, export)
    steps = _Steps(learner, source, saver, logger, console, schedule, check_folder)
    steps.begin()
    try:
        while learner.version < schedule.num_batches and steps.in_time():
            steps.step()
        steps.check_rewards()
    except BaseException:
        steps.end_early()
        raise
    steps.save()


def _mismatch(learner: LearnerLike, source: RolloutSource, tolerance: float) -> dict[str, float]:
    """How far the log-probs of a few sampled tokens are apart; too far ends the run."""
    found = [learner.mismatch(probe) for probe in source.probes()]
    mean, largest = max(mean for mean, _ in found), max(largest for _, largest in found)
    if not mean <= tolerance:
        raise RuntimeError(
            f"after a weight sync, log-probs of engine and trainer differ by {mean:.3g} on average ({largest:.3g} at "
            f"most), more than inference_model.check_sync_tolerance={tolerance}: the engine does not have the "
            "trainer's weights."
        )
    return {"sync/mismatch_mean": mean, "sync/mismatch_max": largest}


def _check_on_policy(metrics: dict[str, float]) -> None:
    """Ends a run whose engine samples from another distribution than the trainer trains."""
    kl = metrics.get("train/kl_k3_to_inference", 0.0)
    if metrics.get("staleness/max") == 0 and kl > _LARGEST_ON_POLICY_KL:
        raise RuntimeError(
            f"the first step trained what its own weights sampled, and yet the KL to the engine's policy is {kl:.3g} "
            f"nats per token, more than the {_LARGEST_ON_POLICY_KL} that rounding can explain: engine and trainer "
            "compute different distributions. Use another inference_model.backend or dtype, or another model."
        )

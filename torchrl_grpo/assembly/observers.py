"""Observers of a run: its metrics, console, alarms, samples, checkpoints and timeline.

An observer records events of the loop and does not influence training. Only ``Limits`` may end the
run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torchrl import torchrl_logger

from torchrl_grpo.errors import (
    NonFiniteError,
    NoSignalError,
    NotSavedError,
    RunLostError,
)
from torchrl_grpo.host import clock, stalls
from torchrl_grpo.host.files import METRICS_FILE, read_jsonl
from torchrl_grpo.host.interrupts import shielded
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.loop import Metrics, Observer, SampleRows, Schedule
from torchrl_grpo.reporting.console import Console, one_of_each
from torchrl_grpo.reporting.metrics import MetricsLogger
from torchrl_grpo.reporting.signal import Signal
from torchrl_grpo.runtime.learner import RayLearner
from torchrl_grpo.runtime.rollouts import Rollouts

Reasons = type[Exception] | tuple[type[Exception], ...]
_NUM_SHOWN = 4


class Recorder(Observer):
    """Records and shows the metrics and samples of each step.

    Args:
        learner: returns the samples of the latest batch.
        logger: writes metrics and samples.
        console: shows them.
        alarms: checks the metrics (``extras.report.alarms.Alarms``).
        signal: counts the steps without a learning signal.

    Keyword Args:
        schedule: schedule of the run.
        sequences_per_batch: for the progress bar.
        sample_frequency: steps between tables of samples.
        sample_rows: samples in each table, rounded up to whole groups; None for all.
    """

    def __init__(
        self,
        learner: Learner | RayLearner,
        logger: MetricsLogger,
        console: Console,
        alarms: Any,
        signal: Signal,
        *,
        schedule: Schedule,
        sequences_per_batch: int,
        sample_frequency: int = 50,
        sample_rows: int | None = 32,
    ) -> None:
        self._learner = learner
        self._logger = logger
        self._console = console
        self._alarms = alarms
        self._signal = signal
        self._num_batches = schedule.num_batches
        self._sequences = sequences_per_batch
        self._sample_frequency = sample_frequency
        self._sample_rows = sample_rows
        self._has_progress_bar = False
        self._unlogged: Metrics | None = None  # metrics of a trained step
        # Empty unless the run resumes in its own folder.
        for row in read_jsonl(logger.directory / METRICS_FILE):
            alarms.take(row)
            signal.take(row)

    def stage(self, kind: str, step: int, what: str) -> None:
        if kind in ("evaluate", "wait") and not self._has_progress_bar:
            self._has_progress_bar = True
            done = step - (kind == "wait")
            total = self._num_batches * self._sequences
            self._console.start(done * self._sequences, total, evaluates=kind == "evaluate")

    def began(self, step: int, metrics: Metrics) -> None:
        if metrics:
            self._logger.log(step, metrics)

    def trained(self, metrics: Metrics) -> None:
        self._unlogged = metrics

    def evaluated(self, step: int, metrics: Metrics, rows: SampleRows) -> None:
        self._logger.log_samples(step, rows)
        self._console.evaluation(step, metrics)

    def stepped(self, step: int, metrics: Metrics) -> None:
        self._record(step, metrics)
        self._console.step(
            step, metrics, step * self._sequences, self._num_batches * self._sequences
        )

    def interrupted(self) -> None:
        """Record a step that was trained but not yet recorded."""
        try:
            if self._unlogged is not None and self._learner.resumable:
                self._record(self._learner.version, self._unlogged)
        except RunLostError:
            pass
        except Exception as error:  # it must not prevent the checkpoint
            reason = f"{type(error).__name__}: {error}"
            torchrl_logger.warning(
                f"Step {self._learner.version} is only partly logged ({reason})."
            )

    def _record(self, step: int, metrics: Metrics) -> None:
        self._logger.log(step, metrics)
        self._signal.take(metrics)
        for alarm in self._alarms.take({"step": step, **metrics}):
            self._console.alarm(step, alarm.name, alarm.text)
        self._unlogged = None
        if step in (1, self._num_batches) or step % self._sample_frequency == 0:
            rows = self._learner.samples(self._sample_rows)
            self._logger.log_samples(step, rows)
            errors = filter(None, (row.get("error") for row in rows))
            self._signal.reward_error = self._signal.reward_error or next(errors, "")
            self._console.samples(step, one_of_each(rows)[:_NUM_SHOWN])


class Limits(Observer):
    """Ends a run whose rewards all fail alike or, after saving it, a run that learns nothing.

    Args:
        signal: counts the steps that were recorded.

    Keyword Args:
        schedule: schedule of the run.
        max_steps_without_signal: number of consecutive steps in which no group has different
            rewards, after which the run ends; None disables it.
    """

    def __init__(
        self, signal: Signal, *, schedule: Schedule, max_steps_without_signal: int | None
    ) -> None:
        self._signal = signal
        self._schedule = schedule
        self._limit = max_steps_without_signal

    def checked(self, step: int) -> None:
        if self._signal.fails_alike:
            self.ended(step)
        steps = self._signal.steps_without_signal
        if self._limit is not None and steps >= self._limit and self._schedule.left(step):
            raise NoSignalError(
                f"{steps} steps in a row had no learning signal: all rewards of each group are "
                f"equal or invalid (limit: train.max_steps_without_signal={self._limit}). See the "
                "alarms above and docs/troubleshooting.md."
            )

    def ended(self, step: int) -> None:
        """Raise an error if no reward of the run was valid."""
        if self._signal.steps_without_reward:
            raise NoSignalError(
                f"env.reward must return valid rewards, but all were invalid up to step {step}. "
                "Call the reward function by hand with a row of samples.jsonl. The first error: "
                f"{self._signal.reward_error or 'in the log above'}"
            )


class Saver(Observer):
    """Writes checkpoints, each with the state of the rollouts at the time when the batch was taken.

    Args:
        learner: the learner to save.
        rollouts: the rollouts whose state is saved.
        checkpointer: writes the files.
        export: writes the model of the current step.
        schedule: schedule of the run.
    """

    def __init__(
        self,
        learner: Learner | RayLearner,
        rollouts: Rollouts,
        checkpointer: Checkpointer,
        export: Callable[[], Any],
        schedule: Schedule,
    ) -> None:
        self._learner = learner
        self._rollouts = rollouts
        self._checkpointer = checkpointer
        self._export = export
        self._schedule = schedule
        self._first = learner.version
        self._saved = self._first  # including one being written
        self._complete = self._first  # on the disk
        self._reference_version = 0
        self._evaluated: dict[int, Metrics] = {}
        self._states = {learner.version: rollouts.state_dict()}  # by version of the learner

    def taken(self) -> None:
        version = self._learner.version
        self._states = {version: self._states[version], version + 1: self._rollouts.state_dict()}

    def refreshed(self, version: int) -> None:
        self._reference_version = version

    def evaluated(self, step: int, metrics: Metrics, rows: SampleRows) -> None:
        self._evaluated = {step: metrics}

    def stepped(self, step: int, metrics: Metrics) -> None:
        if self._schedule.saves(step):
            self._finish_or_warn(NotSavedError)
            self._save_or_warn(NotSavedError)
        if self._schedule.exports(step):
            self._export_or_warn()

    def interrupted(self) -> None:
        reasons = (NotSavedError, NonFiniteError, OSError)
        with shielded():
            self._finish_or_warn((RunLostError, OSError))
            self._save_or_warn(reasons)
            self._finish_or_warn((RunLostError, OSError))

    def ended(self, step: int) -> None:
        self._finish_or_warn(NotSavedError)
        self._save()
        self._learner.finish_save()

    def _save(self) -> None:
        """Save this step, unless it is already saved or is incomplete."""
        version = self._learner.version
        if not self._learner.resumable:
            last = "no checkpoint was written"
            if self._saved != self._first:
                last = f"the last checkpoint is of step {self._saved}"
            torchrl_logger.warning(f"stopped inside step {version + 1}: {last}.")
        elif self._saved != version:
            state = self._states[version] | {"reference_version": self._reference_version}
            self._checkpointer.metrics = dict(self._evaluated.get(version, {}))
            self._learner.save(self._checkpointer, state)
            self._saved = version

    def _save_or_warn(self, reasons: Reasons) -> None:
        """Save, or log why there is no checkpoint of this step."""
        try:
            self._save()
        except reasons as error:
            self._warn_unsaved(self._learner.version, error)

    def _finish_or_warn(self, reasons: Reasons) -> None:
        """Wait for the checkpoint in progress, or log why it failed."""
        try:
            self._learner.finish_save()
        except reasons as error:
            self._warn_unsaved(self._saved, error)
            self._saved = self._complete
        self._complete = self._saved

    def _warn_unsaved(self, version: int, error: Exception) -> None:
        last = self._checkpointer.latest()
        before = (
            "there is no earlier checkpoint"
            if last is None
            else f"the latest checkpoint is {last.name}"
        )
        torchrl_logger.warning(f"Step {version} was not saved, {before}: {error}.")

    def _export_or_warn(self) -> None:
        """Export the model of this step, or log why it failed."""
        self._checkpointer.metrics = dict(self._evaluated.get(self._learner.version, {}))
        try:
            self._export()
        except NotSavedError as error:
            torchrl_logger.warning(
                f"The model of step {self._learner.version} was not written: {error}."
            )


class Callback(Observer):
    """Calls a function after each step.

    Args:
        function: gets the step and its metrics.
    """

    def __init__(self, function: Callable[[int, Metrics], object]) -> None:
        self.stepped = function  # type: ignore[method-assign, assignment]


class Timeline(Observer):
    """Records the start and duration of each stage, and names it for the stall watch.

    Args:
        rollouts: return the spans of their workers.
        logger: writes ``timeline.jsonl``.
    """

    def __init__(self, rollouts: Rollouts, logger: MetricsLogger) -> None:
        self._rollouts = rollouts
        self._logger = logger
        self._spans: list[dict[str, Any]] = []  # the last one is in progress

    def stage(self, kind: str, step: int, what: str) -> None:
        self._end_span()
        self._spans.append({"step": step, "actor": "learner", "kind": kind, "start": clock.now()})
        stalls.note(what)

    def stepped(self, step: int, metrics: Metrics) -> None:
        *ended, current = self._spans
        worker_spans = [{"step": step, **span} for span in self._rollouts.spans()]
        self._logger.log_spans([*ended, *worker_spans])
        self._spans = [current]

    def interrupted(self) -> None:
        with suppress(Exception):  # actors may be gone
            self._write()

    def ended(self, step: int) -> None:
        self._write()

    def _write(self) -> None:
        self._end_span()
        self._logger.log_spans(self._spans)

    def _end_span(self) -> None:
        if self._spans and "seconds" not in self._spans[-1]:
            self._spans[-1]["seconds"] = clock.now() - self._spans[-1]["start"]

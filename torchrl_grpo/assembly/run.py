"""``build`` a run from the config, then ``Run.fit`` it.

``build`` checks everything that can be checked without weights and shows the plan. Only then do
the models load, in one of the two ``layouts``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchrl import torchrl_logger
from transformers.utils import logging as transformers_logging

from torchrl_grpo.assembly.context import Context
from torchrl_grpo.assembly.errors import as_config_errors
from torchrl_grpo.assembly.geometry import geometry_rows
from torchrl_grpo.assembly.layouts import make_in_process, make_on_ray, start_cluster
from torchrl_grpo.assembly.observers import Callback, Limits, Recorder, Saver, Timeline
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.schedule import schedule_of, writes_of
from torchrl_grpo.assembly.shares import check_devices, shares
from torchrl_grpo.checks import adapter_settings
from torchrl_grpo.config import GRPOConfig, check_one_process, plain, staleness_bound
from torchrl_grpo.engines import ENGINES
from torchrl_grpo.host import stalls
from torchrl_grpo.host.checkpoint_files import check_unused
from torchrl_grpo.host.clock import DATE, run_date
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.files import METRICS_FILE, is_full
from torchrl_grpo.host.folders import FolderLock
from torchrl_grpo.host.startup import say
from torchrl_grpo.images import prompt_text
from torchrl_grpo.learner.checkpoint import Checkpointer, Writes
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.learner.resume import find_resume
from torchrl_grpo.loop import Observer, Schedule, fit
from torchrl_grpo.reporting.console import Console
from torchrl_grpo.reporting.metrics import MetricsLogger
from torchrl_grpo.reporting.signal import Signal
from torchrl_grpo.runtime.cluster import require_ray
from torchrl_grpo.runtime.learner import RayLearner
from torchrl_grpo.runtime.rollouts import Rollouts
from torchrl_grpo.tasks.base import Task
from torchrl_grpo.weights import transfer_kind


@dataclass
class Run:
    """A run that is ready to start: ``fit`` it, then ``close`` it (also after an error)."""

    context: Context
    directory: Path
    learner: Learner | RayLearner
    rollouts: Rollouts
    logger: MetricsLogger
    console: Console
    resources: ExitStack
    schedule: Schedule

    def fit(self, observers: Sequence[Observer] = ()) -> dict[str, Any]:
        """Train, export the model, write the report; return the run's summary.

        Args:
            observers: called after the run's own, once a step is recorded and saved.
        """
        checkpointer = self._checkpointer()
        try:
            outputs = self._train(checkpointer, observers)
        except BaseException as error:
            torchrl_logger.warning(f"The run ended early. Output is in {self.directory}.")
            if hint := self._resume_hint(checkpointer):
                error.add_note(hint.lstrip())  # the last line
            raise
        finally:
            report = self._report()
        paths = {"report": report}
        for name in ("curves.png", "metrics.jsonl", "samples.jsonl"):
            paths[name.partition(".")[0]] = self.directory / name
        return load_extra("summary")(self.console, self.directory, paths | outputs)

    def _train(self, checkpointer: Checkpointer, further: Sequence[Observer]) -> dict[str, Path]:
        """Train and export the model; return the paths of checkpoints and model."""
        learner, config = self.learner, self.context.config
        export = partial(learner.export, checkpointer, self.context.model.tokenizer)
        observers = self._observers(checkpointer, partial(export, ended=False))
        observers += [each if isinstance(each, Observer) else Callback(each) for each in further]
        fit(learner, self.rollouts, self.schedule, observers, last_row=self.logger.last_row)
        if self.schedule.left(learner.version):
            torchrl_logger.warning(
                f"train.time_limit={config.train.time_limit:g} ended the run after "
                f"step {learner.version}.{self._resume_hint(checkpointer)}"
            )
        outputs = {}
        if not config.only_evaluates:
            outputs = {"checkpoints": checkpointer.directory, "model": export()}
        return outputs

    def _resume_hint(self, checkpointer: Checkpointer) -> str:
        """Describe how to resume from the last checkpoint, if there is one."""
        resume = self.context.resume
        path = checkpointer.latest() or (None if resume is None else resume.path)
        if path is None:
            return ""
        command = load_extra("resume_command")(path, self.directory)
        return f" Resume with:\n{command}"

    def writes(self) -> Writes:
        """Return the checkpoints and models that the run has yet to write."""
        config = self.context.config
        return writes_of(config, self.schedule, self.learner.version, *self.learner.sizes())

    def _checkpointer(self) -> Checkpointer:
        """Return the writer of the run's checkpoints, after checking that there is room for them."""
        config = self.context.config
        directory = self.directory / "checkpoints"
        if not config.only_evaluates:
            self.writes().check_room(self.directory)
            directory.mkdir(parents=True, exist_ok=True)
        saved, path = plain(config), config.train_model.lora.options.get("path")
        if path is not None:
            saved["train_model"]["lora"]["settings"] = adapter_settings(path)
        return Checkpointer(directory, saved, config.train.keep_checkpoints)

    def _report(self) -> Path:
        """Return the path of the report or, if it cannot be written, of the metrics."""
        try:
            return load_extra("report")(self.directory)
        except Exception as error:
            reason = "the disk is full" if is_full(error) else f"{type(error).__name__}: {error}"
            torchrl_logger.warning(f"No report could be written in {self.directory} ({reason}).")
            return self.directory / METRICS_FILE

    def _observers(self, checkpointer: Checkpointer, export: Callable[[], Any]) -> list[Observer]:
        """Return the observers in order: a step is recorded, then saved, then may end the run."""
        config, schedule, signal = self.context.config, self.schedule, Signal()
        return [
            Recorder(
                self.learner,
                self.logger,
                self.console,
                load_extra("alarms")(),
                signal,
                schedule=schedule,
                sequences_per_batch=config.dialog_turns_per_batch,
                sample_frequency=config.logging.sample_frequency,
                sample_rows=config.logging.train_rows,
            ),
            Timeline(self.rollouts, self.logger),
            load_extra("tracer")(
                config.logging.profile_steps, self.directory, self.learner, self.rollouts
            ),
            Saver(self.learner, self.rollouts, checkpointer, export, schedule),
            Limits(
                signal,
                schedule=schedule,
                max_steps_without_signal=config.train.max_steps_without_signal,
            ),
        ]

    def close(self) -> None:
        """Close engine, files and terminal output. Can be called more than once."""
        self.resources.close()


def build(
    config: GRPOConfig,
    directory: str | os.PathLike[str],
    *,
    asynchronous: bool = False,
    task: Task | None = None,
) -> Run:
    """Make a run: check it, show the plan, load the models, start the engine.

    Args:
        config: validated.
        directory: folder of the run.
        asynchronous: whether sampling and training overlap. The roles are then actors on Ray, as
            they also are if a role has several devices or ``ray.address`` names a cluster.
        task: of the config; None makes it.

    Raises:
        ConfigError: a rule is broken, before any weights are loaded.
    """
    transformers_logging.disable_progress_bar()  # it would overwrite the run's own
    started_at = time.monotonic()
    max_staleness = staleness_bound(config, asynchronous)
    with as_config_errors(), ExitStack() as resources:
        # First: it takes the colors out of log lines.
        console: Console = resources.enter_context(load_extra("console")())
        directory = resources.enter_context(FolderLock(directory)).folder
        watch = resources.enter_context(stalls.watched(config.train.stall_timeout_s, directory))
        resume = find_resume(config, plain(config), directory)
        if config.train.resume is None:
            check_unused(directory)
        resources.callback(os.environ.pop, DATE, None)
        os.environ[DATE] = resume.date if resume else run_date().isoformat()
        cluster = None
        if config.ray.address is not None:  # first, because the plan needs its accelerators
            cluster = start_cluster(config.ray.address, resources)
        say("reading tokenizer" if task else "reading data and tokenizer")
        accelerators = None if cluster is None else cluster.accelerators()
        context = prepare(
            config,
            accelerators,
            resume,
            task,
            folder=directory,
            max_staleness=max_staleness,
            distributed=asynchronous or cluster is not None,
        )
        config, plan = context.config, context.plan
        if cluster is None:
            check_devices(context)
        if context.distributed:
            require_ray()
        else:
            check_one_process(config)
        transfer = transfer_kind(
            config.inference_model.weight_transfer,
            on_device=ENGINES[config.inference_model.backend].weights_on_device,
            trainer=plan.train[0],
            engines=plan.inference,
            colocated=plan.colocated,
            distributed=context.distributed,
            adapters=context.adapter_slots is not None,
            waits=max_staleness > 0 and config.inference_model.in_flight == "wait",
        )
        logger = _show(context, directory, console, resources)
        if config.train.resume is not None and not config.only_evaluates:
            # Later steps in this run's folder are repeated.
            done = 0 if resume is None else resume.step
            logger.truncate(done + 1 if done else 0)
            Checkpointer(directory / "checkpoints", {}).begin(done)
        learner: Learner | RayLearner
        if context.distributed:
            learner, rollouts = make_on_ray(context, transfer, resources, cluster, watch)
        else:
            learner, rollouts = make_in_process(context, transfer, resources)
        time_limit = config.train.time_limit
        reference_version = 0
        if resume and config.has_own_reference:
            reference_version = resume.reference_version
        schedule = schedule_of(
            config,
            reference_version=reference_version,
            ends_at=None if time_limit is None else started_at + time_limit,
        )
        return Run(
            context,
            directory,
            learner,
            rollouts,
            logger,
            console,
            resources.pop_all(),
            schedule,
        )


def _show(
    context: Context, directory: Path, console: Console, resources: ExitStack
) -> MetricsLogger:
    """Show the plan of the run and the checkpoint that it resumes; return the logger of its
    metrics.
    """
    config, resume = context.config, context.resume
    console.table("Device plan", [share.row() for share in shares(context).values()])
    if not config.only_evaluates:
        console.table("Batch geometry", geometry_rows(config))
    train, tests = context.train_env, context.tests
    [prompt] = train.prompts.first(1)
    num_tests = 0 if tests is None else tests.greedy.batch_size[0]
    text = prompt_text(prompt, train.tokenizer.decode)
    console.problems(train.num_problems, num_tests, text, is_stateful=train.task.is_stateful)
    continued = None if config.only_evaluates else resume
    finished = continued is not None and continued.step >= config.num_batches
    logger = MetricsLogger(
        directory,
        tensorboard=config.logging.tensorboard,
        services=config.logging.services,
        config=plain(config),
        resumed_from=None if continued is None else continued.path.parent.parent,
        finished=finished,
        call_format=train.call_format,
    )
    resources.enter_context(logger)
    if config.logging.page:
        dashboard = load_extra("dashboard")
        resources.enter_context(dashboard(directory, console.page, torchrl_logger.warning))
    if resume is not None:
        console.resume(resume.step, resume.path, finished=finished)
        if resume.differences:
            console.table("Options that differ from the resumed run", resume.differences)
    return logger

"""Builds a run from the config, in this process or on Ray.

``build`` checks everything that can be checked without weights, shows the plan, and only then loads
models.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchrl import torchrl_logger
from transformers.utils import logging as transformers_logging

from torchrl_grpo.assembly.blueprint import (
    Blueprint,
    as_config_errors,
    check_devices,
    geometry_rows,
    plan_rows,
    prepare,
    stored_bytes,
    task_geometry,
)
from torchrl_grpo.assembly.observers import FolderGuard, Limits, Recorder, Saver, Timeline
from torchrl_grpo.assembly.parts import make_learner, make_reference, make_sampler, make_teacher
from torchrl_grpo.assembly.schedule import schedule_of, writes_of
from torchrl_grpo.config import GRPOConfig, check_one_process, plain, staleness_bound
from torchrl_grpo.generation.engines import ENGINES
from torchrl_grpo.host import stalls
from torchrl_grpo.host.checkpoint_files import check_unused
from torchrl_grpo.host.files import METRICS_FILE, is_full
from torchrl_grpo.host.folders import FolderLock
from torchrl_grpo.host.startup import say
from torchrl_grpo.learner.checkpoint import Checkpointer, Writes
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.learner.resume import Resume, find_resume, refusing
from torchrl_grpo.loop import Observer, Schedule, fit
from torchrl_grpo.models.sharding import leave_mesh
from torchrl_grpo.reporting.alarms import Alarms
from torchrl_grpo.reporting.console import Console
from torchrl_grpo.reporting.metrics import MetricsLogger
from torchrl_grpo.runtime.actors import make_seeded
from torchrl_grpo.runtime.inline_driver import InlineDriver
from torchrl_grpo.runtime.learner import RayLearner
from torchrl_grpo.runtime.rollouts import Rollouts
from torchrl_grpo.runtime.staleness import GroupBuffer
from torchrl_grpo.runtime.tasks import TaskQueue
from torchrl_grpo.runtime.thread_driver import ThreadDriver
from torchrl_grpo.runtime.workers import LocalWorker, RayWorker, Worker
from torchrl_grpo.weights import Transfer, transfer_kind

if TYPE_CHECKING:
    from torchrl_grpo.runtime.cluster import Cluster


@dataclass
class Run:
    """A run that is ready to start: ``fit`` it, then ``close`` it (also after an error)."""

    blueprint: Blueprint
    directory: Path
    lock: FolderLock
    learner: Learner | RayLearner
    source: Rollouts
    logger: MetricsLogger
    console: Console
    resources: ExitStack
    started_at: float
    unverified: bool = False

    def fit(self) -> dict[str, Any]:
        """Train, export the model, write the report; return the run's summary."""
        learner, blueprint = self.learner, self.blueprint
        checkpointer = self._checkpointer()
        try:
            export = partial(learner.export, checkpointer, blueprint.tokenizer, ended=False)
            observers = self._observers(checkpointer, export)
            fit(learner, self.source, self.schedule, observers, written=self.logger.last_row)
            trained = not blueprint.config.only_evaluates
            written = {"checkpoints": checkpointer.directory} if trained else {}
            if self.schedule.left(learner.version):
                torchrl_logger.warning(
                    f"train.time_limit={blueprint.config.train.time_limit:g} ended the run after "
                    f"step {learner.version}.{self._goes_on(checkpointer)}"
                )
            written |= (
                {"model": learner.export(checkpointer, blueprint.tokenizer)} if trained else {}
            )
            self.lock.check_in_place()
        except BaseException:
            go_on = self._goes_on(checkpointer)
            torchrl_logger.warning(
                f"The run ended early. What it did lies in {self.directory}.{go_on}"
            )
            raise
        finally:
            report = self._report()
        from torchrl_grpo.reporting.report import (
            summarize,
        )  # not before: it imports matplotlib, which takes time

        summary = summarize(self.directory)
        files = ("curves.png", "metrics.jsonl", "samples.jsonl")
        paths = {"report": report} | {
            name.partition(".")[0]: self.directory / name for name in files
        }
        self.console.finish(summary, paths | written)
        return summary

    def _goes_on(self, checkpointer: Checkpointer) -> str:
        """Describe how to resume from the last checkpoint, if there is one."""
        resume = self.blueprint.resume
        path = checkpointer.latest() or (None if resume is None else resume.path)
        return "" if path is None else f" Resume with train.resume={path}"

    @cached_property
    def schedule(self) -> Schedule:
        """Length of the run, and when it evaluates and saves."""
        config, resume = self.blueprint.config, self.blueprint.resume
        limit = config.train.time_limit
        return schedule_of(
            config,
            reference_version=resume.reference_version
            if resume and config.has_own_reference
            else 0,
            unverified=self.unverified,
            ends_at=None if limit is None else self.started_at + limit,
        )

    def writes(self) -> Writes:
        """Return the checkpoints and models that are left to write."""
        config = self.blueprint.config
        return writes_of(config, self.schedule, self.learner.version, *self.learner.sizes())

    def _checkpointer(self) -> Checkpointer:
        """Make the writer of the run's checkpoints, after checking that there is room for them."""
        config = self.blueprint.config
        made = Checkpointer(
            self.directory / "checkpoints", plain(config), config.train.keep_checkpoints
        )
        if not config.only_evaluates:
            self.writes().check_room(self.directory)
            made.directory.mkdir(parents=True, exist_ok=True)
        return made

    def _report(self) -> Path:
        """Path of the report or, without one, the summary: the outcome of the run matters more."""
        try:
            from torchrl_grpo.reporting.report import write_report

            return write_report(self.directory)
        except Exception as error:
            why = (
                "there is no room for it" if is_full(error) else f"{type(error).__name__}: {error}"
            )
            torchrl_logger.warning(f"No report could be written in {self.directory} ({why}).")
            return self.directory / METRICS_FILE

    def _observers(self, checkpointer: Checkpointer, export: Callable[[], Any]) -> list[Observer]:
        """Observers in order: a step is recorded and shown, then saved, and then may end the run."""
        config, alarms, schedule = self.blueprint.config, Alarms(), self.schedule
        return [
            FolderGuard(self.lock),
            Recorder(
                self.learner,
                self.logger,
                self.console,
                alarms,
                schedule=schedule,
                sequences_per_batch=config.dialog_turns_per_batch,
                sample_frequency=config.logging.sample_frequency,
                sample_rows=config.logging.train_rows,
            ),
            Timeline(self.source, self.logger),
            Saver(self.learner, self.source, checkpointer, export, schedule),
            Limits(
                alarms,
                schedule=schedule,
                max_steps_without_signal=config.train.max_steps_without_signal,
            ),
        ]

    def close(self) -> None:
        """Ends engine, files and terminal output. May be called again."""
        self.resources.close()


def build(
    config: GRPOConfig, directory: str | os.PathLike[str], *, asynchronous: bool = False
) -> Run:
    """Make a run: check it, show the plan, load the models, start the engine.

    Args:
        config: validated.
        directory: where the run's files go.
        asynchronous: whether sampling and training overlap. The roles are then processes on Ray, as
            they are where a role has several devices or ``ray.address`` names a cluster.

    Raises:
        ConfigError: a rule is broken, before any weights are loaded.
    """
    transformers_logging.disable_progress_bar()  # it would write over the run's own
    started_at, max_staleness = time.monotonic(), staleness_bound(config, asynchronous)
    with as_config_errors(), ExitStack() as resources:
        lock = resources.enter_context(FolderLock(directory))
        directory = lock.folder
        watch = resources.enter_context(stalls.watched(config.train.stall_timeout_s, directory))
        cluster, resume = None, find_resume(config, plain(config), directory)
        if config.train.resume is None:
            check_unused(directory)
        if config.ray.address is not None:  # first, because the plan is made of its accelerators
            cluster = _start_ray(config.ray.address, resources)
        say("reading data and tokenizer")
        blueprint = prepare(config, None if cluster is None else cluster.accelerators(), resume)
        blueprint = replace(blueprint, folder=directory)
        config = blueprint.config
        distributed = asynchronous or cluster is not None or blueprint.plan.distributed
        # Processes of several GPUs take turns where nothing is sampled while the learner trains.
        in_turns = not distributed or (blueprint.plan.distributed and max_staleness == 0)
        blueprint = replace(blueprint, sleeps=in_turns and blueprint.plan.colocated)
        if cluster is None:
            check_devices(blueprint)
        if distributed:
            _check_distributed(blueprint)
        else:
            check_one_process(config)
            resources.callback(
                torch.set_num_threads, torch.get_num_threads()
            )  # a small model's parts change it
        transfer = _transfer(blueprint, max_staleness, distributed=distributed)
        console = resources.enter_context(Console())
        console.table("Device plan", plan_rows(blueprint))
        if not config.only_evaluates:
            console.table("Batch geometry", geometry_rows(blueprint))
        train, test = blueprint.train_env, blueprint.greedy_env
        [prompt] = train.prompts.first(1)
        tested = 0 if test is None else test.batch_size[0]
        console.problems(
            train.num_problems,
            tested,
            train.tokenizer.decode(prompt),
            is_stateful=train.task.is_stateful,
        )
        finished = (
            resume is not None and not config.only_evaluates and resume.step >= config.num_batches
        )
        logger = resources.enter_context(_logger(config, directory, resume, finished=finished))
        if config.logging.page:
            [page] = entry_points(
                group="torchrl_grpo.page"
            )  # the extra `view`: the core imports no extra
            resources.enter_context(page.load()(directory, console.page, torchrl_logger.warning))
        if resume is not None:
            console.resume(resume.step, resume.path, finished=finished)
            if resume.differences:
                console.table("Options that differ from the resumed run", resume.differences)
        if config.train.resume is not None and not config.only_evaluates:
            done = 0 if resume is None else resume.step
            logger.truncate(
                done + 1 if done else 0
            )  # what this run's folder has of later steps is done again
            Checkpointer(directory / "checkpoints", {}).begin(done)
        if distributed:
            torchrl_logger.info(
                f"The weights reach the engines by inference_model.weight_transfer={transfer.name}."
            )
            cluster = cluster or _start_ray(None, resources)
        learner, source = _make_roles(blueprint, cluster, transfer, max_staleness, resources)
        if watch is not None and cluster is not None and isinstance(learner, RayLearner):
            ranks = learner.pids
            watch.where, watch.pids = (
                source.what_is_missing,
                lambda: [*source.pids().values(), *ranks],
            )
            watch.elsewhere = partial(_stacks_elsewhere, cluster, watch)
        left = resources.pop_all()
        return Run(
            blueprint,
            directory,
            lock,
            learner,
            source,
            logger,
            console,
            left,
            started_at,
            unverified=transfer.unverified,
        )


def _check_distributed(blueprint: Blueprint) -> None:
    """Check the requirements of a distributed run before anything starts."""
    from torchrl_grpo.runtime.cluster import require_ray

    require_ray()
    task_geometry(blueprint.config, len(blueprint.plan.inference), sleeps=blueprint.sleeps)


def _transfer(blueprint: Blueprint, max_staleness: int, *, distributed: bool) -> Transfer:
    """Choose how the weights reach the engines."""
    config, plan = blueprint.config, blueprint.plan
    return transfer_kind(
        config.inference_model.weight_transfer,
        on_device=ENGINES[config.inference_model.backend].weights_on_device,
        trainer=plan.train[0],
        engines=plan.inference,
        colocated=plan.colocated,
        distributed=distributed,
        lora=config.train_model.lora.enabled,
        waits=max_staleness > 0 and config.inference_model.in_flight == "wait",
    )


def _logger(
    config: GRPOConfig, directory: Path, resume: Resume | None, *, finished: bool
) -> MetricsLogger:
    logging = config.logging
    return MetricsLogger(
        directory,
        tensorboard=logging.tensorboard,
        services=logging.services,
        config=plain(config),
        goes_on_from=None if resume is None or config.only_evaluates else resume.path.parent.parent,
        finished=finished,
    )


def _stacks_elsewhere(cluster: Cluster, watch: stalls.Watch) -> str:
    return cluster.stacks(watch.pids())


def _start_ray(address: str | None, resources: ExitStack) -> Cluster:
    from torchrl_grpo.runtime.cluster import start

    say("starting Ray" if address is None else f"joining the Ray cluster at {address}")
    cluster = start(address)
    resources.callback(cluster.shutdown)
    return cluster


def _make_roles(
    blueprint: Blueprint,
    cluster: Cluster | None,
    transfer: Transfer,
    max_staleness: int,
    resources: ExitStack,
) -> tuple[Learner | RayLearner, Rollouts]:
    """Make and start the roles, in this thread or on a cluster; ``resources`` gets everything that
    must be closed.

    Raises:
        ValueError: Ray has no room, or a part was refused where it was made.
    """
    config, plan, resume, ray = (
        blueprint.config,
        blueprint.plan,
        blueprint.resume,
        blueprint.config.ray,
    )
    untested = replace(
        blueprint, greedy_env=None, sampled_env=None
    )  # of the test split, for those who need none
    allocations: Mapping[str, Sequence[Any]]  # of each part: its device, or Ray's options
    learner: Learner | RayLearner
    driver: InlineDriver | ThreadDriver
    if cluster is None:
        samplers = [first for first, *_ in plan.inference]
        allocations = {"inference": samplers, "reference": plan.reference, "teacher": plan.teacher}
        if config.train_model.cpu_offload:
            resources.callback(leave_mesh)
        learner, driver = make_learner(untested, transfer, device=plan.train[0]), InlineDriver()
        task_groups, concurrent_tasks = None, 1
    else:
        allocations = cluster.place(
            plan, tensor_parallel_size=config.train_model.tensor_parallel_size
        )
        cluster.check_object_store(stored_bytes(blueprint, transfer))
        learner = RayLearner(
            partial(make_learner, untested, transfer),
            options=allocations["train"],
            tensor_parallel_size=config.train_model.tensor_parallel_size,
            replicas=config.train_model.replicas,
            actor_timeout_s=ray.actor_timeout_s,
            resumed_from=None if resume is None else resume.path,
        )
        cluster.watch(learner.last_saved)
        driver = ThreadDriver(
            actor_timeout_s=ray.actor_timeout_s, recovery_timeout_s=ray.recovery_timeout_s
        )
        task_groups, concurrent_tasks = task_geometry(
            config, len(plan.inference), sleeps=blueprint.sleeps
        )
    resources.callback(learner.close)
    in_flight: Any = config.inference_model.in_flight
    if (
        max_staleness
        and blueprint.reward_pool is not None
        and not ENGINES[config.inference_model.backend].concurrent
    ):
        # While one task is scored others are sampled, as many as may be under way, and weights may
        # come in between.
        concurrent_tasks, in_flight = max_staleness + 1, "keep"
    # Beside the tasks, an update and an evaluation, where the engine can take several calls at a
    # time.
    threads = concurrent_tasks + 2 if concurrent_tasks > 1 or in_flight != "wait" else 1

    def make_worker(
        name: str, allocation: Any, factory: Callable[..., Any], callers: int = 1
    ) -> Worker:
        if cluster is None:
            return LocalWorker(name, partial(factory, device=allocation))
        return RayWorker(
            name, factory, {**allocation, "max_concurrency": callers}, ray.actor_timeout_s
        )

    def sampler(number: int) -> Callable[..., Any]:
        factory = partial(make_sampler, blueprint, task_groups, concurrent_tasks, number=number)
        return partial(make_seeded, factory, config.seed + number)

    rollouts = Rollouts(
        _tasks(blueprint, task_groups, max_staleness),
        driver,
        samplers=[
            make_worker(f"sampler {index}", allocation, sampler(index), threads)
            for index, allocation in enumerate(allocations["inference"])
        ],
        references=[
            make_worker(f"reference model {index}", allocation, partial(make_reference, untested))
            for index, allocation in enumerate(allocations["reference"])
        ],
        teachers=[
            make_worker(
                f"teacher {index}", allocation, partial(make_teacher, untested, number=index)
            )
            for index, allocation in enumerate(allocations["teacher"])
        ],
        concurrent_tasks=concurrent_tasks,
        in_flight=in_flight,
        references_first=driver.overlaps and plan.colocated,
        release=learner.release,
        resend=learner.resend,
        together=transfer.together,
        turns=blueprint.sleeps,
        evaluates=blueprint.greedy_env is not None,
    )
    resources.callback(rollouts.close)
    if resume is not None:
        with refusing(resume.path):
            rollouts.load_state_dict(resume.source)
    if isinstance(learner, Learner):
        rollouts.start()
        return learner, rollouts
    say(f"starting {sum(map(len, allocations.values()))} processes, which load their models")
    # On one accelerator the engine must not start while others take memory; else all start at the
    # same time.
    for start in (
        (learner.start, rollouts.start) if plan.colocated else (rollouts.start, learner.start)
    ):
        start()
    rollouts.wait_until_ready()
    return learner, rollouts


def _tasks(blueprint: Blueprint, task_groups: int | None, max_staleness: int) -> TaskQueue:
    """Return the queue of a run's rollout tasks; without ``task_groups`` a task is a whole batch."""
    config = blueprint.config
    rounds, rows = config.policy.max_sampling_rounds, config.env.num_envs
    buffer = GroupBuffer(config.groups_per_batch, max_staleness)
    return TaskQueue(
        blueprint.train_env.drawing,
        buffer,
        task_groups=task_groups or buffer.groups_per_batch,
        total_groups=config.num_batches * config.groups_per_batch,
        group_size=config.env.repeats,
        most_played=rounds * rows // config.env.repeats if config.policy.dynamic_sampling else None,
    )

"""Layouts of a run: all roles in this thread, or in actors on Ray.

Both functions make a learner, and the ``Rollouts`` of its samplers, reference models and teachers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torchrl import torchrl_logger

from torchrl_grpo.assembly.context import Context
from torchrl_grpo.assembly.roles import make_learner, make_reference, make_sampler, make_teacher
from torchrl_grpo.host import stalls
from torchrl_grpo.host.startup import say
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.learner.resume import refusing
from torchrl_grpo.models.sharding import leave_mesh
from torchrl_grpo.runtime.actors import make_seeded
from torchrl_grpo.runtime.cluster import Cluster, start
from torchrl_grpo.runtime.inline_driver import InlineDriver
from torchrl_grpo.runtime.learner import RayLearner
from torchrl_grpo.runtime.rollouts import Rollouts
from torchrl_grpo.runtime.staleness import GroupBuffer
from torchrl_grpo.runtime.tasks import TaskQueue
from torchrl_grpo.runtime.thread_driver import ThreadDriver
from torchrl_grpo.runtime.workers import LocalWorker, RayWorker, Worker
from torchrl_grpo.weights import Transfer


def make_in_process(
    context: Context, transfer: Transfer, resources: ExitStack
) -> tuple[Learner, Rollouts]:
    """Make the learner and the rollouts in this thread, and start them.

    Args:
        context: checked.
        transfer: kind of weight transfer to the engines.
        resources: closes everything that is made.

    Raises:
        ValueError: a part refuses its settings.
    """
    plan = context.plan
    # small models change it
    resources.callback(torch.set_num_threads, torch.get_num_threads())
    if context.config.train_model.cpu_offload:
        resources.callback(leave_mesh)
    learner = make_learner(context.without_tests(), transfer, device=plan.train[0])
    resources.callback(learner.close)

    def make_worker(role: str, index: int, name: str, factory: Callable[..., Any]) -> Worker:
        device = plan.inference[index][0] if role == "inference" else getattr(plan, role)[index]
        return LocalWorker(name, partial(factory, device=device))

    driver = InlineDriver()
    rollouts = _make_rollouts(context, transfer, learner, driver, make_worker)
    resources.callback(rollouts.close)
    rollouts.start()
    return learner, rollouts


def start_cluster(address: str | None, resources: ExitStack) -> Cluster:
    """Start Ray, or join the cluster at an address; ``resources`` shuts it down or leaves it."""
    say("starting Ray" if address is None else f"joining the Ray cluster at {address}")
    cluster = start(address)
    resources.callback(cluster.shutdown)
    return cluster


def make_on_ray(
    context: Context,
    transfer: Transfer,
    resources: ExitStack,
    cluster: Cluster | None,
    watch: stalls.Watch | None,
) -> tuple[RayLearner, Rollouts]:
    """Make each rank, engine, reference model and teacher in its own actor, and start them.

    Args:
        context: checked.
        transfer: kind of weight transfer to the engines.
        resources: closes everything that is made.
        cluster: the cluster that was joined; None starts one on this machine.
        watch: reports a stalled run, including its processes on Ray.

    Raises:
        ValueError: Ray has no room, or a part refuses its settings.
    """
    torchrl_logger.info(
        f"The weights reach the engines by inference_model.weight_transfer={transfer.name}."
    )
    cluster = cluster or start_cluster(None, resources)
    plan, train, ray = context.plan, context.config.train_model, context.config.ray
    resume = context.resume
    options = cluster.place(plan, tensor_parallel_size=train.tensor_parallel_size)
    cluster.check_object_store(_stored_bytes(context, transfer))
    learner = RayLearner(
        partial(make_learner, context.without_tests(), transfer),
        options=options["train"],
        tensor_parallel_size=train.tensor_parallel_size,
        replicas=train.replicas,
        actor_timeout_s=ray.actor_timeout_s,
        resumed_from=None if resume is None else resume.path,
    )
    cluster.watch(learner.last_saved)
    resources.callback(learner.close)
    geometry = context.geometry
    # An engine may take several calls at a time: tasks, an update and an evaluation.
    is_concurrent = geometry.concurrent_tasks > 1 or not geometry.waits
    sampler_callers = geometry.concurrent_tasks + 2 if is_concurrent else 1

    def make_worker(role: str, index: int, name: str, factory: Callable[..., Any]) -> Worker:
        callers = sampler_callers if role == "inference" else 1
        actor_options = {**options[role][index], "max_concurrency": callers}
        return RayWorker(name, factory, actor_options, ray.actor_timeout_s)

    driver = ThreadDriver(
        actor_timeout_s=ray.actor_timeout_s, recovery_timeout_s=ray.recovery_timeout_s
    )
    rollouts = _make_rollouts(context, transfer, learner, driver, make_worker)
    resources.callback(rollouts.close)
    say(f"starting {sum(map(len, options.values()))} processes that load their models")
    if plan.colocated:  # engines measure free memory, so the learner allocates its own first
        learner.start()
        rollouts.start()
    else:
        rollouts.start()
        learner.start()
    rollouts.wait_until_ready()
    if watch is not None:
        watch.where = rollouts.what_is_missing
        watch.pids = lambda: [*rollouts.pids().values(), *learner.pids]
        watch.elsewhere = lambda: cluster.stacks(watch.pids())
    return learner, rollouts


def _stored_bytes(context: Context, transfer: Transfer) -> int:
    """Return the bytes of weights in Ray's object store at a time.

    The store holds two versions: the one being read and the next one. Adapters, and other kinds of
    weight transfer, do not count.
    """
    config = context.config
    if context.adapter_slots or config.evaluates_served:
        return 0
    if transfer.kind != "object_store":
        return 0
    itemsize: int = getattr(torch, config.inference_model.dtype).itemsize
    return 2 * int(context.shape.parameters) * itemsize


def _make_rollouts(
    context: Context,
    transfer: Transfer,
    learner: Learner | RayLearner,
    driver: InlineDriver | ThreadDriver,
    make_worker: Callable[[str, int, str, Callable[..., Any]], Worker],
) -> Rollouts:
    """Make the rollouts, without starting them, in the state of the checkpoint to resume.

    ``make_worker`` takes the role, the worker's index within the role, its name, and the factory of
    its part.
    """
    config, plan, geometry = context.config, context.plan, context.geometry
    untested = context.without_tests()
    most_played = None
    if config.policy.dynamic_sampling:
        rows = config.policy.max_sampling_rounds * config.env.num_envs
        most_played = rows // config.env.repeats
    tasks = TaskQueue(
        context.train_env.drawing,
        GroupBuffer(config.groups_per_batch, context.max_staleness),
        task_groups=geometry.task_groups,
        total_groups=config.num_batches * config.groups_per_batch,
        group_size=config.env.repeats,
        most_played=most_played,
    )

    def make_sampler_worker(number: int) -> Worker:
        make = partial(make_sampler, context, number=number)
        factory = partial(make_seeded, make, config.seed + number)
        return make_worker("inference", number, f"sampler {number}", factory)

    teachers = [
        make_worker("teacher", i, f"teacher {i}", partial(make_teacher, untested, number=i))
        for i in range(len(plan.teacher))
    ]
    rollouts = Rollouts(
        tasks,
        driver,
        samplers=[make_sampler_worker(i) for i in range(len(plan.inference))],
        references=[
            make_worker("reference", i, f"reference model {i}", partial(make_reference, untested))
            for i in range(len(plan.reference))
        ],
        teachers=[teachers[number :: plan.num_teachers] for number in range(plan.num_teachers)],
        concurrent_tasks=geometry.concurrent_tasks,
        waits=geometry.waits,
        references_first=driver.overlaps and plan.colocated,
        release=learner.release,
        resend=learner.resend,
        together=transfer.together,
        turns=context.turns,
        evaluates=context.tests is not None,
    )
    if context.resume is not None:
        with refusing(context.resume.path):
            rollouts.load_state_dict(context.resume.source)
    return rollouts

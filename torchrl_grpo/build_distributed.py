"""From the config to the objects of a run whose roles are processes on Ray.

The ``make_*`` functions are called in the process of the actor that they make a part for. They get the blueprint that
the driver checked, so that all processes draw the same problems, and only the driver needs the data.
"""

from __future__ import annotations

import copy
import random
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchrl._utils import logger as torchrl_logger

from torchrl_grpo import build, weights
from torchrl_grpo.build_resume import check_units, restore_trainer
from torchrl_grpo.collectors.evaluation import Evaluator
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.config import Backend, ConfigError, GRPOConfig, WeightTransfer
from torchrl_grpo.distributed import cluster
from torchrl_grpo.distributed.actors import Rank, Replica, own_address, own_device
from torchrl_grpo.distributed.source import RaySource
from torchrl_grpo.distributed.trainer import RayTrainer
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import Engine
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.models import loading
from torchrl_grpo.placement import DevicePlan
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.weights import Sender


@dataclass
class DistributedParts:
    """The driver's handles on the roles, and what a run does after a weight sync."""

    trainer: RayTrainer
    source: RaySource
    evaluator: RaySource | None

    def refresh_reference(self) -> None:
        """Gives the reference actors the trained weights."""
        self.source.update_reference(self.trainer.full_weights())

    def sync_mismatch(self) -> tuple[float, float]:
        """The largest mean and the largest difference of log-probs between the trainer and any replica."""
        gaps = [self.trainer.gap(probe) for probe in self.source.probes()]
        return max(mean for mean, _ in gaps), max(largest for _, largest in gaps)


def check_distributed(blueprint: build.Blueprint, joined: cluster.Cluster | None = None) -> None:
    """Checks what a distributed run asks for, before anything starts.

    Args:
        blueprint: checked for itself.
        joined: the Ray cluster to use; None is one on this machine.

    Raises:
        ValueError: Ray is missing or too old, or an option does not work over several processes.
    """
    cluster.require_ray()
    config = blueprint.config
    unit_rows, _ = unit_geometry(config, len(blueprint.plan.inference))
    if blueprint.resume is not None:
        check_units(blueprint.resume, unit_rows // config.env.repeats, config)
    choose_transfer(config, blueprint.plan)


def choose_transfer(config: GRPOConfig, plan: DevicePlan) -> WeightTransfer:
    """How the weights reach the engines, ``auto`` decided; see ``weights.transfer_kind``."""
    asked = config.inference_model.weight_transfer.value
    if asked in ("adapters", "shared_memory", "file"):
        asked = "auto"
    kind = weights.transfer_kind(asked, trainer=plan.train[0], engines=plan.inference, colocated=plan.colocated)
    return WeightTransfer[kind]


def distributed_parts(
    blueprint: build.Blueprint,
    max_staleness: int,
    resources: ExitStack,
    directory: Path,
    joined: cluster.Cluster | None = None,
) -> DistributedParts:
    """Starts the actors of a run.

    Args:
        blueprint: checked.
        max_staleness: 0 is synchronous.
        resources: what must be ended is put there.
        directory: of the run.
        joined: the Ray cluster to use; None starts one on this machine.

    Raises:
        ValueError: Ray cannot start, has no room, or a part was refused where it was made.
    """
    config, plan = blueprint.config, blueprint.plan
    unit_rows, slots = unit_geometry(config, len(plan.inference))
    unit_env = build.make_env(blueprint, "train", unit_rows, config.env.repeats)
    in_flight: Any = config.inference_model.in_flight.value
    actor_timeout_s, recovery_timeout_s = config.ray.actor_timeout_s, config.ray.recovery_timeout_s
    ray = cluster.start() if joined is None else joined
    resources.callback(ray.shutdown)
    transfer = choose_transfer(config, plan)
    torchrl_logger.info(f"The weights reach the engines by inference_model.weight_transfer={transfer.value}.")
    place = ray.place(plan)
    trainer = RayTrainer(
        partial(make_rank, _without_test_split(blueprint), transfer),
        options=place.train,
        tensor_parallel_size=config.train_model.tensor_parallel_size,
        actor_timeout_s=actor_timeout_s,
        resumed_from=None if blueprint.resume is None else blueprint.resume.path,
    )
    resources.callback(trainer.close)
    groups = config.dialog_turns_per_batch // config.env.repeats
    source = RaySource(
        blueprint.train_env,
        replicas=[(partial(make_replica, blueprint, unit_env, slots), options) for options in place.inference],
        references=[(partial(make_reference, _without_test_split(blueprint)), options) for options in place.reference],
        slots=slots,
        unit_groups=unit_rows // config.env.repeats,
        groups_per_batch=groups,
        total_groups=groups * config.num_batches,
        rounds=config.policy.max_sampling_rounds if config.policy.dynamic_sampling else 1,
        max_staleness=max_staleness,
        in_flight=in_flight,
        references_first=plan.colocated,
        seed=config.seed,
        release=trainer.release,
        samples=trainer.samples,
        actor_timeout_s=actor_timeout_s,
        recovery_timeout_s=recovery_timeout_s,
    )
    resources.callback(source.close)
    if blueprint.resume is not None:
        source.load_state_dict(blueprint.resume.source)
    if plan.colocated:  # then the engine must not start while others take memory
        trainer.start()
        source.start()
    else:
        source.start()
        trainer.start()
    source.wait_until_ready()
    return DistributedParts(trainer, source, source if blueprint.greedy_env is not None else None)


def unit_geometry(config: GRPOConfig, replicas: int) -> tuple[int, int]:
    """Rows of a unit, and units that a replica plays at a time.

    The ``transformers`` engine plays one static batch at a time, vLLM any number of groups that come and go.

    Raises:
        ConfigError: ``env.num_envs`` cannot be shared out in whole groups.
    """
    rows, repeats = config.env.num_envs, config.env.repeats
    if rows % (replicas * repeats):
        step = replicas * repeats
        below, above = rows // step * step, -(-rows // step) * step
        raise ConfigError(
            f"env.num_envs={rows} must be a multiple of env.repeats={repeats} times the {replicas} replicas of the "
            f"inference model: use {f'{below} or {above}' if below else above}."
        )
    share = rows // replicas
    return (share, 1) if config.inference_model.backend is Backend.transformers else (repeats, share // repeats)


def make_sender(config: GRPOConfig, transfer: WeightTransfer) -> Sender:
    """The trainer's side of a weight transfer, in a rank's process."""
    model, lora_base = config.model, None
    if config.train_model.lora.enabled:
        trained = getattr(torch, config.train_model.dtype.value)
        lora_base = loading.CheckpointWeights(model.name, trained, model.trust_remote_code)
    return weights.make_sender(
        transfer.value,
        dtype=getattr(torch, config.inference_model.dtype.value),
        lora_base=lora_base,
        backend="nccl" if own_device().type == "cuda" else "gloo",
        host=own_address(),
    )


def make_rank(blueprint: build.Blueprint, transfer: WeightTransfer, mesh: DeviceMesh | None) -> Rank:
    """A training rank, in its process; see ``make_sender``."""
    blueprint = _here(blueprint)
    config = blueprint.config
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    trainer = build.make_trainer(blueprint, mesh)
    transforms: list[tuple[str, Any]] = []
    if config.needs_reference and config.train_model.lora.enabled:
        transforms.append(("reference", build.make_reference(blueprint, trainer.model)))
    if blueprint.resume is not None:
        restore_trainer(trainer, blueprint.resume)
    return Rank(trainer, [*transforms, *build.batch_transforms(config)], make_sender(config, transfer))


def make_replica(blueprint: build.Blueprint, unit_env: LLMEnv, slots: int) -> Replica:
    """An inference replica, in its process."""
    blueprint = _here(blueprint)
    engine = _make_engine(blueprint)
    policy = GenerationPolicy(engine, blueprint.params)
    # The environments differ in the dialogs that they are in; problems and prompts they share.
    settings = blueprint.config.policy
    collectors = [
        RolloutCollector(
            copy.copy(unit_env),
            policy,
            dynamic_sampling=settings.dynamic_sampling,
            max_sampling_rounds=settings.max_sampling_rounds,
        )
        for _ in range(slots)
    ]
    evaluator = None
    if blueprint.greedy_env is not None:
        evaluator = Evaluator(engine, blueprint.greedy_env, blueprint.sampled_env, params=blueprint.params)
    prompts = blueprint.train_env.first_prompts(4)
    return Replica(engine, collectors, evaluator, blueprint.params, prompts, blueprint.reward_pool)


def _make_engine(blueprint: build.Blueprint) -> Engine:
    """The engine of a replica; vLLM's takes many calls at a time here."""
    config = blueprint.config.inference_model
    if config.backend is Backend.transformers:
        return build.make_engine(blueprint)
    from torchrl_grpo.generation.vllm_async import AsyncVLLMEngine

    return AsyncVLLMEngine(
        loading.resolve_name(blueprint.config.model.name),
        in_flight=config.in_flight.value,
        tensor_parallel_size=config.tensor_parallel_size,
        dtype=config.dtype.value,
        max_model_len=config.max_model_len or blueprint.max_prompt_tokens + config.max_new_tokens,
        seed=blueprint.config.seed,
        gpu_memory_utilization=config.gpu_memory_utilization or 0.9,
        kv_cache_gib=config.kv_cache_gib,
        enforce_eager=config.enforce_eager,
        trust_remote_code=blueprint.config.model.trust_remote_code,
    )


def make_reference(blueprint: build.Blueprint) -> KLScoring:
    """The reference model, in its process."""
    return build.make_reference(_here(blueprint), None)


def _without_test_split(blueprint: build.Blueprint) -> build.Blueprint:
    return replace(blueprint, greedy_env=None, sampled_env=None)


def _here(blueprint: build.Blueprint) -> build.Blueprint:
    """The blueprint as an actor sees it: the devices that it was given are the only ones, and they are its own."""
    config, plan = blueprint.config, blueprint.plan
    device = own_device()
    inference = config.inference_model
    if plan.colocated and inference.gpu_memory_utilization is None:
        config = replace(config, inference_model=replace(inference, gpu_memory_utilization=0.4))
    here = DevicePlan(train=(device,), inference=((device,),), reference=(device,), colocated=False)
    return replace(blueprint, config=config, plan=here)

"""Shares of the roles of a run: the devices that each requests, and the memory it takes there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchrl_grpo.assembly.context import Context
from torchrl_grpo.assembly.errors import as_config_errors
from torchrl_grpo.assembly.estimates import encoder_cache_bytes, step_setup
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.generation.base import engine_class
from torchrl_grpo.host.accelerators import accelerators_in_use
from torchrl_grpo.host.out_of_memory import in_words
from torchrl_grpo.host.text import size
from torchrl_grpo.models.memory import (
    BYTES,
    ModelMemory,
    Shape,
    StepMemory,
    group_cache_bytes,
    shard_bytes,
    step_memory,
    weight_bytes,
)
from torchrl_grpo.runtime.placement import RoleRequest

_MEMORY_SAVERS = (
    "train_model.cpu_offload=true, train_model.lora.enabled=true, or bfloat16 as "
    "inference_model.dtype and ref_model.dtype"
)
"""Settings that need less device memory."""


def requests(config: GRPOConfig) -> dict[str, RoleRequest]:
    """Return the request of each role that is a process of its own."""
    train, engine, reference = config.train_model, config.inference_model, config.ref_model
    teacher, trains = config.teacher, not config.only_evaluates
    by_role = {
        "train": RoleRequest(train.num_devices, train.devices),
        "inference": RoleRequest(
            engine.num_devices, engine.devices, engine.devices_per_engine, len(engine.address)
        ),
    }
    if trains and config.has_own_reference and not reference.sharded:
        by_role["reference"] = RoleRequest(reference.num_devices, reference.devices)
    if trains and config.needs_teacher and not config.learner_teaches:
        by_role["teacher"] = RoleRequest(
            teacher.num_devices, teacher.devices, servers=len(config.teacher_addresses)
        )
    return by_role


@dataclass(frozen=True)
class Share:
    """Devices of a role, and the memory that it takes of each.

    Attributes:
        label: the role, as the device plan calls it.
        devices: the devices of each of its workers.
        dtype: type of its weights; empty on a server.
        parameters: number of its parameters.
        memory: memory on one device; None if its weights are another role's.
        minimum: bytes that it cannot do without on one device, by purpose.
        addresses: the servers that it runs on, instead of devices.
    """

    label: str
    devices: Sequence[Sequence[torch.device]]
    dtype: str
    parameters: float
    memory: StepMemory | ModelMemory | None = None
    minimum: Mapping[str, int] = field(default_factory=dict)
    addresses: Sequence[str] = ()

    def row(self) -> dict[str, Any]:
        """Return the role's row of the device plan."""
        peak = 0 if self.memory is None or self.addresses else self.memory.peak
        return {
            "role": self.label,
            "devices": ", ".join(self.addresses) or _format_devices(self.devices),
            "dtype": self.dtype,
            "parameters": self.parameters,
            "memory per device": peak,
        }


def shares(context: Context) -> dict[str, Share]:
    """Return the share of each role that the run has, with responses of maximum length."""
    config, parameters = context.config, context.shape.parameters
    teacher, train = config.teacher, config.train_model
    ranks = [(device,) for device in context.plan.train]
    by_role: dict[str, Share] = {}
    if not config.evaluates_served:
        by_role["train"] = _train_share(context)
    by_role["inference"] = _engine_share(context)
    if config.only_evaluates:
        return by_role
    if config.has_own_reference:
        by_role["reference"] = _reference_share(context)
    elif config.needs_reference:
        how = "average" if config.ref_model.decay else "adapters off"
        by_role["reference"] = Share(f"reference ({how})", ranks, train.dtype, parameters)
    if context.teacher_shape is not None:
        by_role["teacher"] = _teacher_share(context, context.teacher_shape)
    elif config.learner_teaches:
        by_role["teacher"] = Share(f"teacher ({teacher.weights})", ranks, train.dtype, parameters)
    return by_role


def _train_share(context: Context) -> Share:
    config, plan, images = context.config, context.plan, context.images
    prompt, response = context.longest_prompt, config.max_response_tokens
    sequences = config.optim_batch_size
    prompts = -(-sequences // config.env.repeats)
    tokens = prompts * prompt + sequences * response
    setup = replace(step_setup(config), ranks=len(plan.train))
    setup = setup.of_batch(tokens, prompt + response)
    if images is not None:
        setup = replace(setup, images=prompts * images.tokens / tokens)
    if plan.train[0].type == "cpu":  # which cannot offload
        setup = replace(setup, offloads=False)
    memory = step_memory(context.shape, setup)
    return Share(
        "train (LoRA)" if config.train_model.lora.enabled else "train",
        [(device,) for device in plan.train],
        config.train_model.quantization or config.train_model.dtype,
        context.shape.parameters,
        memory,
        {
            "trained weights and optimizer state": memory.resting,
            "gradients": memory.gradients,
        },
    )


def _engine_share(context: Context) -> Share:
    config, shape, images = context.config, context.shape, context.images
    env, engine, devices = config.env, config.inference_model, context.plan.inference
    number, ranks = BYTES[engine.dtype], engine.tensor_parallel_size
    cache = context.geometry.groups_at_a_time * group_cache_bytes(
        shape, number, context.longest_prompt, env.repeats, config.max_response_tokens
    )
    features = 0 if images is None else encoder_cache_bytes(config, shape, images.tokens)
    memory = ModelMemory(weight_bytes(shape, number, ranks), int(cache / ranks), features)
    return Share(
        f"inference ({engine.backend})",
        devices,
        engine.dtype,
        shape.parameters,
        memory,
        {"the engine's weights": memory.weights},
        engine.address,
    )


def _reference_share(context: Context) -> Share:
    config, plan, reference = context.config, context.plan, context.config.ref_model
    devices = plan.train if reference.sharded else plan.reference
    shards = len(plan.train) // config.train_model.replicas if reference.sharded else 1
    weights = shard_bytes(context.shape, BYTES[reference.dtype], shards)
    if reference.sharded and config.train_model.cpu_offload and plan.train[0].type != "cpu":
        weights = 0
    return Share(
        "reference",
        [(device,) for device in devices],
        reference.dtype,
        context.shape.parameters,
        ModelMemory(weights),
        {"the reference model": weights},
    )


def _teacher_share(context: Context, shape: Shape) -> Share:
    config, addresses = context.config, context.config.teacher_addresses
    dtype = config.of_teacher(0).teacher.dtype
    weights = weight_bytes(shape, BYTES[dtype])
    return Share(
        "teacher",
        [(device,) for device in context.plan.teacher],
        "" if addresses else dtype,
        shape.parameters,
        ModelMemory(weights),
        {"the teacher": weights},
        addresses,
    )


def _format_devices(groups: Sequence[Sequence[torch.device]]) -> str:
    """Format devices as ``cuda:0, cuda:1``, a tensor-parallel engine's as ``cuda:0+cuda:1``,
    and CPU processes as ``3 x cpu``.
    """
    names = ["+".join(map(str, group)) for group in groups]
    if len(names) > 1 and len(set(names)) == 1:
        return f"{len(names)} x {names[0]}"
    return ", ".join(names)


def check_devices(context: Context) -> None:
    """Check that each accelerator of this machine has room for the minimum of its roles: weights,
    gradients, moments, and the engine's share. Activations and CUDA's own memory are extra.

    Args:
        context: of the run.

    Raises:
        ConfigError: an accelerator lacks the room.
    """
    total = max((total for _, total in accelerators_in_use().values()), default=None)
    for device in () if context.config.evaluates_served else context.plan.devices:
        if total is not None and device.type == "cuda":
            with as_config_errors():
                _check_device(context, device, total)


def _check_device(context: Context, device: torch.device, total: int) -> None:
    roles = {
        role: share
        for role, share in shares(context).items()
        if any(device in devices for devices in share.devices)
    }
    engine = roles.pop("inference", None)
    holds = {purpose: amount for role in roles.values() for purpose, amount in role.minimum.items()}
    kind = engine_class(context.config.inference_model.backend)
    reserved = kind.device_share(context.engine_request)
    if engine is None or reserved is None:
        holds |= {} if engine is None else engine.minimum
        if sum(holds.values()) > total:
            raise ConfigError(
                f"train_model.num_devices={len(context.plan.train)} must leave each device with "
                f"room for its part, but {device} of {size(total)} would hold {in_words(holds)}: "
                f"use more devices, {_MEMORY_SAVERS}."
            )
        return
    if context.turns:  # the engine's share and the gradients never exist at the same time
        holds.pop("gradients", None)
    weights = sum(engine.minimum.values())
    free_share = 1 - sum(holds.values()) / total
    if not weights / total <= reserved <= free_share:
        lower = math.ceil(weights / total * 100) / 100
        upper = math.floor(free_share * 100) / 100
        others = f" beside {in_words(holds)}" if holds else ""
        fix = (
            f"inference_model.gpu_memory_utilization={upper:g}"
            if lower <= upper and upper > 0
            else "more devices"
        )
        raise ConfigError(
            f"inference_model.gpu_memory_utilization={reserved:g} must be a share of {device} that "
            f"holds the engine's {size(weights)} of weights and fits{others}, but "
            f"that is {size(reserved * total)} of {size(total)}: use {fix}, {_MEMORY_SAVERS}."
        )

"""What the roles of a run take: the devices that they ask for, and the memory there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchrl_grpo.assembly.context import Context
from torchrl_grpo.assembly.errors import as_config_errors
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.generation.base import engine_class
from torchrl_grpo.host.accelerators import accelerators_in_use
from torchrl_grpo.host.memory import in_words
from torchrl_grpo.host.text import size
from torchrl_grpo.models.memory import Shape
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


def check_devices(context: Context) -> None:
    """Check that each accelerator of this machine has room for the minimum of its roles: weights,
    gradients, moments, and the engine's share. Activations and CUDA's own memory are extra.

    Args:
        context: of the run.

    Raises:
        ConfigError: an accelerator does not.
    """
    total = max((total for _, total in accelerators_in_use().values()), default=None)
    for device in () if context.config.evaluates_served else context.plan.devices:
        if total is not None and device.type == "cuda":
            with as_config_errors():
                _check_device(context, device, total)


def _check_device(context: Context, device: torch.device, total: int) -> None:
    config, plan, memory = context.config, context.plan, context.memory
    share = engine_class(config.inference_model.backend).device_share(context.engine_request)
    samples = any(device in group for group in plan.inference)
    train = memory.train
    holds: dict[str, float] = {}
    if device in plan.train:
        holds = {"trained weights and optimizer state": train.resting, "gradients": train.gradients}
    of_reference = plan.train if config.ref_model.sharded else plan.reference
    if device in of_reference and memory.reference is not None:
        holds["the reference model"] = memory.reference.weights
    if device in plan.teacher and memory.teacher is not None:
        holds["the teacher"] = memory.teacher.weights
    if not samples or share is None:
        holds |= {"the engine's weights": memory.engine.weights} if samples else {}
        if sum(holds.values()) > total:
            raise ConfigError(
                f"train_model.num_devices={len(plan.train)} must leave each device with room for "
                f"its part, but {device} of {size(total)} would hold {in_words(holds)}: use more "
                f"devices, {_MEMORY_SAVERS}."
            )
        return
    if context.sleeps:  # the engine's share and the gradients never exist at the same time
        holds.pop("gradients", None)
    needed = memory.engine.weights / total
    most = 1 - sum(holds.values()) / total
    if share > most or share < needed:
        lower = math.ceil(needed * 100) / 100
        upper = math.floor(most * 100) / 100
        others = f" beside {in_words(holds)}" if holds else ""
        fix = (
            f"inference_model.gpu_memory_utilization={upper:g}"
            if lower <= upper and upper > 0
            else "more devices"
        )
        raise ConfigError(
            f"inference_model.gpu_memory_utilization={share:g} must be a share of {device} that "
            f"holds the engine's {size(memory.engine.weights)} of weights and fits{others}, but "
            f"that is {size(share * total)} of {size(total)}: use {fix}, {_MEMORY_SAVERS}."
        )


def plan_rows(context: Context) -> list[dict[str, Any]]:
    """Return the device plan: one row per role, with the memory of one of its devices."""
    config, plan, memory = context.config, context.plan, context.memory
    train = config.train_model
    inference = config.inference_model
    teacher = config.teacher
    ranks = [(device,) for device in plan.train]
    rows: list[dict[str, Any]] = []

    def add(
        role: str,
        devices: Sequence[Sequence[torch.device]],
        dtype: str,
        peak: int = 0,
        shape: Shape | None = context.shape,
        addresses: Sequence[str] = (),
    ) -> None:
        row = {
            "role": role,
            "devices": ", ".join(addresses) or _format_devices(devices),
            "dtype": dtype,
            "parameters": 0 if shape is None else shape.parameters,
            "memory per device": 0 if addresses else peak,
        }
        rows.append(row)

    if not config.evaluates_served:
        add(
            "train (LoRA)" if train.lora.enabled else "train", ranks, train.dtype, memory.train.peak
        )
    engine, addresses = f"inference ({inference.backend})", inference.address
    add(engine, plan.inference, inference.dtype, memory.engine.peak, addresses=addresses)
    if config.only_evaluates:
        return rows
    if memory.reference is not None:
        own = ranks if config.ref_model.sharded else [(device,) for device in plan.reference]
        add("reference", own, config.ref_model.dtype, memory.reference.peak)
    elif config.needs_reference:
        what = "average" if config.ref_model.decay else "adapters off"
        add(f"reference ({what})", ranks, train.dtype)
    if memory.teacher is not None:
        own = [(device,) for device in plan.teacher]
        addresses = config.teacher_addresses
        dtype = "" if addresses else config.of_teacher(0).teacher.dtype
        shape = context.teacher_shape
        add("teacher", own, dtype, memory.teacher.peak, shape, addresses)
    elif config.learner_teaches:
        add(f"teacher ({teacher.weights})", ranks, train.dtype)
    return rows


def _format_devices(groups: Sequence[Sequence[torch.device]]) -> str:
    """Format devices as ``cuda:0, cuda:1``, those of a tensor-parallel engine as ``cuda:0+cuda:1``,
    and CPU processes as ``3 x cpu``.
    """
    names = ["+".join(map(str, group)) for group in groups]
    if len(names) > 1 and len(set(names)) == 1:
        return f"{len(names)} x {names[0]}"
    return ", ".join(names)

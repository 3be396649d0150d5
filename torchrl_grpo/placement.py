"""Which role runs on which device: ``num_devices`` or ``devices`` of each role to a ``DevicePlan``.

One process drives everything here: on a CPU all roles share it, on one accelerator they take turns (colocated), and
with more each role gets one of its own (with two, the reference model shares the trainer's).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

ROLES = ("train", "inference", "reference")
_FIELDS = {"train": "train_model", "inference": "inference_model", "reference": "ref_model"}


@dataclass(frozen=True)
class RoleRequest:
    """What was asked for one role: a number, or indices, or neither."""

    num_devices: int | None = None
    devices: Sequence[int] | None = None


@dataclass(frozen=True)
class DevicePlan:
    """Where each role runs.

    Attributes:
        train: device of the trained model.
        inference: device of the generation engine.
        reference: device of the reference model, None when there is none.
        colocated: whether the engine shares its accelerator, and must give its memory back while the others work.
    """

    train: torch.device
    inference: torch.device
    reference: torch.device | None
    colocated: bool


def available_accelerators() -> list[torch.device]:
    """The accelerators of this machine: CUDA devices, or one MPS device, or none."""
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        return [torch.device("mps")]
    return []


def plan_devices(
    requests: Mapping[str, RoleRequest], accelerators: Sequence[torch.device], *, needs_reference: bool
) -> DevicePlan:
    """Places the roles.

    Args:
        requests: what was asked for each role of ``ROLES``; the reference model's request counts only if it is needed.
        accelerators: those of this machine, empty on a CPU-only one.
        needs_reference: whether there is a reference model of its own.

    Raises:
        ValueError: more devices than there are, an index that does not exist, overlapping devices, or a role on
            several devices, which takes more than one process.
    """
    roles = [role for role in ROLES if role != "reference" or needs_reference]
    for role in roles:
        _check_request(role, requests[role], accelerators)
    if not accelerators:
        cpu = torch.device("cpu")
        return DevicePlan(cpu, cpu, cpu if needs_reference else None, colocated=False)
    placed = _place_manual(requests, roles, accelerators)
    free = [device for device in accelerators if device not in placed.values()]
    explicit = any(requests[role].num_devices is not None for role in roles) or bool(placed)
    missing = [role for role in roles if role not in placed]
    may_share = "reference" in missing and requests["reference"].num_devices is None
    if may_share and len(free) == len(missing) - 1 and len(accelerators) > 1:
        placed |= dict(zip([role for role in missing if role != "reference"], free, strict=True))
        placed["reference"] = placed["train"]  # it works while the trainer waits
    elif len(free) >= len(missing):
        placed |= dict(zip(missing, free, strict=False))
    elif explicit and len(accelerators) > 1:
        raise ValueError(
            f"the roles {', '.join(_FIELDS[role] for role in missing)} need {len(missing)} more devices, but only "
            f"{len(free)} of {len(accelerators)} are free: lower num_devices, or give fewer devices."
        )
    else:
        placed |= dict.fromkeys(missing, accelerators[0])
    shared = placed["inference"] in [device for role, device in placed.items() if role != "inference"]
    return DevicePlan(placed["train"], placed["inference"], placed.get("reference"), colocated=shared)


def _check_request(role: str, request: RoleRequest, accelerators: Sequence[torch.device]) -> None:
    name = _FIELDS[role]
    if request.devices is not None:
        unknown = [index for index in request.devices if index >= len(accelerators)]
        if unknown:
            raise ValueError(
                f"{name}.devices={list(request.devices)} must be accelerators of this machine, which has "
                f"{len(accelerators)}: leave {name}.devices out"
                + (f", or use indices below {len(accelerators)}." if accelerators else " to run on the CPU.")
            )
    count = len(request.devices) if request.devices is not None else request.num_devices or 1
    if accelerators and count > len(accelerators):
        raise ValueError(
            f"{name}.num_devices={count} must not be more than the {len(accelerators)} accelerators of this machine: "
            f"use {name}.num_devices={len(accelerators)} or less."
        )
    if count > 1:
        asked = f"devices={list(request.devices)}" if request.devices is not None else f"num_devices={count}"
        raise ValueError(
            f"{name}.{asked} must be one device, because this version runs each role in one process: "
            f"use {name}.num_devices=1."
        )


def _place_manual(
    requests: Mapping[str, RoleRequest], roles: Sequence[str], accelerators: Sequence[torch.device]
) -> dict[str, torch.device]:
    placed: dict[str, torch.device] = {}
    for role in roles:
        devices = requests[role].devices
        if devices is None:
            continue
        device = accelerators[devices[0]]
        other = next((name for name, taken in placed.items() if taken == device), None)
        if other is not None and len(accelerators) > 1:
            raise ValueError(
                f"{_FIELDS[role]}.devices={list(devices)} must not overlap {_FIELDS[other]}.devices: both name "
                f"{device}; give each role its own, or leave both out to have them placed."
            )
        placed[role] = device
    return placed

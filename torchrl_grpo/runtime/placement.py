"""Devices of each role: from ``num_devices`` or ``devices`` to a ``DevicePlan``.

On a machine without accelerators a device is a process, and there is no limit to them. With one
accelerator the roles take turns on it (colocated). With more, each role gets its own; if only the
reference model or the teacher is left without one, and nobody asked for one, it shares the trained
model's. A role may ask for all that the others leave. Roles that both do, and those that are given
the trained model's devices by index, take turns on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

ROLES = ("train", "inference", "reference", "teacher")
SCORERS = ("reference", "teacher")
"""Roles that need no device of their own: they work while the learner waits."""
_FIELDS = {
    "train": "train_model",
    "inference": "inference_model",
    "reference": "ref_model",
    "teacher": "teacher",
}


@dataclass(frozen=True)
class RoleRequest:
    """Device request of one role: a number, all that the others leave, indices of accelerators, or
    nothing.
    """

    num_devices: int | Literal["all"] | None = None
    devices: Sequence[int] | None = None


@dataclass(frozen=True)
class DevicePlan:
    """Devices of each role.

    Attributes:
        train: the trained model's devices, one for each rank of the learner.
        inference: the engines, each with its devices: as many as ``engine_devices``.
        reference: the reference model's devices, each with a whole copy; empty when there is no
            such model.
        colocated: whether the engine shares its accelerator, and must give its memory back while
            the others work.
        teacher: the teacher's devices, likewise.
    """

    train: tuple[torch.device, ...]
    inference: tuple[tuple[torch.device, ...], ...]
    reference: tuple[torch.device, ...]
    colocated: bool
    teacher: tuple[torch.device, ...] = ()

    @property
    def devices(self) -> list[torch.device]:
        """Return all devices, each once."""
        engines = [device for group in self.inference for device in group]
        return list(dict.fromkeys([*self.train, *engines, *self.reference, *self.teacher]))

    @property
    def distributed(self) -> bool:
        """Return whether a role has more than one device and so needs more than one process."""
        return (
            max(
                len(self.train),
                sum(map(len, self.inference)),
                len(self.reference),
                len(self.teacher),
            )
            > 1
        )


def available_accelerators() -> list[torch.device]:
    """Return the accelerators of this machine: CUDA devices, or one MPS device, or none."""
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        return [torch.device("mps")]
    return []


def own_device() -> torch.device:
    """Return the default device of this process: its first accelerator, or the CPU."""
    return next(iter(available_accelerators()), torch.device("cpu"))


def plan_devices(
    requests: Mapping[str, RoleRequest],
    accelerators: Sequence[torch.device],
    *,
    needs_reference: bool,
    needs_teacher: bool = False,
    engine_devices: int = 1,
    servers: int = 0,
    teacher_servers: int = 0,
    cluster: str | None = None,
) -> DevicePlan:
    """Assign devices to the roles.

    Args:
        requests: what was asked for each role of ``ROLES``; that of the reference model, or of the
            teacher, counts only if it is needed.
        accelerators: those of the machine or of the cluster, empty if it has CPUs only.
        needs_reference: whether there is a separate reference model.
        needs_teacher: whether there is a teacher.
        engine_devices: devices of one engine.
        servers: engines that run elsewhere and take no device; 0 is none.
        teacher_servers: teachers, likewise.
        cluster: address of the Ray cluster that the accelerators belong to, None for this machine.
            Ray decides which of its accelerators a process gets, so in the plan of a cluster the
            indices only tell them apart.

    Raises:
        ValueError: more devices than there are, an index that does not exist or that names a
            cluster's accelerator, devices that overlap in part or not with the trained model's, a
            number of the engine's devices that is no multiple of ``engine_devices``, or all devices
            for engine and reference model alone, or where there are none.
    """
    where = "this machine" if cluster is None else f"the Ray cluster at {cluster}"
    left_out = {
        "reference": not needs_reference,
        "teacher": not needs_teacher or teacher_servers > 0,
        "inference": servers > 0,
    }
    roles = [role for role in ROLES if not left_out.get(role)]
    sharing = [role for role in roles if requests[role].num_devices == "all"]
    requests = _numbered(requests, roles, sharing, len(accelerators), engine_devices, where)
    counts = {role: _count(role, requests[role], engine_devices) for role in roles}
    for role in roles:
        _check_indices(role, requests[role], len(accelerators), cluster)
    if not accelerators:
        placed = {role: [torch.device("cpu")] * counts[role] for role in roles}
    else:
        placed = _place(requests, counts, sharing, accelerators, where)
    engine, size = placed.get("inference", [torch.device("cpu")] * servers), engine_devices
    others = {device for role in roles if role != "inference" for device in placed[role]}
    return DevicePlan(
        train=tuple(placed["train"]),
        inference=tuple(
            tuple(engine[start : start + size]) for start in range(0, len(engine), size)
        ),
        reference=tuple(placed.get("reference", ())),
        colocated=bool(accelerators) and not others.isdisjoint(engine),
        teacher=tuple(
            placed.get("teacher", [torch.device("cpu")] * (teacher_servers if needs_teacher else 0))
        ),
    )


def num_unused(plan: DevicePlan, accelerators: Sequence[torch.device]) -> int:
    """Return the number of accelerators without a role in a plan."""
    return len(set(accelerators).difference(plan.devices))


def _numbered(
    requests: Mapping[str, RoleRequest],
    roles: Sequence[str],
    sharing: Sequence[str],
    total: int,
    engine_devices: int,
    where: str,
) -> Mapping[str, RoleRequest]:
    """Return the requests with numbers instead of ``all``, which the roles ``sharing`` asked for."""
    if not sharing:
        return requests
    [role, *more] = sharing
    asked = " and ".join(f"{_FIELDS[shared]}.num_devices=all" for shared in sharing)
    if more and role != "train":
        raise ValueError(
            f"{asked} exclude each other, because roles take turns on the trained model's devices "
            "alone: give one of them a number, or use train_model.num_devices=all too."
        )
    if total == 0:
        raise ValueError(
            f"{asked} needs accelerators, and {where} has none, where a device is a process: use "
            f"{_FIELDS[role]}.num_devices=1."
        )
    group = engine_devices if "inference" in sharing else 1
    left = total - sum(
        _count(other, requests[other], engine_devices) for other in roles if other not in sharing
    )
    for scorer in SCORERS:
        if scorer in roles and requests[scorer] == RoleRequest() and (more or left < group):
            left += 1  # it shares the trained model's
    left = 1 if total == 1 else left // group * group
    if left < 1:
        raise ValueError(
            f"{asked} must leave a role {group} or more of the {total} accelerators of {where}: "
            "give the others fewer."
        )
    numbered = {shared: replace(requests[shared], num_devices=left) for shared in sharing}
    return {**requests, **numbered}


def _asked(role: str, request: RoleRequest, count: int) -> str:
    """Return the config override of a request."""
    devices = request.devices
    return f"{_FIELDS[role]}." + (
        f"devices={list(devices)}" if devices is not None else f"num_devices={count}"
    )


def _count(role: str, request: RoleRequest, engine_devices: int) -> int:
    """Return the number of devices for a role; ``all`` was replaced by a number."""
    group = engine_devices if role == "inference" else 1
    assert request.num_devices != "all"
    count = request.num_devices or group if request.devices is None else len(request.devices)
    if count % group:
        raise ValueError(
            f"{_asked(role, request, count)} must be a multiple of the {group} devices of an "
            f"engine (inference_model.tensor_parallel_size): use {-(-count // group) * group} "
            f"devices, or a tensor_parallel_size that divides {count}."
        )
    return count


def _place(
    requests: Mapping[str, RoleRequest],
    counts: Mapping[str, int],
    sharing: Sequence[str],
    accelerators: Sequence[torch.device],
    where: str,
) -> dict[str, list[torch.device]]:
    """Return the accelerators of each role of ``counts``; those of ``sharing`` get the same ones."""
    total = len(accelerators)
    placed: dict[str, list[torch.device]] = {}
    for role, count in counts.items():
        asked, devices = _asked(role, requests[role], count), requests[role].devices
        if count > total:
            raise ValueError(
                f"{asked} must not be more than the {total} accelerators of {where}: use "
                f"{_FIELDS[role]}.num_devices={total} or less."
            )
        if devices is None:
            continue
        mine = [accelerators[index] for index in devices]
        for other in placed:
            shared = [str(device) for device in placed[other] if device in mine]
            in_turns = set(mine) == set(placed[other]) == set(placed.get("train", ()))
            if shared and not in_turns and total > 1:  # a single accelerator is shared by all
                raise ValueError(
                    f"{asked} must not overlap {_asked(other, requests[other], 0)}: both name "
                    f"{', '.join(shared)}; give each role its own, or just those of "
                    "train_model.devices to have the roles take turns on them."
                )
        placed[role] = mine
    free = [
        device
        for device in accelerators
        if not any(device in devices for devices in placed.values())
    ]
    missing = {role: count for role, count in counts.items() if role not in (*placed, *sharing[1:])}
    if total == 1:
        return placed | {role: list(accelerators) for role in counts if role not in placed}
    unasked = [role for role in SCORERS if role in missing and requests[role].num_devices is None]
    if (short := sum(missing.values()) - len(free)) <= len(unasked):
        for role in unasked[: max(0, short)]:
            del missing[role]
    if sum(missing.values()) > len(free):
        asked = ", ".join(_asked(role, requests[role], count) for role, count in missing.items())
        raise ValueError(
            f"{asked} must fit on the accelerators of {where}: they need {sum(missing.values())}, "
            f"and {len(free)} of {total} are free; lower num_devices, give fewer devices, or have "
            "roles take turns on the same ones (train_model.num_devices=all "
            "inference_model.num_devices=all)."
        )
    for role, count in missing.items():
        placed[role], free = free[:count], free[count:]
    for role in sharing:
        placed[role] = placed[sharing[0]]
    for role in SCORERS:
        if role in counts:
            placed.setdefault(role, placed["train"][:1])
    return placed


def _check_indices(role: str, request: RoleRequest, total: int, cluster: str | None) -> None:
    if request.devices is None or (
        cluster is None and all(index < total for index in request.devices)
    ):
        return
    name, devices = _FIELDS[role], list(request.devices)
    number = f"use {name}.num_devices={len(devices)}"
    if cluster is not None:
        raise ValueError(
            f"{name}.devices={devices} must be left out with ray.address={cluster}, because "
            f"indices name the accelerators of one machine: {number}."
        )
    instead = f"use indices below {total}" if total else f"{number} for CPU processes"
    raise ValueError(
        f"{name}.devices={devices} must be accelerators of this machine, which has {total}: leave "
        f"{name}.devices out, or {instead}."
    )

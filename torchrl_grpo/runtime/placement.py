"""Devices of each role: from ``num_devices`` or ``devices`` to a ``DevicePlan``.

On a machine without accelerators a device is a process, and their number is not limited. With one
accelerator the roles take turns on it (colocated). With more, each role gets its own devices; if
only the reference model or the teacher has none left, and the config requests none, it shares the
trained model's. A role may request all devices that the others leave. Roles that both do, and roles
that request the trained model's devices by index, take turns on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

ROLES = ("train", "inference", "reference", "teacher")
SCORERS = ("reference", "teacher")
"""Roles that can share the learner's device, because they work while the learner waits."""
_FIELDS = {
    "train": "train_model",
    "inference": "inference_model",
    "reference": "ref_model",
    "teacher": "teacher",
}


@dataclass(frozen=True)
class RoleRequest:
    """Device request of one role.

    Attributes:
        num_devices: number of devices, or all that the others leave; None leaves it open.
        devices: indices of accelerators, instead of a number.
        group: devices that belong together, such as an engine's.
        servers: number of servers that the role runs on, without devices of its own.
    """

    num_devices: int | Literal["all"] | None = None
    devices: Sequence[int] | None = None
    group: int = 1
    servers: int = 0

    @property
    def is_open(self) -> bool:
        """Return whether the role can do without devices of its own."""
        return self.num_devices is None and self.devices is None


@dataclass(frozen=True)
class DevicePlan:
    """Devices of each role.

    Attributes:
        train: the trained model's devices, one for each rank of the learner.
        inference: the devices of each engine.
        reference: the reference model's devices, each with a full copy; empty without such a model.
        colocated: whether the engine shares its accelerator with another role. ``Context.turns``
            says whether it then releases its memory while the other one works.
        teacher: the same for the teachers, in turn: teacher 0, teacher 1, ..., teacher 0 again.
        num_teachers: number of different teachers.
    """

    train: tuple[torch.device, ...]
    inference: tuple[tuple[torch.device, ...], ...]
    reference: tuple[torch.device, ...]
    colocated: bool
    teacher: tuple[torch.device, ...] = ()
    num_teachers: int = 1

    def with_teachers(self, number: int) -> DevicePlan:
        """Return the plan for a number of different teachers, each with at least one of the
        teacher's devices; fewer devices are shared.
        """
        devices = [*self.teacher] * number if len(self.teacher) < number else self.teacher
        kept = max(number, len(self.teacher)) if self.teacher else 0
        return replace(self, teacher=tuple(devices[:kept]), num_teachers=max(1, number))

    @property
    def devices(self) -> list[torch.device]:
        """Return all devices, each once."""
        engines = [device for group in self.inference for device in group]
        return list(dict.fromkeys([*self.train, *engines, *self.reference, *self.teacher]))

    @property
    def distributed(self) -> bool:
        """Return whether a role has more than one device and so needs more than one process."""
        engines = sum(map(len, self.inference))
        copies = -(-len(self.teacher) // self.num_teachers)
        return max(len(self.train), engines, len(self.reference), copies) > 1


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
    cluster: str | None = None,
) -> DevicePlan:
    """Assign devices to the roles.

    Args:
        requests: the request of each role that the run has, by its name in ``ROLES`` and in their
            order; there is always a learner and an engine.
        accelerators: accelerators of the machine or the cluster; empty if it has only CPUs.
        cluster: address of the Ray cluster that the accelerators belong to; None for this machine.
            Ray decides which accelerators a process gets, so in a cluster's plan the indices only
            tell them apart.

    Raises:
        ValueError: requests exceed the devices, an index does not exist or is used with a cluster,
            roles overlap in part or on devices other than the trained model's, the engines' devices
            are not a multiple of an engine's, or ``all`` is requested without accelerators or by
            several roles without the trained model.
    """
    where = "this machine" if cluster is None else f"the Ray cluster at {cluster}"
    cpu = torch.device("cpu")
    group = requests["inference"].group
    served = {role: [cpu] * request.servers for role, request in requests.items()}
    requests = {role: request for role, request in requests.items() if not request.servers}
    sharing = [role for role, request in requests.items() if request.num_devices == "all"]
    requests = _resolve_all(requests, sharing, len(accelerators), where)
    counts = {role: _count(role, request) for role, request in requests.items()}
    for role, request in requests.items():
        _check_indices(role, request, len(accelerators), cluster)
    if not accelerators:
        by_role = {role: [cpu] * count for role, count in counts.items()}
    else:
        by_role = _place(requests, counts, sharing, accelerators, where)
    others = {device for role in by_role if role != "inference" for device in by_role[role]}
    by_role = served | by_role
    engine = by_role["inference"]
    return DevicePlan(
        train=tuple(by_role["train"]),
        inference=tuple(
            tuple(engine[start : start + group]) for start in range(0, len(engine), group)
        ),
        reference=tuple(by_role.get("reference", ())),
        colocated=bool(accelerators) and not others.isdisjoint(engine),
        teacher=tuple(by_role.get("teacher", ())),
    )


def num_unused(plan: DevicePlan, accelerators: Sequence[torch.device]) -> int:
    """Return the number of accelerators that a plan does not use."""
    return len(set(accelerators).difference(plan.devices))


def _resolve_all(
    requests: Mapping[str, RoleRequest], sharing: Sequence[str], total: int, where: str
) -> Mapping[str, RoleRequest]:
    """Return the requests with ``all``, the request of the roles in ``sharing``, replaced by
    numbers.
    """
    if not sharing:
        return requests
    [first, *more] = sharing
    overrides = " and ".join(f"{_FIELDS[role]}.num_devices=all" for role in sharing)
    if more and first != "train":
        raise ValueError(
            f"{overrides} exclude each other, because roles can share only the trained model's "
            "devices: give one of them a number, or use train_model.num_devices=all too."
        )
    if total == 0:
        raise ValueError(
            f"{overrides} needs accelerators, but {where} has only CPU processes as devices: use "
            f"{_FIELDS[first]}.num_devices=1."
        )
    group = max(requests[role].group for role in sharing)
    available = total - sum(
        _count(role, request) for role, request in requests.items() if role not in sharing
    )
    for scorer in SCORERS:
        if scorer in requests and requests[scorer].is_open and (more or available < group):
            available += 1  # the role shares the trained model's device
    available = 1 if total == 1 else available // group * group
    if available < 1:
        raise ValueError(
            f"{overrides} needs at least {group} of the {total} accelerators of {where}: give the "
            "other roles fewer."
        )
    numbered = {role: replace(requests[role], num_devices=available) for role in sharing}
    return {**requests, **numbered}


def _override(role: str, request: RoleRequest, count: int) -> str:
    """Return the config override of a request."""
    devices = request.devices
    return f"{_FIELDS[role]}." + (
        f"devices={list(devices)}" if devices is not None else f"num_devices={count}"
    )


def _count(role: str, request: RoleRequest) -> int:
    """Return the number of devices for a role, whose ``all`` has been replaced by a number."""
    group = request.group
    assert request.num_devices != "all"
    count = request.num_devices or group if request.devices is None else len(request.devices)
    if count % group:
        raise ValueError(
            f"{_override(role, request, count)} must be a multiple of the {group} devices of an "
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
    """Return the accelerators of each role in ``counts``. Roles in ``sharing`` share theirs."""
    total = len(accelerators)
    by_role: dict[str, list[torch.device]] = {}
    for role, count in counts.items():
        override = _override(role, requests[role], count)
        devices = requests[role].devices
        if count > total:
            raise ValueError(
                f"{override} must not exceed the {total} accelerators of {where}: use "
                f"{_FIELDS[role]}.num_devices={total} or less."
            )
        if devices is None:
            continue
        role_devices = [accelerators[index] for index in devices]
        for other in by_role:
            common = [str(device) for device in by_role[other] if device in role_devices]
            in_turns = set(role_devices) == set(by_role[other]) == set(by_role.get("train", ()))
            if common and not in_turns and total > 1:  # a single accelerator is shared by all
                raise ValueError(
                    f"{override} must not overlap {_override(other, requests[other], 0)}: both "
                    f"name {', '.join(common)}; give each role its own devices, or exactly those "
                    "of train_model.devices to have the roles take turns on them."
                )
        by_role[role] = role_devices
    free = [
        device
        for device in accelerators
        if not any(device in devices for devices in by_role.values())
    ]
    missing = {
        role: count for role, count in counts.items() if role not in (*by_role, *sharing[1:])
    }
    if total == 1:
        return by_role | {role: list(accelerators) for role in counts if role not in by_role}
    without_request = [
        role for role in SCORERS if role in missing and requests[role].num_devices is None
    ]
    shortage = sum(missing.values()) - len(free)
    if shortage <= len(without_request):
        for role in without_request[: max(0, shortage)]:
            del missing[role]
    if sum(missing.values()) > len(free):
        overrides = [_override(role, requests[role], count) for role, count in missing.items()]
        raise ValueError(
            f"{', '.join(overrides)} must fit on the accelerators of {where}: they need "
            f"{sum(missing.values())}, but {len(free)} of {total} are free; lower num_devices, "
            "list fewer devices, or have roles take turns on the same ones "
            "(train_model.num_devices=all inference_model.num_devices=all)."
        )
    for role, count in missing.items():
        by_role[role], free = free[:count], free[count:]
    for role in sharing:
        by_role[role] = by_role[sharing[0]]
    for role in SCORERS:
        if role in counts:
            by_role.setdefault(role, by_role["train"][:1])
    return by_role


def _check_indices(role: str, request: RoleRequest, total: int, cluster: str | None) -> None:
    if request.devices is None or (
        cluster is None and all(index < total for index in request.devices)
    ):
        return
    name = _FIELDS[role]
    devices = list(request.devices)
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

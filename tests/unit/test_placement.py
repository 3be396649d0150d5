"""Placement of roles on devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.devices import gpus
from torchrl_grpo.runtime.placement import ROLES, DevicePlan, RoleRequest, num_unused, plan_devices

CPU = torch.device("cpu")
TWO = {role: RoleRequest(num_devices=2) for role in ROLES}
ALL = RoleRequest(num_devices="all")
PAIRS = {
    "train": RoleRequest(devices=[0, 1]),
    "reference": RoleRequest(devices=[2, 3]),
    "inference": RoleRequest(devices=[4, 5]),
}
THREE = {"train": RoleRequest(devices=[0, 1, 2])}
OVERLAP = {"train": RoleRequest(devices=[0, 1]), "inference": RoleRequest(devices=[1, 2])}


def plan(
    count: int,
    needs_reference: bool = True,
    needs_teacher: bool = False,
    group: int = 1,
    cluster: str | None = None,
    **requests: RoleRequest,
) -> DevicePlan:
    exists = {"reference": needs_reference, "teacher": needs_teacher}
    everything = {
        role: requests.get(role, RoleRequest()) for role in ROLES if exists.get(role, True)
    }
    everything["inference"] = replace(everything["inference"], group=group)
    return plan_devices(everything, gpus(*range(count)), cluster=cluster)


@pytest.mark.parametrize(
    ("counts", "requests", "train", "inference", "reference", "distributed"),
    [
        ([0], {}, (CPU,), ((CPU,),), (CPU,), False),
        ([3, 6, 8], {}, gpus(0), (gpus(1),), gpus(2), False),
        # The reference model shares the trainer's device, or its first one.
        ([2], {}, gpus(0), (gpus(1),), gpus(0), False),
        (
            [4],
            {"train": RoleRequest(num_devices=2), "inference": RoleRequest(num_devices=2)},
            *(gpus(0, 1), (gpus(2), gpus(3)), gpus(0), True),
        ),
        # Two devices are two processes; on a CPU there is no limit.
        ([6, 8], TWO, gpus(0, 1), (gpus(2), gpus(3)), gpus(4, 5), True),
        ([0], TWO, (CPU, CPU), ((CPU,), (CPU,)), (CPU, CPU), True),
        ([0], {"train": RoleRequest(num_devices=64)}, (CPU,) * 64, ((CPU,),), (CPU,), True),
        # What is set is kept, and the others are placed around it.
        ([6, 8], PAIRS, gpus(0, 1), (gpus(4), gpus(5)), gpus(2, 3), True),
        ([3], {"train": RoleRequest(devices=[2])}, gpus(2), (gpus(0),), gpus(1), False),
    ],
)
def test_each_role_has_devices_of_its_own_as_far_as_they_go(
    counts: list[int],
    requests: dict[str, RoleRequest],
    train: tuple[torch.device, ...],
    inference: tuple[tuple[torch.device, ...], ...],
    reference: tuple[torch.device, ...],
    distributed: bool,
) -> None:
    for count in counts:
        got = plan(count, **requests)
        assert got == DevicePlan(train, inference, reference, colocated=False)
        assert got.distributed is distributed
        if not requests:
            alone = DevicePlan(train, inference, (), colocated=False)
            assert plan(count, needs_reference=False) == alone


def test_a_teacher_has_its_own_device_or_that_of_the_learner() -> None:
    def devices(got: DevicePlan) -> tuple[object, ...]:
        return got.reference, got.teacher

    assert devices(plan(0, needs_teacher=True)) == ((CPU,), (CPU,))
    assert devices(plan(4, needs_teacher=True)) == (gpus(2), gpus(3))
    assert devices(plan(3, needs_teacher=True)) == (gpus(0), gpus(2))
    assert devices(plan(2, needs_teacher=True)) == (gpus(0), gpus(0))
    assert devices(plan(2, needs_teacher=True, needs_reference=False)) == ((), gpus(0))
    two = plan(8, needs_teacher=True, teacher=RoleRequest(num_devices=2), inference=ALL)
    assert devices(two) == (gpus(5), gpus(6, 7)) and two.distributed and len(two.devices) == 8
    assert plan(4, needs_teacher=True, inference=ALL).inference == ((gpus(1)[0],),)
    with pytest.raises(
        ValueError, match=r"teacher\.devices=\[1\] .* inference_model\.devices=\[1\]"
    ):
        plan(
            4,
            needs_teacher=True,
            inference=RoleRequest(devices=[1]),
            teacher=RoleRequest(devices=[1]),
        )


def test_one_accelerator_is_shared_in_turns() -> None:
    assert plan(1) == DevicePlan(gpus(0), (gpus(0),), gpus(0), colocated=True)
    assert plan(1, train=RoleRequest(devices=[0]), inference=RoleRequest(devices=[0])) == plan(1)
    assert not plan(1).distributed


def test_tensor_parallel_devices_are_one_replica() -> None:
    got = plan(8, group=2, train=RoleRequest(num_devices=2), inference=RoleRequest(num_devices=4))
    assert got == DevicePlan(gpus(0, 1), (gpus(2, 3), gpus(4, 5)), gpus(6), colocated=False)
    assert plan(4, group=2) == DevicePlan(gpus(0), (gpus(1, 2),), gpus(3), colocated=False)
    assert plan(0, group=2).inference == ((CPU, CPU),)
    assert plan(0, group=2).distributed


def test_all_devices_are_those_that_the_other_roles_leave() -> None:
    assert plan(8, inference=ALL) == DevicePlan(
        gpus(0), tuple(gpus(i) for i in range(1, 7)), gpus(7), colocated=False
    )
    assert plan(
        8, needs_reference=False, train=ALL, inference=RoleRequest(devices=[0, 1])
    ).train == gpus(*range(2, 8))
    assert plan(8, group=2, inference=ALL).inference == (
        gpus(1, 2),
        gpus(3, 4),
        gpus(5, 6),
    )
    assert plan(2, train=ALL) == plan(2)
    assert plan(1, train=ALL) == plan(1)


@pytest.mark.parametrize(
    ("count", "requests", "message"),
    [
        (4, {"inference": ALL, "reference": ALL}, r"ref_model\.num_devices=all .* train_model"),
        (0, {"train": ALL}, r"train_model\.num_devices=all .*num_devices=1"),
        (4, {"train": ALL, "inference": RoleRequest(num_devices=4)}, "=all .* 1 of the 4 "),
    ],
)
def test_all_devices_are_refused_where_there_are_none(
    count: int, requests: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(count, **requests)


def test_roles_that_ask_for_all_devices_take_turns_on_them() -> None:
    each = tuple(gpus(index) for index in range(8))
    turns = DevicePlan(gpus(*range(8)), each, gpus(0), colocated=True)
    assert plan(8, train=ALL, inference=ALL) == turns
    assert plan(8, train=ALL, inference=ALL, needs_reference=False).reference == ()
    assert plan(8, train=ALL, inference=ALL, reference=ALL).reference == gpus(*range(8))
    assert plan(8, train=ALL, inference=ALL, reference=RoleRequest(num_devices=2)) == DevicePlan(
        gpus(*range(6)), each[:6], gpus(6, 7), colocated=True
    )
    assert plan(7, group=2, train=ALL, inference=ALL) == DevicePlan(
        gpus(*range(6)), (gpus(0, 1), gpus(2, 3), gpus(4, 5)), gpus(6), colocated=True
    )
    assert plan(8, train=ALL, inference=ALL, cluster="auto") == turns
    assert plan(1, train=ALL, inference=ALL) == plan(1)
    assert num_unused(turns, gpus(*range(8))) == 0


def test_roles_that_are_given_the_same_devices_take_turns_on_them() -> None:
    pair, reverse = RoleRequest(devices=[2, 3]), RoleRequest(devices=[3, 2])
    assert plan(8, train=pair, inference=reverse) == DevicePlan(
        gpus(2, 3), (gpus(3), gpus(2)), gpus(0), colocated=True
    )
    assert plan(
        2, train=RoleRequest(devices=[0, 1]), inference=RoleRequest(devices=[0, 1])
    ).reference == gpus(0)
    assert plan(8, train=pair, inference=pair, reference=pair).reference == gpus(2, 3)
    assert not plan(8, train=pair, reference=reverse).colocated
    with pytest.raises(
        ValueError,
        match=r"ref_model\.devices=\[2, 3\] .* inference_model\.devices=\[",
    ):
        plan(8, inference=pair, reference=pair)
    with pytest.raises(ValueError, match=r"give each role .* train_model\.devices"):
        plan(8, train=pair, inference=RoleRequest(devices=[2]))


def test_accelerators_without_a_role_are_counted() -> None:
    assert num_unused(plan(8), gpus(*range(8))) == 5
    assert [num_unused(plan(count), gpus(*range(count))) for count in (0, 1, 2)] == [0, 0, 0]
    assert num_unused(plan(8, inference=ALL), gpus(*range(8))) == 0


def test_the_plan_of_a_cluster_has_the_clusters_accelerators() -> None:
    assert plan(6, cluster="auto", **TWO) == plan(6, **TWO)


@pytest.mark.parametrize(
    ("count", "requests", "message"),
    [
        (
            0,
            {"train": RoleRequest(devices=[0])},
            r"train_model\.devices=\[0\] must be accelerators",
        ),
        (0, PAIRS, r"train_model\.devices=\[0, 1\].* has 0: .*use train_model\.num_devices=2"),
        (1, PAIRS, r"train_model\.devices=\[0, 1\].* has 1: .*use indices below 1"),
        (3, PAIRS, r"inference_model\.devices=\[4, 5\].* has 3: .*use indices below 3"),
        (1, TWO, r"train_model\.num_devices=2 must not exceed the 1 accelerators .*: use .*=1"),
        (3, TWO, r"ref_model\.num_devices=2 .* need 6, but 3 of 3 are free"),
        (5, TWO, r"need 6, but 5 of 5 are free; lower num_devices"),
        (4, THREE | {"inference": RoleRequest(num_devices=2)}, r"=2, .*=1 .* need 3, but 1 of 4"),
        (4, OVERLAP, r"inference_model\.devices=\[1, 2\] .* train_model\.devices=\[0, 1\].*cuda:1"),
        (2, {role: RoleRequest(num_devices=1) for role in ROLES}, "need 3, but 2 of 2 are free"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_numbers(
    count: int, requests: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(count, **requests)


def test_a_replica_must_have_all_its_devices() -> None:
    request = RoleRequest(num_devices=3)
    with pytest.raises(ValueError, match=r"num_devices=3 .* 2 devices .*: use 4"):
        plan(8, group=2, inference=request)


def test_indices_are_refused_on_a_cluster_and_its_address_is_named() -> None:
    with pytest.raises(ValueError, match=r"devices=\[0, 1\] .*ray\.address=auto.*num_devices=2"):
        plan(8, cluster="auto", **PAIRS)
    with pytest.raises(ValueError, match=r"1 accelerators .* at auto"):
        plan(1, cluster="auto", **TWO)


def test_the_reference_request_does_not_count_without_a_reference_model() -> None:
    assert plan(1, needs_reference=False, reference=RoleRequest(num_devices=7)).reference == ()

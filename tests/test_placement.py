"""Roles onto devices."""

from __future__ import annotations

import pytest
import torch

from torchrl_grpo.placement import ROLES, RoleRequest, plan_devices

CPU = torch.device("cpu")


def gpus(count: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(count)]


def plan(count: int, needs_reference: bool = True, **requests: RoleRequest):
    everything = {role: requests.get(role, RoleRequest()) for role in ROLES}
    return plan_devices(everything, gpus(count), needs_reference=needs_reference)


def test_without_accelerators_all_roles_are_on_the_cpu() -> None:
    got = plan(0)
    assert (got.train, got.inference, got.reference, got.colocated) == (CPU, CPU, CPU, False)
    assert plan(0, needs_reference=False).reference is None


def test_one_accelerator_is_shared_in_turns() -> None:
    got = plan(1)
    assert {got.train, got.inference, got.reference} == set(gpus(1))
    assert got.colocated


def test_enough_accelerators_give_each_role_its_own() -> None:
    got = plan(3)
    assert [got.train, got.inference, got.reference] == gpus(3)
    assert not got.colocated
    assert not plan(2, needs_reference=False).colocated


def test_given_devices_are_kept_and_the_others_placed_around_them() -> None:
    got = plan(3, train=RoleRequest(devices=[2]))
    assert got.train == gpus(3)[2]
    assert {got.inference, got.reference} == set(gpus(2))


@pytest.mark.parametrize(
    ("count", "requests", "message"),
    [
        (0, {"train": RoleRequest(devices=[0])}, r"train_model\.devices=\[0\] must be accelerators of this machine"),
        (2, {"inference": RoleRequest(devices=[5])}, r"inference_model\.devices=\[5\].*use indices below 2"),
        (2, {"train": RoleRequest(num_devices=4)}, r"train_model\.num_devices=4 must not be more than the 2"),
        (0, {"reference": RoleRequest(num_devices=2)}, r"ref_model\.num_devices=2 must be one device"),
        (8, {"train": RoleRequest(num_devices=2)}, r"train_model\.num_devices=2 must be one device"),
        (8, {"train": RoleRequest(devices=[0, 1])}, r"train_model\.devices=\[0, 1\] must be one device"),
        (
            4,
            {"train": RoleRequest(devices=[1]), "inference": RoleRequest(devices=[1])},
            r"inference_model\.devices=\[1\] must not overlap train_model\.devices",
        ),
        (2, {role: RoleRequest(num_devices=1) for role in ROLES}, "need 3 more devices, but only 2 of 2 are free"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_numbers(count: int, requests: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(count, **requests)


def test_with_two_accelerators_the_reference_model_shares_the_trainers() -> None:
    got = plan(2)
    assert [got.train, got.inference, got.reference] == [*gpus(2), gpus(2)[0]]
    assert not got.colocated


def test_the_reference_request_does_not_count_without_a_reference_model() -> None:
    assert plan(1, needs_reference=False, reference=RoleRequest(num_devices=7)).reference is None

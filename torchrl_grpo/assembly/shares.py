"""``requests``: the devices that each role of a config asks for."""

from __future__ import annotations

from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.runtime.placement import RoleRequest


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

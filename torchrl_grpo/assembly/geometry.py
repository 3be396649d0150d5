"""Division of a batch into groups, rollout tasks and optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchrl_grpo.config import GRPOConfig


@dataclass(frozen=True)
class Geometry:
    """Division of a batch among samplers.

    Attributes:
        samplers: number of samplers.
        groups_at_a_time: groups that an engine samples at a time, of one task or of several.
        task_groups: groups in a rollout task.
        concurrent_tasks: tasks that a sampler plays at a time.
        waits: whether a sampler finishes its tasks before it takes new weights.
    """

    samplers: int
    groups_at_a_time: int
    task_groups: int
    concurrent_tasks: int
    waits: bool


def geometry_rows(config: GRPOConfig) -> list[dict[str, Any]]:
    """Return the batch geometry: the sizes of one step and of the whole run."""
    batch, steps = config.dialog_turns_per_batch, config.num_batches
    per_step = {
        "steps (weight syncs)": 1,
        "sequences": batch,
        f"groups of {config.env.repeats}": config.groups_per_batch,
        "optimizer steps": config.optim_steps_per_batch,
        "response tokens (max)": batch * config.max_response_tokens,
    }
    return [
        {"quantity": name, "per step": value, "whole run": value * steps}
        for name, value in per_step.items()
    ]

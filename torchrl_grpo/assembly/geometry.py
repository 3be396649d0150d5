"""How a batch is divided: groups, rollout tasks, optimizer steps."""

from __future__ import annotations

from typing import Any

from torchrl_grpo.checks import check_multiple
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.generation.engines import ENGINES


def task_geometry(config: GRPOConfig, samplers: int, *, sleeps: bool = False) -> tuple[int, int]:
    """Return the groups of a rollout task, and the tasks that a sampler plays at a time.

    An engine that is not concurrent plays one static batch at a time, others any number of groups
    with continuous batching. An engine that sleeps after each task gets its whole share of a batch.

    Raises:
        ValueError: ``env.num_envs`` cannot be divided into whole groups.
    """
    rows, repeats = config.env.num_envs, config.env.repeats
    what = f"env.repeats={repeats} times the {samplers} samplers of the inference model"
    check_multiple("env.num_envs", rows, samplers * repeats, what)
    groups = rows // samplers // repeats
    if sleeps:
        return config.groups_per_batch // samplers, 1
    return (1, groups) if ENGINES[config.inference_model.backend].concurrent else (groups, 1)


def geometry_rows(config: GRPOConfig) -> list[dict[str, Any]]:
    """Return the batch geometry: the sizes of one step and of the whole run."""
    batch, steps = config.dialog_turns_per_batch, config.num_batches
    per_step = {
        "sequences": batch,
        f"groups of {config.env.repeats}": config.groups_per_batch,
        "optimizer steps": config.optim_steps_per_batch,
        "response tokens (max)": batch * config.inference_model.max_new_tokens,
    }
    rows: list[dict[str, Any]] = [
        {"quantity": "steps (weight syncs)", "per step": 1, "whole run": steps}
    ]
    return rows + [
        {"quantity": name, "per step": value, "whole run": value * steps}
        for name, value in per_step.items()
    ]

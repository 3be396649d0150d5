"""How a batch is divided: groups, rollout tasks, optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchrl_grpo.checks import InFlight, check_multiple
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.generation.engines import ENGINES


@dataclass(frozen=True)
class Geometry:
    """How samplers play a batch.

    Attributes:
        samplers: number of samplers.
        groups_at_a_time: groups that a sampler's environments hold.
        task_groups: groups in a rollout task.
        concurrent_tasks: tasks that a sampler plays at a time.
        in_flight: what happens to tasks in progress when weights arrive; see ``AsyncVLLMEngine``.
    """

    samplers: int
    groups_at_a_time: int
    task_groups: int
    concurrent_tasks: int = 1
    in_flight: InFlight = "wait"


def geometry_of(
    config: GRPOConfig,
    samplers: int,
    *,
    distributed: bool,
    turns: bool = False,
    max_staleness: int = 0,
    has_reward_workers: bool = False,
) -> Geometry:
    """Return how the samplers play.

    In one process a task is a whole batch. Elsewhere an engine that is not concurrent plays one
    static batch at a time, others any number of groups with continuous batching. An engine that
    sleeps after each task gets its whole share of a batch.

    Raises:
        ValueError: ``env.num_envs`` cannot be divided into whole groups.
    """
    rows, repeats, inference = config.env.num_envs, config.env.repeats, config.inference_model
    what = f"env.repeats={repeats} times the {samplers} samplers of the inference model"
    check_multiple("env.num_envs", rows, samplers * repeats, what)
    groups = rows // samplers // repeats
    if not distributed:
        return Geometry(samplers, groups, config.groups_per_batch)
    concurrent = ENGINES[inference.backend].concurrent
    if max_staleness and has_reward_workers and not concurrent:
        # While one task is scored, the engine samples others, up to the staleness bound, and
        # weights may arrive in between.
        return Geometry(samplers, groups, groups, max_staleness + 1, "keep")
    in_flight: Any = inference.in_flight
    if turns:
        return Geometry(samplers, groups, config.groups_per_batch // samplers, 1, in_flight)
    if concurrent:
        return Geometry(samplers, groups, 1, groups, in_flight)
    return Geometry(samplers, groups, groups, 1, in_flight)


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

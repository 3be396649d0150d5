"""Schedule of a run from its config: its length, evaluations, checkpoints, reference refreshes and
exports.
"""

from __future__ import annotations

from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.learner.checkpoint import Writes
from torchrl_grpo.loop import Schedule


def schedule_of(
    config: GRPOConfig,
    *,
    reference_version: int = 0,
    ends_at: float | None = None,
) -> Schedule:
    """Return the schedule of a config whose length is known (after ``prepare``); see
    ``Schedule``.
    """
    return Schedule(
        num_batches=config.num_batches,
        evaluation_frequency=config.evaluation.frequency,
        checkpoint_frequency=config.train.checkpoint_frequency,
        export_frequency=config.train.export_frequency,
        refresh_every=None if config.ref_model.decay else config.ref_model.refresh_every,
        reference_version=reference_version,
        on_policy=config.optim_steps_per_batch == 1,
        ends_at=ends_at,
    )


def writes_of(
    config: GRPOConfig, schedule: Schedule, done: int, checkpoint_bytes: int, model_bytes: int
) -> Writes:
    """Return the checkpoints and models that a run writes after ``done`` steps.

    Args:
        config: validated.
        schedule: schedule of the run.
        done: number of trained steps.
        checkpoint_bytes: size of one checkpoint.
        model_bytes: size of one model.
    """
    models = 0 if config.only_evaluates else 1
    if not config.train_model.lora.enabled:  # adapters are small
        models += schedule.num_due(schedule.export_frequency, done)
    return Writes(
        schedule.checkpoints(done),
        checkpoint_bytes,
        models,
        model_bytes,
        config.train.keep_checkpoints,
    )

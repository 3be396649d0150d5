"""Amounts of sampling and training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchrl_grpo import checks
from torchrl_grpo.config.fields import choice, limited
from torchrl_grpo.config.rule import Rule, exclusive


@dataclass
class TrainConfig:
    """How much is sampled, and how it is split into optimizer steps."""

    total_dialog_turns: int = limited(100_000, ge=0)
    """Trajectories to train on, rounded up to whole batches. A dialog is one trajectory, however
    many turns it has. 0 only evaluates; with resume it evaluates that checkpoint."""
    total_epochs: int | None = limited(None, ge=1)
    """Passes over the training problems, instead of total_dialog_turns: env.repeats trajectories of
    each problem that is not too long, rounded up to whole batches. Problems that difficulty_filter
    skips count too."""
    total_steps: int | None = limited(None, ge=1)
    """Steps to train, instead of total_dialog_turns: batches of dialog_turns_per_batch."""
    dialog_turns_per_batch: int | None = limited(None, ge=2, le=2**20)
    """Trajectories between two weight syncs, a multiple of env.num_envs, which is the default; at
    most 1,048,576.
    """
    optim_batch_size: int | None = limited(None, ge=1)
    """Trajectories per optimizer step; must divide dialog_turns_per_batch, which is the default."""
    epochs: int = limited(1, ge=1)
    """Passes over each collected batch, at least 1."""
    micro_batch_tokens: int = limited(16_384, ge=1)
    """Maximum number of tokens in one forward and backward pass; it does not change the gradient.
    """
    max_staleness: int | None = limited(None, ge=0)
    """Maximum number of steps by which the weights that sampled a trajectory may be older than
    those trained on it: 0 in grpo.py; any number in grpo-async.py, by default 1."""
    mixed_precision: str = choice(checks.Precision, "full")
    """Autocast of the training step: full (none), bf16 or fp16 (with a loss scaler)."""
    resume: str | None = None
    """A checkpoint, or the folder of a run, whose newest complete checkpoint is used: the run
    continues from there, with its config, in a new folder. auto continues in its own folder, or
    starts there. Model, data, batch size and the optimizer's warm-up must stay the same; length,
    learning rate, loss, devices and frequencies may change."""
    checkpoint_frequency: int = limited(0, ge=0)
    """Steps between two checkpoints; one is always written at the end, and 0 writes only that."""
    export_frequency: int = limited(0, ge=0)
    """Steps between two exported models (model_000100 and so on, for from_pretrained; with LoRA
    only the adapters) next to the checkpoints. 0 writes the model only at the end."""
    keep_checkpoints: str | None = "last:3"
    """Checkpoints to keep when a newer one is written: last:3 keeps the newest three, last:3,best:1
    also the best one by eval/pass@1, of those evaluated at their step (typed with quotes:
    'train.keep_checkpoints="last:3,best:1"'). null keeps all."""
    time_limit: float | None = limited(None, gt=0)
    """Seconds after which the run saves, writes the model and ends with exit status 0; no step
    starts that would not end in time."""
    stall_timeout_s: float | None = limited(3600.0, gt=0)
    """Seconds without progress (a batch, a step, a response of an evaluation) after which the run
    writes the stacks of its processes into stacks.txt, saves, and ends with exit status 75. null
    waits indefinitely."""
    max_nonfinite_steps: int = limited(5, ge=1)
    """Consecutive optimizer steps with a non-finite loss or gradient, or without a token that
    counts (no reward is valid), after which the run ends, at least 1."""
    max_steps_without_signal: int | None = limited(None, ge=1)
    """Consecutive steps without a group whose valid rewards differ, after which the run ends, at
    least 1; null continues, with an alarm."""


def _nearest_divisors(config: Any) -> dict[str, Any] | None:
    batch, step = config.dialog_turns_per_batch, config.optim_batch_size
    if batch % step == 0:
        return None
    divisors = [size for size in range(1, batch + 1) if batch % size == 0]
    below = max(size for size in divisors if size < step)
    nearest = [below, *(size for size in divisors if size > step)][:2]
    return {
        "train.optim_batch_size": step,
        "train.dialog_turns_per_batch": batch,
        "divisors": " or ".join(map(str, nearest)),
    }


RULES = (
    Rule(
        "train.optim_batch_size",
        "must divide {train.dialog_turns_per_batch=}",
        "use {divisors}",
        _nearest_divisors,
    ),
    exclusive("train.total_steps", "train.total_epochs"),
)

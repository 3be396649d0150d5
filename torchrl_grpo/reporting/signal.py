"""``Signal``: counts the steps of a run that had nothing to learn from. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Signal:
    """Counts steps without a learning signal.

    Attributes:
        steps: number of steps so far.
        steps_without_signal: number of consecutive steps, up to the latest, in which the rewards of
            every group were equal or invalid.
        steps_without_reward: number of steps of the run if all rewards so far were invalid, else 0.
        fails_alike: whether the first step had no valid reward, and all are invalid for one cause.
        reward_error: the first error of a reward among the samples; empty without one.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.steps_without_signal = 0
        self.steps_without_reward = 0
        self.fails_alike = False
        self.reward_error = ""

    def take(self, row: Mapping[str, Any]) -> None:
        """Count a row of ``metrics.jsonl``, in the order of the steps."""
        if "rollout/sequences" not in row:  # an evaluation before training
            return
        all_invalid = row.get("rollout/invalid") == row["rollout/sequences"]
        was_without_reward = self.steps_without_reward == self.steps
        self.steps += 1
        self.steps_without_signal = self.steps_without_signal + 1 if no_signal(row) else 0
        self.steps_without_reward = self.steps if was_without_reward and all_invalid else 0
        causes = [name for name in row if name.startswith("rewards/invalid_")]
        self.fails_alike = self.steps_without_reward == 1 == len(causes)


def no_signal(row: Mapping[str, Any]) -> bool:
    """Return whether a step had nothing to learn: no advantages, and neither a teacher nor
    demonstrations in the loss.
    """
    return row.get("rollout/zero_variance_groups") == 1 and not {
        "train/loss_teacher",
        "train/loss_sft",
    } & {*row}

"""The learning rate over the optimizer steps of a run, as a factor."""

from __future__ import annotations

import math

from torchrl_grpo.checks import LearningRate


def learning_rate_factor(step: int, *, kind: LearningRate, warmup: int, total: int, floor: float) -> float:
    """The factor of the learning rate after ``step`` optimizer steps.

    It rises to 1 over the first ``warmup`` steps and then, unless ``kind`` is constant, falls to ``floor`` at the end.

    Args:
        step: optimizer steps made.
        kind: how it falls.
        warmup: steps in which it rises.
        total: steps of the run.
        floor: the factor at the end, in [0, 1].

    Examples:
        >>> [learning_rate_factor(n, kind="linear", warmup=2, total=6, floor=0.5) for n in range(7)]
        [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5]
    """
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 1 - done if kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return floor + (1 - floor) * left

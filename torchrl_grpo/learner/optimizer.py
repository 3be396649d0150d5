"""The optimizer of a run, and its learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from torchrl_grpo.checks import LearningRate, Optimizer


def make_optimizer(
    parameters: Sequence[Parameter],
    name: Optimizer = "adamw",
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    critic: Sequence[Parameter] = (),
    critic_lr: float = 0.0,
) -> torch.optim.Optimizer:
    """Make AdamW (arXiv 1711.05101), without weight decay for norms and biases.

    Args:
        parameters: trained parameters.
        name: ``adamw``, or ``adamw_8bit`` for torchao's AdamW, whose two moments take one byte each
            per weight of a matrix, in blocks of 256 with a scale (arXiv 2110.02861). It is compiled
            at its first step, and rounds bfloat16 weights stochastically, so that small steps count
            on average (arXiv 2010.06192).
        lr: the learning rate.
        weight_decay: decoupled weight decay of matrices.
        betas: decay rates of the two moments.
        eps: term added to the denominator.
        critic: further parameters, in groups of their own.
        critic_lr: their learning rate.
    """
    groups: list[dict[str, Any]] = [
        {
            "params": [parameter for parameter in part if (parameter.ndim > 1) == is_matrix],
            "lr": rate,
            "weight_decay": weight_decay * is_matrix,
        }
        for part, rate in ((parameters, lr), (critic, critic_lr))
        for is_matrix in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    from torchrl_grpo.compat.torchao import AdamW8bit

    return AdamW8bit(groups, lr=lr, betas=betas, eps=eps, bf16_stochastic_round=True)


@dataclass
class EntropyControl:
    """Coefficient of the entropy bonus that follows the policy's entropy (Skywork-OR1, arXiv
    2505.22312): ``delta`` more after a step whose entropy is at most the target, else less.

    Attributes:
        coefficient: what the bonus is weighted by where it applies; at first the initial one.
        target: mean entropy of a token in nats, at or below which the bonus applies.
        delta: change with each optimizer step.
        largest: bound of the coefficient, which is at least 0.
        entropy: mean entropy in the latest step, None before the first one.
    """

    coefficient: float
    target: float
    delta: float = 0.005
    largest: float = 1.0
    entropy: float | None = None

    @property
    def applied(self) -> float:
        """Coefficient of the next step: 0 where the latest entropy is above the target."""
        is_low = self.entropy is not None and self.entropy <= self.target
        return self.coefficient if is_low else 0.0

    def update(self, entropy: float) -> None:
        """Adapt the coefficient to the entropy in a step, if it is a number."""
        if math.isfinite(entropy):
            self.entropy = entropy
            step = self.delta if entropy <= self.target else -self.delta
            self.coefficient = min(max(self.coefficient + step, 0.0), self.largest)


def has_small_states(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer stores each moment in 8 bits."""
    return type(optimizer).__name__.endswith("8bit")


def learning_rate_factor(
    step: int, *, kind: LearningRate, warmup: int, total: int, floor: float
) -> float:
    """Return the factor of the learning rate after ``step`` optimizer steps.

    It rises to 1 over the first ``warmup`` steps and then, unless ``kind`` is constant, falls to
    ``floor`` at the end.

    Args:
        step: number of optimizer steps made.
        kind: shape of the decay.
        warmup: number of steps over which it rises.
        total: number of steps in the run.
        floor: the factor at the end, in [0, 1].

    Examples:
        >>> [learning_rate_factor(n, kind="linear", warmup=2, total=6, floor=0.5) for n in range(7)]
        [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5]
    """
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    height = 1 - progress if kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return floor + (1 - floor) * height

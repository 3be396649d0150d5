"""Settings of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_grpo import checks
from torchrl_grpo.config.fields import choice, limited


@dataclass
class OptimizerConfig:
    """AdamW (arXiv 1711.05101)."""

    name: str = choice(checks.Optimizer, "adamw")
    """adamw; adamw_8bit: torchao's, with 2 bytes of state per weight instead of 8, which can also
    train weights in bfloat16 (docs/models.md)."""
    lr: float = limited(1e-6, gt=0)
    """Learning rate, above 0."""
    weight_decay: float = limited(0.0, ge=0)
    """Decoupled weight decay of matrices (not of norms and biases), not negative."""
    beta1: float = limited(0.9, ge=0, lt=1)
    """Decay of the first moment, in [0, 1)."""
    beta2: float = limited(0.999, ge=0, lt=1)
    """Decay of the second moment, in [0, 1)."""
    eps: float = limited(1e-8, gt=0)
    """Added to the denominator, above 0."""
    clip_grad_norm: float = limited(1.0, gt=0)
    """Largest gradient norm, above 0."""
    warmup_steps: int = limited(0, ge=0)
    """Optimizer steps over which the learning rate rises from 0."""
    schedule: str = choice(checks.LearningRate, "constant")
    """Shape of the learning rate after the warm-up, over the run's optimizer steps."""
    lr_floor: float = limited(0.0, ge=0, le=1)
    """Share of lr at the end of a linear or cosine schedule, in [0, 1]."""

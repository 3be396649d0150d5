"""The GRPO loss module."""

from torchrl_grpo.objectives.grpo import GRPOLoss

__all__ = ["GRPOLoss"]

"""The reward ``math`` under its documented name."""

from torchrl_grpo.integrations.graders.math import math

__all__ = ["math"]

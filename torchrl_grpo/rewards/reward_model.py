"""The reward ``reward_model`` under its documented name."""

from torchrl_grpo.integrations.graders.reward_model import reward_model

__all__ = ["reward_model"]

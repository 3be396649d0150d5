"""The reward ``code`` under its documented name."""

from torchrl_grpo.integrations.graders.code import code

__all__ = ["code"]

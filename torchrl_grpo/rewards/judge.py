"""The reward ``judge`` under its documented name."""

from torchrl_grpo.integrations.graders.judge import judge

__all__ = ["judge"]

"""The reward ``ifeval`` under its documented name."""

from torchrl_grpo.integrations.graders.ifeval import ifeval

__all__ = ["ifeval"]

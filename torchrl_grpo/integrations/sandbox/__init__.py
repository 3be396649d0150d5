"""Isolated execution of programs that a language model wrote."""

from torchrl_grpo.integrations.sandbox.runner import Limits, isolation, require_isolation

__all__ = ["Limits", "isolation", "require_isolation"]

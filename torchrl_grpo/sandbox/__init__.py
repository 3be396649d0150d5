"""Isolated execution of programs that a language model wrote."""

from torchrl_grpo.sandbox.runner import Limits, isolation, judging, require_isolation

__all__ = ["Limits", "isolation", "judging", "require_isolation"]

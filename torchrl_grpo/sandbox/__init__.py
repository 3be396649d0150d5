"""Isolated execution of programs that a language model wrote."""

from torchrl_grpo.sandbox.runner import (
    Limits,
    Outcome,
    isolation,
    judging,
    require_isolation,
    run_python,
)

__all__ = ["Limits", "Outcome", "isolation", "judging", "require_isolation", "run_python"]

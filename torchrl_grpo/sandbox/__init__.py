"""Programs that a language model wrote, run apart from everything else."""

from torchrl_grpo.sandbox.runner import Limits, Outcome, isolation, require_isolation, run_python

__all__ = ["Limits", "Outcome", "isolation", "require_isolation", "run_python"]

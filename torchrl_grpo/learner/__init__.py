"""The training step, one rank's work around it, and the state of a run on disk."""

import warnings
from typing import Any

from torchrl_grpo.errors import NonFiniteError
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.learner.writer import CheckpointWriter

__all__ = ["CheckpointWriter", "Checkpointer", "Learner", "NonFiniteError", "PolicyTrainer"]


def __getattr__(name: str) -> Any:
    if name != "GRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("GRPOTrainer is now PolicyTrainer", DeprecationWarning, stacklevel=2)
    return PolicyTrainer

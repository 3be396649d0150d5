"""The training step, one rank's work around it, and the state of a run on disk."""

from torchrl_grpo.errors import NonFiniteError
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.learner.step import GRPOTrainer
from torchrl_grpo.learner.writer import CheckpointWriter

__all__ = ["CheckpointWriter", "Checkpointer", "GRPOTrainer", "Learner", "NonFiniteError"]

"""The training step, the loop, and what a run leaves behind."""

from torchrl_grpo.trainer.loop import fit
from torchrl_grpo.trainer.step import GRPOTrainer, NonFiniteError

__all__ = ["GRPOTrainer", "NonFiniteError", "fit"]

"""The training step, the loop, and what a run leaves behind."""

from torchrl_grpo.trainer.checkpoint import Checkpointer
from torchrl_grpo.trainer.evaluation import Evaluator
from torchrl_grpo.trainer.loop import fit
from torchrl_grpo.trainer.metrics import MetricsLogger
from torchrl_grpo.trainer.step import GRPOTrainer, NonFiniteError

__all__ = ["Checkpointer", "Evaluator", "GRPOTrainer", "MetricsLogger", "NonFiniteError", "fit"]

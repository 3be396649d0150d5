"""The calls from Python; ``torchrl_grpo`` has the same names."""

from torchrl_grpo.extras.call.call import evaluate, train
from torchrl_grpo.extras.call.result import Result

__all__ = ["Result", "evaluate", "train"]

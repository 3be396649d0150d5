"""Tasks: problems, prompt formats and scorers, one file each."""

from __future__ import annotations

from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Dialog, Problem, Score, Task, WrappedTask
from torchrl_grpo.tasks.dataset import DatasetTask
from torchrl_grpo.tasks.gsm8k import GSM8KTask
from torchrl_grpo.tasks.ifeval import IFEvalTask
from torchrl_grpo.tasks.math import MathTask
from torchrl_grpo.tasks.mixed import MixedTask

__all__ = [
    "ArithmeticTask",
    "DatasetTask",
    "Dialog",
    "GSM8KTask",
    "IFEvalTask",
    "MathTask",
    "MixedTask",
    "Problem",
    "Score",
    "Task",
    "WrappedTask",
]

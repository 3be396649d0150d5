"""Tasks: problems from data or generated, the tasks that wrap others to score or continue their
dialogs, and the order in which problems are drawn.
"""

from __future__ import annotations

from typing import Any

from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Dialog, Problem, Score, Task, WrappedTask
from torchrl_grpo.tasks.dataset import DatasetTask
from torchrl_grpo.tasks.gsm8k import GSM8KTask
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


def __getattr__(name: str) -> Any:
    """Import the tasks that stand with their graders on demand."""
    if name == "IFEvalTask":
        return load_extra("ifeval_task")
    if name == "MathTask":
        return load_extra("math_task")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

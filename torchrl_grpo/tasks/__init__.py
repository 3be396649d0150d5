"""Tasks: problems, prompt formats and scorers, one file each."""

from __future__ import annotations

from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Problem, Score, Task
from torchrl_grpo.tasks.gsm8k import GSM8KTask

__all__ = ["ArithmeticTask", "GSM8KTask", "Problem", "Score", "Task", "make_task"]


def make_task(dataset: str, *, dataset_path: str | None = None, difficulty: int = 2) -> Task:
    """The task of a name.

    Args:
        dataset: ``arithmetic`` or ``gsm8k``.
        dataset_path: folder with the data of ``gsm8k``, None to load it from the hub.
        difficulty: of ``arithmetic``.

    Raises:
        ValueError: there is no such task.
    """
    if dataset == "arithmetic":
        return ArithmeticTask(difficulty)
    if dataset == "gsm8k":
        return GSM8KTask(dataset_path)
    raise ValueError(f"dataset={dataset} must be arithmetic or gsm8k: use arithmetic, which needs no download.")

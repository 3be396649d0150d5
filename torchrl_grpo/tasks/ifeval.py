"""IFEval (arXiv:2311.07911): the name is taken, the verifiers of its instructions are not written yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torchrl_grpo.tasks.base import Problem, Split, Task


class IFEvalTask(Task):
    """Says clearly, and before any model loads, that this version cannot run IFEval.

    Args:
        dataset_path: accepted as by every task, not read.
    """

    name = "ifeval"

    def __init__(self, dataset_path: str | None = None) -> None:
        self.dataset_path = dataset_path

    def problems(self, split: Split) -> NoReturn:
        """Raises: ValueError, always."""
        raise ValueError(
            "env.dataset must be a task of this version, got 'ifeval', which is not there yet: use gsm8k or arithmetic."
        )

    def score(self, problem: Problem, responses: Sequence[str]) -> NoReturn:
        """Raises: ValueError, always."""
        self.problems("test")

"""Base of tasks with generated problems: the sizes of the splits, and the split of a problem."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence

from torchrl_grpo.tasks.base import Problem, Split, Task, check_split

SPLIT_SIZES: dict[Split, int] = {"train": 4096, "test": 512}

_TEST_SHARE = 0.2


def split_by_hash(problem: str) -> Split:
    """Return the split of a problem, which depends on nothing else, so no problem is in both."""
    digest = hashlib.sha256(problem.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < _TEST_SHARE * 2**64 else "train"


class GeneratedTask(Task):
    """A task that draws its problems once, at their first use.

    Args:
        difficulty: of the problems.
        seed: decides which problems are drawn and in what order, but not their split.
    """

    def __init__(self, difficulty: int, seed: int) -> None:
        self.difficulty = difficulty
        self.seed = seed
        self._problems: dict[Split, list[Problem]] = {}

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return the split's problems, all different, in the order in which the seeded generator
        drew them.

        Raises:
            ValueError: ``split`` is neither ``"train"`` nor ``"test"``.
        """
        check_split(split)
        if split not in self._problems:
            self._problems[split] = self.draw(split)
        return self._problems[split]

    @abstractmethod
    def draw(self, split: Split) -> list[Problem]:
        """Return at most ``SPLIT_SIZES[split]`` problems of a split, always the same ones."""

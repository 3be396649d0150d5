"""A curriculum: problems of one level at a time, from the lowest up."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_grpo.tasks.base import Problem

WINDOW = 128
"""Number of responses that decide whether a level is mastered."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class Curriculum:
    """The current level of problems, separately for each data set.

    A problem's level is its column ``level``: a number, or text that contains one, such as ``"Level
    3"``. Problems without a level belong to the highest level of their data set. A data set without
    levels is not restricted.

    Args:
        problems: problems of the split.
        usable: indices of the problems that may be drawn.
        target: share of correct responses, in (0, 1], at which the next level begins.

    Raises:
        ValueError: no problem has a level.

    >>> problems = [Problem("1+1?", "2", {"level": 0}), Problem("7*8?", "56", {"level": 1})]
    >>> curriculum = Curriculum(problems, range(2), target=0.75)
    >>> curriculum.usable
    [0]
    >>> curriculum.record([(0, True)] * WINDOW)
    True
    >>> curriculum.usable
    [1]
    """

    def __init__(self, problems: Sequence[Problem], usable: Sequence[int], target: float) -> None:
        self._target = target
        self._levels_by_index: dict[int, tuple[str, float | None]] = {}
        for index in usable:
            problem = problems[index]
            self._levels_by_index[index] = (problem.dataset, _level(problem.extra.get("level")))
        levels: dict[str, set[float]] = defaultdict(set)
        for dataset, level in self._levels_by_index.values():
            if level is not None:
                levels[dataset].add(level)
        if not levels:
            raise ValueError(
                f"a curriculum (env.curriculum={target}) needs problems with a column level, but "
                "these have none: add it, use env.dataset_options={levels: [0,1,2]} with a "
                "reasoning_gym data set, or leave env.curriculum out."
            )
        self._levels = {dataset: sorted(values) for dataset, values in levels.items()}
        self._positions = dict.fromkeys(self._levels, 0)
        self._recent = {dataset: deque[bool](maxlen=WINDOW) for dataset in self._levels}

    @property
    def usable(self) -> list[int]:
        """Return the indices of the problems of the current levels."""
        return [index for index in self._levels_by_index if self._is_current(index)]

    @property
    def level(self) -> float:
        """Return the mean of the current levels of all data sets with levels."""
        levels = [self._levels[dataset][at] for dataset, at in self._positions.items()]
        return sum(levels) / len(levels)

    def record(self, outcomes: Sequence[tuple[int, bool]]) -> bool:
        """Count responses to problems of the current level; return whether a new level has begun.

        Args:
            outcomes: for each response with a valid reward, the problem's index and whether the
                response is correct.
        """
        for index, correct in outcomes:
            if self._levels_by_index[index][0] in self._recent and self._is_current(index):
                self._recent[self._levels_by_index[index][0]].append(correct)
        mastered = [
            dataset
            for dataset, recent in self._recent.items()
            if len(recent) == WINDOW
            and sum(recent) >= self._target * WINDOW
            and self._positions[dataset] + 1 < len(self._levels[dataset])
        ]
        for dataset in mastered:
            self._positions[dataset] += 1
            self._recent[dataset].clear()
        return bool(mastered)

    def _is_current(self, index: int) -> bool:
        dataset, level = self._levels_by_index[index]
        if dataset not in self._levels:
            return True
        levels = self._levels[dataset]
        return (levels[-1] if level is None else level) == levels[self._positions[dataset]]

    def state_dict(self) -> dict[str, Any]:
        """Return the level and the latest responses of each data set."""
        return {
            "at": dict(self._positions),
            "recent": {dataset: list(map(int, recent)) for dataset, recent in self._recent.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._positions = dict(state["at"])
        self._recent = {
            dataset: deque(map(bool, recent), maxlen=WINDOW)
            for dataset, recent in state["recent"].items()
        }


def _level(value: Any) -> float | None:
    """Return a level as a number; None without one."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _NUMBER.search(value) if isinstance(value, str) else None
    return float(match[0]) if match else None

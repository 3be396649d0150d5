"""Several tasks in one, whose problems are drawn by weight."""

from __future__ import annotations

import dataclasses
import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, repeat, zip_longest
from typing import Any

from torchrl_grpo.tasks.base import (
    DelegatingTask,
    Dialog,
    Problem,
    ProblemSequence,
    Split,
    Task,
    Turn,
)


class MixedProblems(ProblemSequence):
    """The problems of several data sets, concatenated.

    Args:
        parts: problems of each data set.
        names: values for ``Problem.dataset``; an empty name leaves it unchanged.
        weights: weight of each data set in an epoch; None draws every problem once, from the data
            sets in turn.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Problem]],
        names: Sequence[str],
        weights: Sequence[float] | None,
    ) -> None:
        self.parts = list(parts)
        self.weights = weights
        self._names = list(names)
        self._ends = list(accumulate(map(len, parts)))

    def part(self, index: int) -> int:
        """Return the data set of a problem."""
        return bisect_right(self._ends, index)

    def split(self, indices: Sequence[int]) -> list[list[int]]:
        """Return indices by their data set."""
        parts: list[list[int]] = [[] for _ in self.parts]
        for index in indices:
            parts[self.part(index)].append(index)
        return parts

    def __len__(self) -> int:
        return self._ends[-1]

    def make(self, index: int) -> Problem:
        part = self.part(index)
        problem = self.parts[part][index - (self._ends[part - 1] if part else 0)]
        return dataclasses.replace(problem, dataset=self._names[part] or problem.dataset)


class MixedTask(DelegatingTask):
    """Several tasks; each problem's own task makes its prompt, replies and scores.

    Each task's share of an epoch of train problems is its weight. A task with fewer problems than
    its share repeats some; one with more uses others in the next epoch. Test problems come once
    each, from the tasks in turn.

    Args:
        tasks: at least one.
        weights: weight of each task, above 0; they need not sum to 1.
        names: name of each task, all different; logs have a row for each.

    Raises:
        ValueError: a weight is not above 0, or two names are equal.

    >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
    >>> task = MixedTask([ArithmeticTask(1), ArithmeticTask(2)], [0.25, 0.75], ["easy", "hard"])
    >>> problems = task.problems("train")
    >>> drawn = [problems[i].dataset for i in task.epoch(problems, range(len(problems)), random.Random(0))]
    >>> round(drawn.count("easy") / len(drawn), 3)
    0.25
    """

    def __init__(
        self, tasks: Sequence[Task], weights: Sequence[float], names: Sequence[str]
    ) -> None:
        if min(weights) <= 0:
            raise ValueError(f"weights={list(weights)} must be above 0: for example, 1 for each.")
        if len(set(names)) < len(names):
            raise ValueError(f"names={list(names)} must be different: rename a data set.")
        self.tasks = dict(zip(names, tasks, strict=True))
        self.weights = list(weights)
        self.name = "+".join(names)
        self.has_parts = any(task.has_parts for task in tasks)
        self.part_weights: Any = {name: task.part_weights for name, task in self.tasks.items()}
        self.at_a_time = max(task.at_a_time for task in tasks)
        self.is_stateful = any(task.is_stateful for task in tasks)
        self.group_rewards = max(task.group_rewards for task in tasks)  # "" < "also" < "only"

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return the problems of all tasks; ``Problem.dataset`` names the task."""
        parts = [task.problems(split) for task in self.tasks.values()]
        return MixedProblems(parts, list(self.tasks), self.weights if split == "train" else None)

    def task_of(self, problem: Problem) -> Task:
        return self.tasks[problem.dataset]

    def compares(self, problem: Problem) -> bool:
        return self.task_of(problem).compares(problem)

    def advance(
        self, dialogs: Sequence[Dialog], timeout_s: float | None = None
    ) -> list[Turn | Exception]:
        turns: dict[int, Turn | Exception] = {}
        for task in self.tasks.values():
            indices = [
                i for i, dialog in enumerate(dialogs) if self.task_of(dialog.problem) is task
            ]
            turns |= zip(
                indices, task.advance([dialogs[i] for i in indices], timeout_s), strict=True
            )
        return [turns[i] for i in range(len(dialogs))]

    def load_models(self) -> None:
        for task in self.tasks.values():
            task.load_models()

    def close(self, episode: str) -> None:
        for task in self.tasks.values():
            task.close(episode)

    @property
    def multi_turn(self) -> bool:
        return any(task.multi_turn for task in self.tasks.values())

    def epoch(
        self, problems: Sequence[Problem], usable: Sequence[int], rng: random.Random
    ) -> list[int]:
        """Return as many draws as there are usable problems, divided by weight among the tasks that
        have some.
        """
        if not isinstance(problems, MixedProblems):
            return super().epoch(problems, usable, rng)
        parts = {part: indices for part, indices in enumerate(problems.split(usable)) if indices}
        if problems.weights is None:
            turns = zip_longest(*(rng.sample(part, len(part)) for part in parts.values()))
            return [index for turn in turns for index in turn if index is not None]
        quotas = _quotas(len(usable), {part: self.weights[part] for part in parts})
        order = list(
            chain.from_iterable(_sample(parts[part], quota, rng) for part, quota in quotas.items())
        )
        rng.shuffle(order)
        return order


def _quotas(total: int, weights: dict[int, float]) -> dict[int, int]:
    """Divide ``total`` by weight; the remainder goes to the largest fractions."""
    exact = {part: total * weight / sum(weights.values()) for part, weight in weights.items()}
    quotas = {part: int(share) for part, share in exact.items()}
    for part in sorted(exact, key=lambda part: quotas[part] - exact[part])[
        : total - sum(quotas.values())
    ]:
        quotas[part] += 1
    return quotas


def _sample(indices: Sequence[int], count: int, rng: random.Random) -> list[int]:
    """Return ``count`` of the indices, each equally often or once more."""
    rounds, rest = divmod(count, len(indices))
    return [*chain.from_iterable(repeat(indices, rounds)), *rng.sample(indices, rest)]

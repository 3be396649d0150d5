"""``WithTests``: a task with further test sets in its test split."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest

from torchrl_grpo.tasks.base import Problem, Split, Task
from torchrl_grpo.tasks.mixed import MixedProblems, MixedTask
from torchrl_grpo.tasks.sources import UnknownSplitError

_log = logging.getLogger(__name__)


class SetsOfProblems(MixedProblems):
    """A task's own test problems, followed by the test sets' problems."""


class WithTests(MixedTask):
    """A task whose test split also has the problems of test sets, which are handled by their own
    tasks.

    The task's own test problems keep their order; the problems of all sets alternate.

    Args:
        task: the task. If it has no test split, only the test sets are tested.
        tests: test sets by name, which becomes ``Problem.dataset`` of their problems.

    >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
    >>> task = WithTests(ArithmeticTask(1), {"hard": ArithmeticTask(3)})
    >>> problems = task.problems("test")
    >>> [problems[i].dataset for i in task.epoch(problems, range(len(problems)), random.Random(0))[:4]]
    ['', 'hard', '', 'hard']
    """

    def __init__(self, task: Task, tests: Mapping[str, Task]) -> None:
        super().__init__([task, *tests.values()], [1.0] * (len(tests) + 1), ["", *tests])
        self.task = task
        self.name = task.name
        self.part_weights = task.part_weights

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return the problems of a split; ``"test"`` includes the problems of each test set."""
        if split == "train":
            return self.task.problems(split)
        try:
            problems = self.task.problems(split)
        except UnknownSplitError as error:
            _log.info(f"Only the test sets of evaluation.datasets are used: {error}.")
            problems = ()
        sets = [task.problems(split) for name, task in self.tasks.items() if name]
        return SetsOfProblems([problems, *sets], list(self.tasks), None)

    def task_of(self, problem: Problem) -> Task:
        return self.tasks.get(problem.dataset, self.task)

    def epoch(
        self, problems: Sequence[Problem], usable: Sequence[int], rng: random.Random
    ) -> list[int]:
        if not isinstance(problems, SetsOfProblems):
            return self.task.epoch(problems, usable, rng)
        indices_of_task, *sets = problems.split(usable)
        orders = [
            self.task.epoch(problems.parts[0], indices_of_task, rng),
            *(rng.sample(indices, len(indices)) for indices in sets),
        ]
        return [index for index in chain.from_iterable(zip_longest(*orders)) if index is not None]

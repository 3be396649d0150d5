"""The countdown game, generated: reach a target with ``+ - * /``, using each of some numbers
exactly once.

Every problem is made from a solution whose intermediate results are positive integers. As in the
arithmetic task, a hash of the problem (its numbers in any order, and its target) decides its split,
and no data is needed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torchrl_grpo.rewards.countdown import countdown
from torchrl_grpo.tasks.base import Problem, Score, Split
from torchrl_grpo.tasks.generated import SPLIT_SIZES, GeneratedTask, split_by_hash

MAX_NUMBERS = 6
INSTRUCTION = (
    "Using each of the numbers {nums} exactly once, with + - * / and brackets, write an "
    "expression that equals {target}. Finish with a line that holds only the expression: #### "
    "expression"
)

_DRAWS_PER_PROBLEM = 50


def split_of(nums: Sequence[int], target: int) -> Split:
    """Return the split of a problem; the order of its numbers does not matter."""
    return split_by_hash(f"{sorted(nums)} {target}")


class CountdownTask(GeneratedTask):
    """Countdown problems, drawn by a seeded generator; a problem's ``answer`` is one of possibly
    many solutions.

    ``problems`` returns up to 4096 train and 512 test problems. The reward is computed by
    ``torchrl_grpo.rewards.countdown``.

    Args:
        difficulty: how many numbers a problem has, 2 to 6.
        largest: the numbers are drawn from 1 to this.
        largest_target: targets are integers from 1 to this.
        seed: decides which problems are drawn and in what order, but not their split.

    Raises:
        ValueError: an argument is out of range.

    >>> task = CountdownTask()
    >>> problem = Problem("", "(3+5)*2", {"nums": [2, 3, 5], "target": 16})
    >>> task.score(problem, ["#### 2 * (5 + 3)"])
    Score(reward=1.0, correct=True)
    """

    name = "countdown"

    def __init__(
        self, difficulty: int = 3, largest: int = 20, largest_target: int = 100, seed: int = 0
    ) -> None:
        if not 2 <= difficulty <= MAX_NUMBERS:
            raise ValueError(
                f"difficulty must be from 2 to {MAX_NUMBERS} numbers, got {difficulty}: use 3."
            )
        if largest < 2 or largest_target < 2:
            raise ValueError(
                f"largest and largest_target must be at least 2, got {largest} and "
                f"{largest_target}: use 20 and 100."
            )
        super().__init__(difficulty, seed)
        self.largest = largest
        self.largest_target = largest_target

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        """Return 1.0 if the last response's expression is right, else 0.0."""
        reward = countdown(responses[-1], **problem.extra)
        return Score(reward=reward, correct=reward == 1.0)

    def draw(self, split: Split) -> list[Problem]:
        # A string seeds Random through SHA-512, so the stream is the same in every process.
        rng = random.Random(
            f"countdown {self.difficulty} {self.largest} {self.largest_target} {self.seed} {split}"
        )
        drawn: dict[tuple[int, ...], Problem] = {}
        for _ in range(_DRAWS_PER_PROBLEM * SPLIT_SIZES[split]):
            nums = [rng.randint(1, self.largest) for _ in range(self.difficulty)]
            target, solution = _combine(rng, nums)
            if target <= self.largest_target and split_of(nums, target) == split:
                query = INSTRUCTION.format(nums=nums, target=target)
                drawn.setdefault(
                    (*sorted(nums), target),
                    Problem(query, solution, {"nums": nums, "target": target}),
                )
            if len(drawn) == SPLIT_SIZES[split]:
                break
        return list(drawn.values())


def _combine(rng: random.Random, nums: Sequence[int]) -> tuple[int, str]:
    """Combine numbers by random operations, two at a time, into positive integers; return the
    result and its expression.
    """
    parts = [(number, str(number)) for number in nums]
    while len(parts) > 1:
        (a, left), (b, right) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        values = {"+": a + b, "*": a * b}
        if a > b:
            values["-"] = a - b
        if a % b == 0:
            values["/"] = a // b
        operation = rng.choice(list(values))
        parts.append((values[operation], f"({left}{operation}{right})"))
    return parts[0][0], parts[0][1][1:-1]

"""The built-in arithmetic task: sums and differences of integers. It needs no data and no download.

A seeded generator draws the problems, and only a hash of the problem decides its split, so no
problem is ever in both splits, whatever the seed and the difficulty. ``27+58`` and ``58+27`` count
as one problem.

========== ================================================
difficulty operands and operations
========== ================================================
1          sums of one-digit numbers
2          sums of two-digit numbers
3          sums and differences of two-digit numbers
n > 3      sums and differences of (n - 1)-digit numbers
========== ================================================

A response is correct if it ends with ``#### n`` (GSM8K's answer format) and n is the answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import ClassVar

from torchrl_grpo.tasks.base import Message, Problem, Score, Split
from torchrl_grpo.tasks.generated import SPLIT_SIZES, GeneratedTask, split_by_hash

INSTRUCTION = " #### n"

_DRAWS_PER_PROBLEM = 20
_FINAL_ANSWER = re.compile(r"####[ \t]*(-?[0-9]+)\s*\Z")


def split_of(a: int, op: str, b: int) -> Split:
    """Return the split of ``a op b``; the order of a sum's operands does not matter.

    Args:
        a: first operand.
        op: ``"+"`` or ``"-"``.
        b: second operand.
    """
    if op == "+":
        a, b = sorted((a, b))
    return split_by_hash(f"{a}{op}{b}")


def final_answer(response: str) -> str | None:
    """Return the integer after ``####`` at the very end of a response, without leading zeros; None
    if there is none.

    The result stays text, so that thousands of digits cost nothing and never reach ``int``.

    >>> final_answer("7+8=15, 2+5+1=8 #### 85")
    '85'
    >>> final_answer("#### 85 or so") is None
    True
    """
    match = _FINAL_ANSWER.search(response)
    if match is None:
        return None
    digits = match[1].lstrip("-").lstrip("0") or "0"
    return f"-{digits}" if match[1].startswith("-") and digits != "0" else digits


class FinalAnswerTask(GeneratedTask):
    """Generated problems whose answer is an integer at the end of a response.

    Attributes:
        max_difficulty: largest difficulty, from 1.
        hint: what the problems of difficulty 2 are, for the error about another one.

    Args:
        difficulty: of the problems.
        seed: decides which problems are drawn and in what order, but not their split.

    Raises:
        ValueError: ``difficulty`` is out of range.
    """

    max_difficulty: ClassVar[int]
    hint: ClassVar[str]

    def __init__(self, difficulty: int = 2, seed: int = 0) -> None:
        if not 1 <= difficulty <= self.max_difficulty:
            raise ValueError(
                f"difficulty must be from 1 to {self.max_difficulty}, got {difficulty}: use 2 for "
                f"{self.hint}."
            )
        super().__init__(difficulty, seed)

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        """Return 1.0 if the last response ends with ``####`` and the answer, else 0.0."""
        correct = final_answer(responses[-1]) == problem.answer
        return Score(reward=float(correct), correct=correct)


class ArithmeticTask(FinalAnswerTask):
    """Sums and differences, drawn by a seeded generator.

    ``problems`` returns up to 4096 train and 512 test problems (all that exist, if a difficulty has
    fewer). The reward is 1.0 for a correct answer in the right format and 0.0 for everything else.

    Args:
        difficulty: 1 to 10; see the table at the top of the module.
        seed: decides which problems are drawn and in what order, but not their split.

    Raises:
        ValueError: ``difficulty`` is out of range.

    >>> task = ArithmeticTask(difficulty=1)
    >>> task.score(Problem("3+4=?", "7"), ["3+4=7 #### 7"])
    Score(reward=1.0, correct=True)
    """

    name = "arithmetic"
    hint = "sums of two-digit numbers"
    max_difficulty = 10

    def messages(self, problem: Problem) -> list[Message]:
        """Return one user message: the query and the answer format."""
        return [{"role": "user", "content": problem.query + INSTRUCTION}]

    def draw(self, split: Split) -> list[Problem]:
        digits = max(self.difficulty - 1, 1) if self.difficulty != 2 else 2
        low, high = (0, 9) if digits == 1 else (10 ** (digits - 1), 10**digits - 1)
        operations = "+-" if self.difficulty >= 3 else "+"
        # A string seeds Random through SHA-512, so the stream is the same in every process.
        rng = random.Random(f"arithmetic {self.difficulty} {self.seed} {split}")
        size = SPLIT_SIZES[split]
        drawn: dict[str, Problem] = {}
        for _ in range(_DRAWS_PER_PROBLEM * size):
            a = rng.randint(low, high)
            b = rng.randint(low, high)
            op = rng.choice(operations)
            if op == "-":
                a, b = max(a, b), min(a, b)
            if split_of(a, op, b) == split:
                query = f"{a}{op}{b}=?"
                drawn.setdefault(query, Problem(query, str(a + b if op == "+" else a - b)))
            if len(drawn) == size:
                break
        return list(drawn.values())

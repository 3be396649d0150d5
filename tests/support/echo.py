"""Tasks that want their own query back, and tools that misbehave. Free of torch, because reward
workers import it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from torchrl_grpo.tasks.base import Problem, Score, Task


class EchoTask(Task):
    """A task of one turn, in which the response must be the query. Queries have 1 to 3 letters."""

    name = "echo"

    def __init__(self, size: int = 10) -> None:
        self.size = size

    def problems(self, split: str) -> list[Problem]:
        return [
            Problem(chr(97 + i) * (1 + i % 3), chr(97 + i) * (1 + i % 3)) for i in range(self.size)
        ]

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        right = responses[-1] == problem.answer
        return Score(1.0 if right else 0.25, right)


class TwoTurnTask(EchoTask):
    """Asks ``again?`` unless the first response is ``stop``; the reward is the number of turns."""

    name = "two turns"

    def next_turn(self, problem: Problem, responses: Sequence[str]) -> str | None:
        return "again?" if len(responses) == 1 and responses[0] != "stop" else None

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        return Score(float(len(responses)), len(responses) == 2)


def add(a: int, b: int) -> int:
    """Adds two numbers. Args: a: the first. b: the second."""
    return a + b


def hang(a: int) -> int:
    """Takes long. Args: a: unused."""
    time.sleep(1000)
    return a


def leave(a: int) -> int:
    """Ends its process. Args: a: unused."""
    os._exit(3)

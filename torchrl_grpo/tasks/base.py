"""What a task is: problems, how a problem becomes a chat, and how a response is scored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "test"]
Message = dict[str, str]


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        query: what is asked, as text.
        answer: the true answer, as the task's own scorer wants it.
        extra: whatever else the scorer needs.
    """

    query: str
    answer: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """What a response earned: ``reward`` trains the policy, ``correct`` counts for accuracy and pass@k."""

    reward: float
    correct: bool


class Task(ABC):
    """Problems with a prompt format and a scorer. Cheap to build: data is read when ``problems`` is first called."""

    name: str

    @abstractmethod
    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, always in the same order. The two splits share no problem."""

    def messages(self, problem: Problem) -> list[Message]:
        """The chat that is put to the policy: a list of ``{"role": ..., "content": ...}``."""
        return [{"role": "user", "content": problem.query}]

    @abstractmethod
    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        """Scores a finished dialog.

        Args:
            problem: the problem.
            responses: the policy's turns as text, special tokens removed; one for a single-turn task.

        Raises:
            Exception: anything; the sequence is then marked invalid, never scored 0.
        """

    def next_turn(self, problem: Problem, responses: Sequence[str]) -> str | None:
        """A further user message after the policy's latest turn, or None when the dialog is over."""
        return None

"""What a task is: problems, how a problem becomes a chat, what answers the policy, and how a dialog is scored."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "test"]
Message = dict[str, Any]
"""``{"role": ..., "content": ...}``, as chat templates take it."""


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        query: what is asked, as text.
        answer: the true answer, as the scorer wants it; None where there is none.
        extra: whatever else the scorer needs; of a data set, all columns by their name.
        dataset: which of several data sets it belongs to; empty where there is one.
    """

    query: str
    answer: Any
    extra: dict[str, Any] = field(default_factory=dict)
    dataset: str = ""


@dataclass(frozen=True)
class Dialog:
    """A dialog up to the policy's latest turn.

    Attributes:
        problem: what it is about.
        responses: the policy's turns as text, special tokens removed; one for a single-turn task.
        messages: the whole chat: that of the problem, the policy's turns and what came between them.
        tokens: ids of the latest turn, its stop token included.
        finish_reason: ``"length"`` where a token limit cut the latest turn off, else ``"stop"``.
        raw: the latest turn with its special tokens; empty where the task has no tools.
    """

    problem: Problem
    responses: Sequence[str]
    messages: Sequence[Message] = ()
    tokens: Sequence[int] = ()
    finish_reason: Literal["stop", "length"] = "stop"
    raw: str = ""


@dataclass(frozen=True)
class Score:
    """What a dialog earned.

    Attributes:
        reward: trains the policy.
        correct: counts for accuracy and pass@k.
        parts: what the reward is made of, by name; None for a part that does not apply.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float | None] = field(default_factory=dict, repr=False)


class Task(ABC):
    """Problems with a prompt format and a scorer. Cheap to build: data is read when ``problems`` is first called.

    A task defines ``name``, ``problems`` and ``score``, and what else it needs.

    Attributes:
        tools: JSON schemas of functions that the policy may call; they enter the chat template.
        multi_turn: whether the task may answer a response.
    """

    name: str
    tools: Sequence[dict[str, Any]] = ()

    @abstractmethod
    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, always in the same order. The two splits share no problem."""

    def messages(self, problem: Problem) -> list[Message]:
        """The chat that is put to the policy: a list of ``{"role": ..., "content": ...}``."""
        return [{"role": "user", "content": problem.query}]

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        """Scores a finished dialog.

        Args:
            problem: the problem.
            responses: the policy's turns as text, special tokens removed; one for a single-turn task.

        Raises:
            Exception: anything; the sequence is then marked invalid, never scored 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scorer: define score, or use WithRewards.")

    def next_turn(self, problem: Problem, responses: Sequence[str]) -> str | None:
        """A further user message after the policy's latest turn, or None when the dialog is over."""
        return None

    def judge(self, dialog: Dialog) -> Score:
        """Scores a finished dialog; what ``score`` says, unless it is overridden to see more of the dialog."""
        return self.score(dialog.problem, dialog.responses)

    def reply(self, dialog: Dialog) -> list[Message] | None:
        """The messages after the policy's latest turn, None when the dialog is over; by default ``next_turn``'s."""
        message = self.next_turn(dialog.problem, dialog.responses)
        return None if message is None else [{"role": "user", "content": message}]

    @property
    def multi_turn(self) -> bool:
        return type(self).next_turn is not Task.next_turn or type(self).reply is not Task.reply

    def epoch(self, problems: Sequence[Problem], usable: Sequence[int], rng: random.Random) -> list[int]:
        """The order in which an epoch draws problems.

        Args:
            problems: of the split.
            usable: indices of those that may be drawn.
            rng: decides the order.

        Returns:
            ``len(usable)`` indices; by default each once.
        """
        order = list(usable)
        rng.shuffle(order)
        return order


class WrappedTask(Task):
    """A task that is another one in all that its subclass does not define.

    Args:
        task: the other one.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.name, self.tools = task.name, task.tools

    def problems(self, split: Split) -> Sequence[Problem]:
        return self.task.problems(split)

    def messages(self, problem: Problem) -> list[Message]:
        return self.task.messages(problem)

    def judge(self, dialog: Dialog) -> Score:
        return self.task.judge(dialog)

    def reply(self, dialog: Dialog) -> list[Message] | None:
        return self.task.reply(dialog)

    @property
    def multi_turn(self) -> bool:
        return self.task.multi_turn

    def epoch(self, problems: Sequence[Problem], usable: Sequence[int], rng: random.Random) -> list[int]:
        return self.task.epoch(problems, usable, rng)

"""Interface of a task: problems, how a problem becomes a chat, what answers the policy, and how a dialog is scored."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

T = TypeVar("T")
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
        last: whether the policy has no turn left.
    """

    problem: Problem
    responses: Sequence[str]
    messages: Sequence[Message] = ()
    tokens: Sequence[int] = ()
    finish_reason: Literal["stop", "length"] = "stop"
    raw: str = ""
    last: bool = True


@dataclass(frozen=True)
class Score:
    """Reward of a dialog.

    Attributes:
        reward: trains the policy.
        correct: counts for accuracy and pass@k.
        parts: what the reward is made of, by name; None for a part that does not apply.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float | None] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Turn:
    """Outcome of the policy's latest turn.

    Attributes:
        messages: its answer; None where the dialog is over.
        score: of the dialog; there when it is over, or the policy has no turn left.
        counts: what happened, as metrics that add up.
    """

    messages: Sequence[Message] | None
    score: Score | None
    counts: Mapping[str, float] = field(default_factory=dict)


def attempt(function: Callable[[Dialog], T], dialog: Dialog) -> T | Exception:
    """Call a function; return its result or its exception."""
    try:
        return function(dialog)
    except Exception as error:
        return error
    except SystemExit as error:  # of a scorer that would end the run
        return RuntimeError(f"sys.exit({error.code}) was called.").with_traceback(error.__traceback__)


class Task(ABC):
    """Problems with a prompt format and a scorer. Cheap to build: data is read when ``problems`` is first called.

    A task defines ``name``, ``problems`` and ``score``, and what else it needs.

    Attributes:
        tools: JSON schemas of functions that the policy may call; they enter the chat template.
        has_parts: whether scores have parts.
        at_a_time: dialogs that ``judge_all`` takes at a time without one waiting for another.
        multi_turn: whether the task may answer a response.
    """

    name: str
    tools: Sequence[dict[str, Any]] = ()
    has_parts: bool = False
    at_a_time: int = 1

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

    def judge_all(self, dialogs: Sequence[Dialog], timeout_s: float | None = None) -> list[Score | Exception]:
        """Return the outcome of ``judge`` for each, or the exception it raised.

        Args:
            dialogs: finished.
            timeout_s: longest time for one of several that are judged at a time.
        """
        return [attempt(self.judge, dialog) for dialog in dialogs]

    def reply(self, dialog: Dialog) -> list[Message] | None:
        """The messages after the policy's latest turn, None when the dialog is over; by default ``next_turn``'s."""
        message = self.next_turn(dialog.problem, dialog.responses)
        return None if message is None else [{"role": "user", "content": message}]

    def advance(self, dialogs: Sequence[Dialog], timeout_s: float | None = None) -> list[Turn | Exception]:
        """Answers or ends dialogs after the policy's latest turn: ``reply``, and ``judge_all`` for those that end.

        Args:
            dialogs: one that was cut off by a token limit gets no answer.
            timeout_s: as in ``judge_all``.
        """
        turns: list[Turn | Exception] = []
        for dialog in dialogs:
            said = attempt(self.reply, dialog) if dialog.finish_reason == "stop" else None
            turns.append(said if isinstance(said, Exception) else Turn(said, None))
        return self.with_scores(dialogs, turns, timeout_s)

    def with_scores(
        self, dialogs: Sequence[Dialog], turns: Sequence[Turn | Exception], timeout_s: float | None
    ) -> list[Turn | Exception]:
        """The turns, with a score where the dialog is over or the policy has no turn left."""
        done = [
            i
            for i, (dialog, turn) in enumerate(zip(dialogs, turns, strict=True))
            if isinstance(turn, Turn) and (turn.messages is None or dialog.last)
        ]
        out = list(turns)
        for i, score in zip(done, self.judge_all([dialogs[i] for i in done], timeout_s), strict=True):
            turn = turns[i]
            assert isinstance(turn, Turn)
            out[i] = replace(turn, score=score) if isinstance(score, Score) else score
        return out

    def excuse(self, dialog: Dialog, why: str) -> list[Message] | None:
        """Answer the policy whose latest turn took too long or ended the process; None ends the dialog."""
        return None

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
    """A task that is another one in all that its subclass does not define, but for ``advance``, which puts together the
    answers and the scores of the two.

    Args:
        task: the other one.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.name, self.tools, self.has_parts, self.at_a_time = task.name, task.tools, task.has_parts, task.at_a_time

    def problems(self, split: Split) -> Sequence[Problem]:
        return self.task.problems(split)

    def messages(self, problem: Problem) -> list[Message]:
        return self.task.messages(problem)

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        return self.task.score(problem, responses)

    def judge(self, dialog: Dialog) -> Score:
        return self.task.judge(dialog)

    def judge_all(self, dialogs: Sequence[Dialog], timeout_s: float | None = None) -> list[Score | Exception]:
        return self.task.judge_all(dialogs, timeout_s)

    def reply(self, dialog: Dialog) -> list[Message] | None:
        return self.task.reply(dialog)

    def excuse(self, dialog: Dialog, why: str) -> list[Message] | None:
        return self.task.excuse(dialog, why)

    @property
    def multi_turn(self) -> bool:
        return self.task.multi_turn

    def epoch(self, problems: Sequence[Problem], usable: Sequence[int], rng: random.Random) -> list[int]:
        return self.task.epoch(problems, usable, rng)

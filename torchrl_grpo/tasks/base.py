"""Interface of a task: problems, prompts, replies to the policy, and scores."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeVar, overload

from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.interrupts import delivered
from torchrl_grpo.host.progress import scoring
from torchrl_grpo.images import ImageFile, place_images
from torchrl_grpo.rewards.spec import PartWeights
from torchrl_grpo.tools.toolbox import CallFormat, Parser, ToolCall

A = TypeVar("A")
T = TypeVar("T")
Split = Literal["train", "test"]
Message = dict[str, Any]
"""``{"role": ..., "content": ...}``, as in chat templates."""


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        query: the question, as text.
        answer: the correct answer, in the scorer's format; None without one.
        extra: other data that the scorer needs; for a data set, all columns by name.
        dataset: name of its data set among several; empty if there is only one.
        images: its images, for a vision-language model.
    """

    query: str
    answer: Any
    extra: dict[str, Any] = field(default_factory=dict)
    dataset: str = ""
    images: tuple[ImageFile, ...] = ()


class ProblemSequence(Sequence[Problem]):
    """Problems that are made on access. A subclass defines ``make`` and ``__len__``."""

    @abstractmethod
    def make(self, index: int) -> Problem:
        """Return the problem at an index from 0 to ``len(self) - 1``."""

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        position = range(len(self))[index]
        if isinstance(position, range):
            return [self.make(i) for i in position]
        return self.make(position)


@dataclass(frozen=True)
class TurnLimits:
    """Limits of one turn of the policy, in addition to the run's limits.

    Attributes:
        max_tokens: maximum number of tokens; further sampled tokens are cut off. None keeps the
            run's own limit.
        stop: strings that end the turn.
        log_probs: whether to fill in ``Dialog.log_probs``.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    log_probs: bool = False


@dataclass(frozen=True)
class Dialog:
    """A dialog up to the policy's latest turn or, at the opening of a stateful task, before its
    first turn.

    Attributes:
        problem: the problem.
        responses: the policy's turns as text without special tokens; one for a single-turn task,
            none at the opening.
        messages: the whole chat: the problem's messages, the policy's turns and the messages
            between them.
        tokens: ids of the latest turn, including its stop token.
        finish_reason: ``"length"`` if a token limit cut off the latest turn, else ``"stop"``.
        raw: the latest turn with its special tokens; empty if the task has no tools.
        last: whether the policy has no turn left.
        episode: unique key of the dialog of a stateful task; else empty.
        prompt_tokens: tokens before the latest turn.
        log_probs: text and log-prob of each token of the latest turn, if the task requested them.
        environment: object that plays the dialog, if there is one; it does not leave its process.
        takes_tools: at the opening, whether the chat template writes tools.
        image_roles: at the opening, the roles whose messages may show the model images.
        prefill: the beginning of the policy's turn that is part of the prompt, such as ``<think>``
            or an empty thought.
        call_format: how the chat template writes tool calls.
        group: finished dialogs of the same problem to compare, instead of scoring this dialog. The
            score's parts are then named ``index/part``, for each dialog's index, with the weighted
            sum as ``index`` (None if no part applies).
    """

    problem: Problem
    responses: Sequence[str]
    messages: Sequence[Message] = ()
    tokens: Sequence[int] = ()
    finish_reason: Literal["stop", "length"] = "stop"
    raw: str = ""
    last: bool = True
    episode: str = ""
    prompt_tokens: int = 0
    log_probs: Sequence[tuple[str, float]] = ()
    environment: Any = None
    takes_tools: bool = True
    image_roles: Sequence[str] = ()
    prefill: str = ""
    call_format: CallFormat = ""
    group: Sequence[Dialog] = ()

    def calls(
        self, tools: Sequence[dict[str, Any]] = (), parser: Parser | None = None
    ) -> list[ToolCall]:
        """Return the tool calls of the latest turn.

        Args:
            tools: their JSON schemas.
            parser: function that finds the calls in ``speech``; None parses the chat template's format.
        """
        if parser is not None:
            return list(parser(self.speech))
        return list(self._parse(tools).calls)

    @property
    def speech(self) -> str:
        """The latest turn with its special tokens and blanks in place of its thoughts, to search
        for tool calls.
        """
        return str(self._parse().speech)

    def _parse(self, *tools: Any) -> Any:
        return load_extra("parse_turn")(self.raw, self.prefill, self.call_format, *tools)


@dataclass(frozen=True)
class Score:
    """Reward of a dialog.

    Attributes:
        reward: the number that trains the policy.
        correct: whether the dialog counts as correct for accuracy and pass@k.
        parts: the parts of the reward by name; None for a part that does not apply.
        feedback: what the scorer says about the dialog, for a teacher's prompt; of a group, a JSON
            list with a text for each dialog.
        turns: reward of each of the policy's turns, if the scorer credits turns at the end; None
            excludes a turn from training. Replaces ``Turn.reward``.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float | None] = field(default_factory=dict, repr=False)
    feedback: str = field(default="", repr=False)
    turns: Sequence[float | None] = field(default=(), repr=False)


@dataclass(frozen=True)
class Turn:
    """Outcome of the policy's latest turn.

    Attributes:
        messages: the reply; None if the dialog is over. At the opening, the whole chat of the first
            prompt.
        score: score of the dialog; set if it is over, or the policy has no turn left.
        counts: metrics of the turn, which are summed.
        reward: reward of only this turn, if the task rewards turns; it is part of the dialog's
            reward.
        tools: if the messages are a whole chat, the JSON schemas for the chat template; None uses
            the task's.
        sample: index of the trajectory's sample that the messages continue. A new index begins a
            new sample, and the messages are then a whole chat. A dialog with one chat is sample 0.
        limits: limits of the policy's next turn.
        undelivered: whether the policy's latest turn was not delivered: the dialog continues as if
            it had not happened, and the turn is not trained.
    """

    messages: Sequence[Message] | None
    score: Score | None
    counts: Mapping[str, float] = field(default_factory=dict)
    reward: float | None = None
    tools: Sequence[dict[str, Any]] | None = None
    sample: int = 0
    limits: TurnLimits = TurnLimits()
    undelivered: bool = False


def check_split(split: str) -> None:
    """Refuse a split other than ``"train"`` and ``"test"``.

    Raises:
        ValueError: it is another one.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}: use one of the two.")


def harmless(error: BaseException) -> Exception:
    """Return an error, converted to a ``RuntimeError`` if it would end the process or its event
    loop.
    """
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}({error}) was raised.").with_traceback(
        error.__traceback__
    )


def attempt(function: Callable[[A], T], argument: A) -> T | Exception:
    """Call a function; return its result, or its exception after ``harmless``."""
    with delivered():
        try:
            return function(argument)
        except (Exception, SystemExit, GeneratorExit, CancelledError) as error:
            return harmless(error)


def answers(task: Task, dialogs: Sequence[Dialog]) -> list[Turn | Exception]:
    """Return a turn without a score for each dialog: the task's ``messages`` at the opening, no
    messages if a token limit cut the dialog off, else the task's ``reply``.
    """

    def answer(dialog: Dialog) -> Turn:
        if not dialog.responses:
            return Turn(task.messages(dialog.problem), None)
        return Turn(task.reply(dialog) if dialog.finish_reason == "stop" else None, None)

    return [attempt(answer, dialog) for dialog in dialogs]


def with_scores(
    dialogs: Sequence[Dialog],
    turns: Sequence[Turn | Exception],
    judge: Callable[[Sequence[Dialog]], Sequence[Score | Exception]],
) -> list[Turn | Exception]:
    """Return the turns, with a score if the dialog is over or the policy has no turn left.

    Args:
        dialogs: all dialogs.
        turns: the turn of each, without a score.
        judge: returns the score of each dialog that needs one.
    """
    scored = list(turns)
    done = {
        index: turn
        for index, turn in enumerate(turns)
        if isinstance(turn, Turn) and (turn.messages is None or dialogs[index].last)
    }
    scores = judge([dialogs[index] for index in done])
    for (index, turn), score in zip(done.items(), scores, strict=True):
        scored[index] = replace(turn, score=score) if isinstance(score, Score) else score
    return scored


class Task(ABC):
    """Problems with a prompt format and a scorer. Cheap to build: data is read when ``problems`` is
    first called.

    A task defines ``name``, ``problems`` and ``score``, and ``next_turn`` if its dialogs have
    several turns. A task that needs more of the dialog than its problem and responses defines
    ``judge`` and ``reply`` instead. ``advance`` applies them to many dialogs; a task that is faster
    with many at a time overrides it.

    A task that keeps state between the turns of a dialog sets ``is_stateful`` and overrides
    ``advance`` and ``close``. ``advance`` then first gets each new dialog without responses, its
    opening, and returns the first prompt. The reward worker that played the opening gets all turns
    of the dialog, and ``close`` after the last one. Without reward workers, several threads may
    call them at a time.

    Attributes:
        tools: JSON schemas of functions that the policy may call; they enter the chat template.
        has_parts: whether scores have parts.
        part_weights: weights of the parts in the reward.
        at_a_time: number of dialogs that ``advance`` handles concurrently.
        multi_turn: whether the task may reply to a response.
        is_stateful: whether the task keeps state between the turns of a dialog.
        reads_calls: whether tool calls are parsed in the chat template's format. ``LLMEnv`` then
            refuses a template whose calls it cannot parse.
        group_rewards: whether rewards compare the responses to a problem: empty for no, ``"also"``,
            or ``"only"`` if no response has a score of its own.

    Example:
        >>> class Doubling(Task):
        ...     name = "doubling"
        ...
        ...     def problems(self, split):
        ...         numbers = range(100, 120) if split == "test" else range(100)
        ...         return [Problem(f"Twice {number} is", str(2 * number)) for number in numbers]
        ...
        ...     def next_turn(self, problem, responses):
        ...         if len(responses) == 1 and not responses[0].isdigit():
        ...             return "A number, please."
        ...         return None
        ...
        ...     def score(self, problem, responses):
        ...         right = responses[-1] == problem.answer
        ...         return Score(reward=right / len(responses), correct=right)
        >>> task = Doubling()
        >>> problem = task.problems("train")[3]
        >>> task.advance([Dialog(problem, ["six"], last=False)])[0].messages
        [{'role': 'user', 'content': 'A number, please.'}]
        >>> task.advance([Dialog(problem, ["six", "6"])])[0].score
        Score(reward=0.5, correct=True)
    """

    name: str
    tools: Sequence[dict[str, Any]] = ()
    has_parts: bool = False
    part_weights: PartWeights = {}  # noqa: RUF012  # never changed in place
    at_a_time: int = 1
    is_stateful: bool = False
    reads_calls: bool = True
    group_rewards: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "opens" in vars(cls):
            _refuse_opens(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "opens":
            _refuse_opens(type(self))
        super().__setattr__(name, value)

    @abstractmethod
    def problems(self, split: Split) -> Sequence[Problem]:
        """Return all problems of a split, always in the same order. The splits share no problem."""

    def compares(self, problem: Problem) -> bool:
        """Return whether ``group_rewards`` apply to this problem."""
        return bool(self.group_rewards)

    def messages(self, problem: Problem) -> list[Message]:
        """Return the policy's first prompt: a list of ``{"role": ..., "content": ...}``."""
        chat = [{"role": "user", "content": problem.query}]
        return place_images(chat, problem.images) if problem.images else chat

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        """Return the score of a finished dialog.

        Args:
            problem: the problem.
            responses: the policy's turns as text without special tokens; one for a single-turn
                task.

        Raises:
            Exception: any error marks the sequence invalid; it is never scored 0.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no scorer: define score, or use WithRewards."
        )

    def check_problem(self, problem: Problem) -> None:  # noqa: B027  # most scorers need nothing
        """Refuse a problem without the columns that its scorer or environment needs.

        Raises:
            ValueError: a column is missing.
        """

    def next_turn(self, problem: Problem, responses: Sequence[str]) -> str | None:
        """Return a further user message after the policy's latest turn, or None to end the dialog."""
        return None

    def demonstration(self, problem: Problem) -> list[Message]:
        """Return the messages that should follow ``messages``; the first and last are the
        assistant's.

        Raises:
            ValueError: the problem has none; the message says what it must have.
        """
        raise ValueError(
            "algo=sft (policy.demonstrations=true) and policy.sft_coef need a response to each "
            f"problem, but task {self.name!r} has none: name their column as "
            "env.columns.completion, or the column of whole chats as env.columns.messages."
        )

    def tools_for(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas in the prompt of a problem; by default the task's."""
        return self.tools

    def judge(self, dialog: Dialog) -> Score:
        """Return the score of a finished dialog, by default from ``score``."""
        return self.score(dialog.problem, dialog.responses)

    def reply(self, dialog: Dialog) -> list[Message] | None:
        """Return the messages after the latest turn, None if the dialog is over; by default from
        ``next_turn``.
        """
        message = self.next_turn(dialog.problem, dialog.responses)
        return None if message is None else [{"role": "user", "content": message}]

    def advance(
        self, dialogs: Sequence[Dialog], timeout_s: float | None = None
    ) -> list[Turn | Exception]:
        """Return the outcome of each dialog's latest turn (``reply``, and ``judge`` if the dialog
        is over or the policy has no turn left), or the exception that was raised.

        Args:
            dialogs: a dialog that was cut off by a token limit gets no reply; one without responses
                is an opening.
            timeout_s: timeout of each dialog when several are judged at a time.
        """
        return with_scores(
            dialogs,
            answers(self, dialogs),
            lambda done: [*scoring((attempt(self.judge, dialog) for dialog in done), len(done))],
        )

    def load_models(self) -> None:  # noqa: B027  # most scorers need none
        """Load the models that scoring needs. Called once in each sampler's process, without a time
        limit.
        """

    def close(self, episode: str) -> None:  # noqa: B027  # most tasks keep nothing
        """Release the state of a dialog. Called once when the dialog is over or abandoned, even if
        its opening failed; not called if the process ends.

        Args:
            episode: key of the dialog; ignored if this task has no state for it.
        """

    def tool_failure_reply(self, dialog: Dialog, why: str) -> list[Message] | None:
        """Return the reply to a turn that took too long or ended the process; None ends the
        dialog.
        """
        return None

    @property
    def multi_turn(self) -> bool:
        return type(self).next_turn is not Task.next_turn or type(self).reply is not Task.reply

    def epoch(
        self, problems: Sequence[Problem], usable: Sequence[int], rng: random.Random
    ) -> list[int]:
        """Return the order in which an epoch draws problems.

        Args:
            problems: problems of the split.
            usable: indices of the problems that may be drawn.
            rng: decides the order.

        Returns:
            ``len(usable)`` indices; by default each once.
        """
        order = list(usable)
        rng.shuffle(order)
        return order


def _refuse_opens(cls: type[Task]) -> NoReturn:
    raise ValueError(f"{cls.__name__}.opens is now called is_stateful: rename it.")


class DelegatingTask(Task):
    """A task that delegates calls about one problem to that problem's task."""

    @abstractmethod
    def task_of(self, problem: Problem) -> Task:
        """Return the task of a problem."""

    def messages(self, problem: Problem) -> list[Message]:
        return self.task_of(problem).messages(problem)

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        return self.task_of(problem).score(problem, responses)

    def check_problem(self, problem: Problem) -> None:
        self.task_of(problem).check_problem(problem)

    def demonstration(self, problem: Problem) -> list[Message]:
        return self.task_of(problem).demonstration(problem)

    def tools_for(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        return self.task_of(problem).tools_for(problem) or self.tools

    def judge(self, dialog: Dialog) -> Score:
        return self.task_of(dialog.problem).judge(dialog)

    def reply(self, dialog: Dialog) -> list[Message] | None:
        return self.task_of(dialog.problem).reply(dialog)

    def tool_failure_reply(self, dialog: Dialog, why: str) -> list[Message] | None:
        return self.task_of(dialog.problem).tool_failure_reply(dialog, why)


class WrappedTask(DelegatingTask):
    """A task that delegates to another one. Only ``advance`` does not, unless the other task is
    stateful: it calls this task's ``reply`` and ``judge``, which a subclass may override.

    Args:
        task: the wrapped task.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.name = task.name
        self.tools = task.tools
        self.has_parts = task.has_parts
        self.part_weights = task.part_weights
        self.at_a_time = task.at_a_time
        self.is_stateful = task.is_stateful
        self.reads_calls = task.reads_calls
        self.group_rewards = task.group_rewards

    def problems(self, split: Split) -> Sequence[Problem]:
        return self.task.problems(split)

    def task_of(self, problem: Problem) -> Task:
        return self.task

    def compares(self, problem: Problem) -> bool:
        task = self.task
        return task.compares(problem) if task.group_rewards else super().compares(problem)

    def advance(
        self, dialogs: Sequence[Dialog], timeout_s: float | None = None
    ) -> list[Turn | Exception]:
        if self.is_stateful:
            return self.task.advance(dialogs, timeout_s)
        return super().advance(dialogs, timeout_s)

    def load_models(self) -> None:
        self.task.load_models()

    def close(self, episode: str) -> None:
        self.task.close(episode)

    @property
    def multi_turn(self) -> bool:
        return self.task.multi_turn

    def epoch(
        self, problems: Sequence[Problem], usable: Sequence[int], rng: random.Random
    ) -> list[int]:
        return self.task.epoch(problems, usable, rng)

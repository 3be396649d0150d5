"""A task scored by reward functions: built-in, user-defined, or in TRL's or verl's form."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.host.event_loop import event_loop
from torchrl_grpo.host.interrupts import delivered
from torchrl_grpo.host.objects import load_function
from torchrl_grpo.host.progress import scoring
from torchrl_grpo.images import ImageFile
from torchrl_grpo.rewards import BUILTINS
from torchrl_grpo.rewards.forms import RewardFunction
from torchrl_grpo.rewards.spec import (
    CORRECT,
    RewardSpec,
    parse_rewards,
    part_weight,
    reward_weights,
)
from torchrl_grpo.tasks.base import (
    Dialog,
    Message,
    Problem,
    Score,
    Task,
    Turn,
    WrappedTask,
    answers,
    harmless,
    with_scores,
)

_AT_A_TIME = 64


class Rewards:
    """Scores a dialog by reward functions: a weighted sum of their parts.

    A function that returns a number has the part ``name``; one that returns a dict has the parts
    ``name/entry``, apart from the text ``feedback``. A part that is None is left out of the sum.
    The first function that applies decides whether the dialog is correct: by its part ``correct``,
    which is not part of the reward, or by whether its value (of a dict, the part ``reward`` or the
    first part) is at least 1.

    Functions of a group are called with the dialogs of ``Dialog.group``, and do not decide whether
    one is correct.

    Functions that are ``async def`` run in the process's event loop. Others run in the calling
    thread, one after the other.

    Attributes:
        functions: functions that score one dialog.
        group_functions: group reward functions.
        group_rewards: see ``Task``.
        weights: see ``torchrl_grpo.rewards.spec.reward_weights``.
        asynchronous: whether a function is ``async def``; ``score_all`` is then faster with many
            dialogs at a time.

    Args:
        functions: at least one.
        weights: weights by name.
        prompt_column: column of the prompt; if it has lists of messages, functions in TRL's form
            get chats.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Mapping[str, float],
        prompt_column: str = "prompt",
    ) -> None:
        self.functions = [each for each in functions if each.form.split is None]
        self.group_functions = [each for each in functions if each.form.split]
        self.group_rewards = ("also" if self.functions else "only") if self.group_functions else ""
        self.weights = dict(weights)
        self.prompt_column = prompt_column
        self.asynchronous = any(function.asynchronous for function in functions)

    def check(self, problem: Problem, has_environment: bool = False) -> None:
        """Refuse functions with an argument that is neither a column of a problem nor built-in.

        Args:
            problem: the problem.
            has_environment: whether environments play its dialogs.

        Raises:
            ValueError: there is one.
        """
        has_answer, has_images = problem.answer is not None, bool(problem.images)
        for function in self.functions:
            function.check(problem.extra, has_answer, has_environment, has_images)
        for function in self.group_functions:  # the environments are gone when these are called
            function.check(problem.extra, has_answer, has_images=has_images)

    def load_models(self) -> None:
        """Load the models of functions that have some."""
        for function in (*self.functions, *self.group_functions):
            if load := getattr(function.function, "load_model", None):
                load(**function.options)

    def __call__(self, dialog: Dialog) -> Score:
        """Return the score of a dialog.

        Raises:
            ValueError: a function did not return a reward, or none applies.
            Exception: raised by a function.
        """
        return self.start(dialog).result()

    def start(self, dialog: Dialog, timeout_s: float | None = None) -> Future[Score]:
        """Start scoring a dialog; asynchronous functions continue after this returns.

        Args:
            dialog: finished dialog.
            timeout_s: timeout for the asynchronous functions.

        Returns:
            the score, or the exception that a function raised.
        """
        future: Future[Score] = Future()
        results: list[Any] = []
        with delivered():
            try:
                columns = _with_images(dialog.problem.extra) if dialog.problem.images else None
                for function in self.group_functions if dialog.group else self.functions:
                    arguments = _arguments(dialog, self.prompt_column)
                    results.append(function.call(arguments, columns or dialog.problem.extra))
                if any(map(inspect.isawaitable, results)):
                    return asyncio.run_coroutine_threadsafe(
                        self._wait(dialog, results, timeout_s), event_loop()
                    )
                future.set_result(self._finish(dialog, results))
            except (Exception, SystemExit) as error:
                for result in results:
                    if inspect.iscoroutine(result):
                        result.close()
                future.set_exception(harmless(error))
        return future

    def score_all(
        self, dialogs: Sequence[Dialog], timeout_s: float | None = None
    ) -> list[Score | Exception]:
        """Return the scores of dialogs in order, or the errors; asynchronous functions run for all
        dialogs at once.
        """
        futures = [*scoring((self.start(each, timeout_s) for each in dialogs), len(dialogs))]
        return [
            error if isinstance(error := f.exception(), Exception) else f.result() for f in futures
        ]

    async def _wait(self, dialog: Dialog, results: list[Any], timeout_s: float | None) -> Score:
        pending = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
        try:
            async with asyncio.timeout(timeout_s) as limit:
                values = await asyncio.gather(*(_catch_exit(results[i]) for i in pending))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise InvalidRewardError(
                f"a reward must be returned within {timeout_s:g} s, but it was not.", "timeout"
            ) from error
        for i, result in zip(pending, values, strict=True):
            results[i] = result
        return self._finish(dialog, results)

    def _finish(self, dialog: Dialog, results: Sequence[Any]) -> Score:
        if not dialog.group:
            return self._score(self.functions, results)
        results = [
            function.form.split(function.name, result, len(dialog.group))
            for function, result in zip(self.group_functions, results, strict=True)
            if function.form.split
        ]
        scores = [self._score(self.group_functions, each) for each in zip(*results, strict=True)]
        parts = {
            f"{index}/{name}": value
            for index, score in enumerate(scores)
            for name, value in {**score.parts, "": score.reward}.items()
        }
        return Score(0.0, False, parts, json.dumps([score.feedback for score in scores]))

    def _score(self, functions: Sequence[RewardFunction], results: Sequence[Any]) -> Score:
        parts: dict[str, float | None] = {}
        correct: bool | None = None
        texts: list[str] = []
        for function, result in zip(functions, results, strict=True):
            named_parts, text = function.read(result)
            texts.append(text)
            parts |= named_parts
            if correct is None:
                correct = _is_correct(function.name, named_parts)
        terms = [
            weight * value
            for name, value in parts.items()
            if value is not None and (weight := part_weight(name, parts, self.weights))
        ]
        if not terms and not self.group_functions:  # which may add one
            raise InvalidRewardError(
                f"one of the rewards {list(parts)} must be a number with a weight that is not 0: "
                "return 0.0 where a response is wrong, because None leaves a reward out, or set a weight.",
                "none",
            )
        return Score(sum(terms), bool(correct), parts, "\n".join(filter(None, texts)))


def make_rewards(
    spec: RewardSpec, *, prompt_column: str = "prompt", field: str = "env.reward"
) -> Rewards:
    """Return the rewards that a config names.

    Args:
        spec: a function's name (see ``load_function``) or the function; ``{fn, weight, name,
            per, ...options}``; or a list.
        prompt_column: see ``Rewards``.
        field: config key of the spec, for messages.

    Raises:
        ValueError: the spec is malformed, or a function cannot be loaded.

    >>> from torchrl_grpo.tasks.base import Problem
    >>> rewards = make_rewards([{"fn": "gsm8k", "weight": 0.9}, {"fn": "number", "weight": 0.1}])
    >>> rewards(Dialog(Problem("6*7=?", "42"), ["#### 42"])).parts
    {'gsm8k': 1.0, 'number': 1.0}
    """
    entries = parse_rewards(spec, field)
    functions = [
        RewardFunction(
            load_function(entry.fn, field, BUILTINS) if isinstance(entry.fn, str) else entry.fn,
            entry,
        )
        for entry in entries
    ]
    return Rewards(functions, reward_weights(entries), prompt_column)


class WithRewards(WrappedTask):
    """Another task's problems, scored by reward functions.

    Args:
        task: the other task.
        rewards: reward functions that score a dialog.

    >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
    >>> from torchrl_grpo.tasks.base import Problem
    >>> task = WithRewards(ArithmeticTask(), make_rewards({"fn": "gsm8k", "mode": "lenient"}))
    >>> task.judge(Dialog(Problem("6*7=?", "42"), ["The answer is 42."])).correct
    True
    """

    def __init__(self, task: Task, rewards: Rewards) -> None:
        super().__init__(task)
        self.rewards = rewards
        self.has_parts = True
        self.part_weights = rewards.weights
        self.at_a_time = task.at_a_time if task.is_stateful else 1
        self.group_rewards = rewards.group_rewards
        if rewards.asynchronous:
            self.at_a_time = max(_AT_A_TIME, self.at_a_time)

    def check_problem(self, problem: Problem) -> None:
        self.rewards.check(problem)
        super().check_problem(problem)

    def load_models(self) -> None:
        super().load_models()
        self.rewards.load_models()

    def judge(self, dialog: Dialog) -> Score:
        return self.rewards(dialog)

    def advance(
        self, dialogs: Sequence[Dialog], timeout_s: float | None = None
    ) -> list[Turn | Exception]:
        turns = (
            self.task.advance(dialogs, timeout_s)
            if self.is_stateful
            else answers(self.task, dialogs)
        )
        return with_scores(dialogs, turns, lambda done: self.rewards.score_all(done, timeout_s))


def _arguments(dialog: Dialog, prompt_column: str) -> dict[str, Any]:
    if dialog.group:
        members = [_arguments(member, prompt_column) for member in dialog.group]
        return members[0] | {"members": members}
    problem = dialog.problem
    response = dialog.responses[-1]
    turn: Message = {"role": "assistant", "content": response}
    chat = problem.extra.get(prompt_column)
    prompt: Sequence[Message] = (
        chat if isinstance(chat, list) else [{"role": "user", "content": problem.query}]
    )
    messages = list(dialog.messages) or [*prompt, turn]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    start = turns[-len(dialog.responses) :][0] if turns else len(messages) - 1
    environment = {} if dialog.environment is None else {"environments": [dialog.environment]}
    files = problem.images
    images = {"images": [file.open() for file in files]} if files else {}
    return (
        environment
        | images
        | {
            "response": response,
            "prompt": problem.query,
            "messages": messages,
            "answer": problem.answer,
            "finish_reason": dialog.finish_reason,
            "tokens": list(dialog.tokens),
            "prefill": dialog.prefill,
            "prompt_column": prompt_column,
            "prompt_messages": messages[:start],
            "completion_messages": messages[start:],
            "dataset": problem.dataset,
        }
    )


def _with_images(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns with PIL images in place of files."""

    def opened(value: Any) -> Any:
        if isinstance(value, list):
            return [opened(entry) for entry in value]
        return value.open() if isinstance(value, ImageFile) else value

    return {name: opened(value) for name, value in columns.items()}


async def _catch_exit(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the event loop
        raise harmless(error) from None


def _is_correct(name: str, parts: Mapping[str, float | None]) -> bool | None:
    """Return whether a function's result is correct; None if it does not apply."""
    if f"{name}/{CORRECT}" in parts:
        value = parts[f"{name}/{CORRECT}"]
        return None if value is None else value > 0
    value = parts.get(name, parts.get(f"{name}/reward", next(iter(parts.values()), None)))
    return None if value is None else value >= 1

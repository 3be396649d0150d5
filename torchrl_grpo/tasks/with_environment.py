"""``WithEnvironment``: a task whose dialogs are played by environments, one stateful object per
dialog.

An environment class has TRL's form (``environment_factory``) or, if it has ``step(self,
response)``, is a text game in Gymnasium's terms. It is constructed without arguments, and any
method may be an ``async def``:

- ``reset(self, **columns)`` gets the columns of the problem that its arguments name. It returns the
  first observation, which is appended to the user message, or None. An observation is a text, an
  image, or a list of both (``torchrl_grpo.images.message_content``).
- ``step(self, response)`` makes the class a text game. It returns (observation, reward, done), and
  is also called for a response that a token limit cut off; ``step(self, response, truncated)`` gets
  that as an argument.
- Without ``step``, other public methods are tools that the policy may call. Their schemas come from
  type hints and docstrings.
- ``get_reward(self)``, in a class with tools, returns the reward of the dialog, a number.
- ``close(self)``, if there is one, is called at the end.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from torchrl_grpo.checks import check_reward
from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.host.event_loop import wait_for_result
from torchrl_grpo.images import Content, message_content
from torchrl_grpo.tasks.base import Dialog, Message, Problem, Score, Task, Turn, WrappedTask
from torchrl_grpo.tasks.instances import Instance
from torchrl_grpo.tasks.with_rewards import Rewards, WithRewards
from torchrl_grpo.tools import Toolbox
from torchrl_grpo.tools.toolbox import Parser

COLUMN = "environment"
"""Column that names a problem's environment among several."""
_NO_TOOLS = ("reset", "get_reward", "close")
_MAX_STUCK = 16
"""Number of environments with hanging methods after which the process is replaced."""


class Kind:
    """A class of environments.

    Attributes:
        name: name of the class.
        steps: whether the class is a text game.
        takes_truncated: whether its step has the argument ``truncated``.
        toolbox: tools of a dialog; methods are bound once there is an instance.

    Args:
        make: the class, or a function that makes an instance.
        tools: further functions that the policy may call.
        parser: function that finds the calls in a turn; None parses the chat template's format.
        field: config key of the class, for messages.

    Raises:
        ValueError: it is not a class, has no ``reset``, has neither tools nor ``step``, or a tool
            lacks a description.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        tools: Sequence[Callable[..., Any]] = (),
        parser: Parser | None = None,
        field: str = "env.environment",
    ) -> None:
        cls = inspect.unwrap(make)
        if not isinstance(cls, type):
            raise ValueError(f"{field}={cls!r:.80} must be a class: pass the class itself.")
        self.make = make
        self.name = cls.__name__
        where = f"{field}={self.name}"
        reset = getattr(cls, "reset", None)
        if not callable(reset):
            raise ValueError(
                f"{where} must have reset(self, **columns): add it; it may return None."
            )
        self._reset = inspect.signature(reset).parameters
        step = getattr(cls, "step", None)
        of_step = inspect.signature(step).parameters if callable(step) else {}
        self.steps = "response" in of_step
        self.takes_truncated = "truncated" in of_step
        self.owns_reward = self.steps or callable(getattr(cls, "get_reward", None))
        methods = inspect.getmembers(
            cls, lambda member: inspect.isfunction(member) or inspect.ismethod(member)
        )
        names = [name for name, _ in methods if not name.startswith("_")]
        self._methods = [] if self.steps else [name for name in names if name not in _NO_TOOLS]
        if self.steps and tools:
            raise ValueError(
                f"env.tools must be left out with {where}, because a text game reads responses: "
                "use one of them."
            )
        if not (self.steps or self._methods):
            raise ValueError(
                f"{where} must have step(self, response) or public methods, which are the policy's "
                "tools, but it has none: add one."
            )
        unbound: Any = object.__new__(
            cls
        )  # only to see the methods without self, as the policy does
        schemas = Toolbox([*tools, *(getattr(unbound, name) for name in self._methods)], parser)
        self.toolbox = schemas.with_functions({function.__name__: function for function in tools})

    def arguments(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that ``reset`` gets: all, or those that it names.

        Raises:
            ValueError: it needs a column that does not exist.
        """
        parameters = [p for name, p in self._reset.items() if name != "self"]
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        missing = [
            p.name
            for p in parameters
            if p.default is p.empty and p.kind in by_name and p.name not in columns
        ]
        if missing:
            raise ValueError(
                f"reset of the environment {self.name} needs {' and '.join(missing)}, but the "
                f"columns are {sorted(columns)}: use one of these names, or set a default."
            )
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return {name: value for name, value in columns.items() if takes_all or name in self._reset}

    def outcome(self, environment: Any) -> tuple[float | None, bool]:
        """Return the reward of the policy's latest turn, None without one, and whether an
        environment with tools ended the dialog.
        """
        return None, False

    def tools_of(self, environment: Any) -> Toolbox:
        """Return the tools of a dialog, with the methods of its environment."""
        methods = {name: getattr(environment, name) for name in self._methods}
        return self.toolbox.with_functions(self.toolbox.functions | methods)


class WithEnvironment(WrappedTask):
    """Another task's problems, with an environment for each dialog.

    Each environment lives in its own thread. Its reward is the sum over its steps, or the result of
    ``get_reward``; rewards of reward functions are added. A dialog is correct if the environment's
    reward is at least 1 or, if it has none, by the reward functions. Tool calls in the last turn
    are run too, because the reward may depend on them.

    Args:
        task: the other task.
        kinds: the classes by their name in the column ``environment``; a single one has the name
            ``""``.

    Keyword Args:
        rewards: reward functions, which get ``environments``, a list of the dialog's environment.
        judged: whether only the other task scores the dialogs.
        at_a_time: number of dialogs played concurrently.

    Raises:
        ValueError: nothing returns a reward.

    >>> class Guess:
    ...     def reset(self, seed):
    ...         self.number = seed % 10
    ...         return "Guess a digit."
    ...
    ...     def step(self, response):
    ...         done = response == str(self.number)
    ...         return "no", float(done), done
    >>> from torchrl_grpo.tasks.seeds import SeedsTask
    >>> task = WithEnvironment(SeedsTask(), {"": Kind(Guess)})
    >>> problem = task.problems("train")[3]
    >>> opening = Dialog(problem, [], task.messages(problem), last=False, episode="a")
    >>> task.advance([opening])[0].messages
    [{'role': 'user', 'content': 'Guess a digit.'}]
    >>> task.advance([replace(opening, responses=["3"])])[0].score
    Score(reward=1.0, correct=True)
    >>> task.close("a")
    """

    multi_turn = True

    def __init__(
        self,
        task: Task,
        kinds: Mapping[str, Kind],
        *,
        rewards: Rewards | None = None,
        judged: bool = False,
        at_a_time: int = 16,
    ) -> None:
        super().__init__(task)
        self.kinds = dict(kinds)
        self.rewards = rewards
        self.at_a_time = at_a_time
        self.is_stateful = True
        self.judged = judged
        self.has_parts = task.has_parts if judged else rewards is not None
        if rewards is not None:
            self.part_weights = rewards.weights
            self.group_rewards = rewards.group_rewards
        self.tools = [schema for kind in kinds.values() for schema in kind.toolbox.schemas]
        self.reads_calls = all(kind.toolbox.parser is None for kind in kinds.values())
        if self.name == "seeds":
            self.name = "+".join(kind.name for kind in kinds.values())
        for kind in kinds.values():
            if not judged and rewards is None and not kind.owns_reward:
                raise ValueError(
                    f"env.environment={kind.name} needs env.reward, because it has no "
                    "get_reward(self): add one that returns the reward of the dialog, or name a "
                    "reward function, which gets environments."
                )
        self._instances: dict[str, Instance] = {}
        self._stuck: list[Future[Turn]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the environments of dialogs, which stay in their process."""
        return self.__dict__ | {"_instances": {}, "_stuck": []}

    def kind_of(self, problem: Problem) -> Kind:
        """Return the class for a problem.

        Raises:
            ValueError: there are several, and the problem does not name one.
        """
        name = "" if "" in self.kinds else problem.extra.get(COLUMN)
        if name not in self.kinds:
            raise ValueError(
                f"the column {COLUMN} must have one of the names in env.environment, "
                f"{sorted(self.kinds)}, but it has {name!r:.80}: fix the row, or add a class for "
                "it."
            )
        return self.kinds[name]

    def check(self, problems: Sequence[Problem]) -> None:
        """Refuse problems without the columns that their environment needs.

        Raises:
            ValueError: there are some.
        """
        for problem in problems:
            self.kind_of(problem).arguments(self._columns(problem))

    def check_problem(self, problem: Problem) -> None:
        self.check([problem])
        if self.rewards is not None:
            self.rewards.check(problem, has_environment=True)
        if self.judged:
            super().check_problem(problem)

    def _columns(self, problem: Problem) -> dict[str, Any]:
        return {
            name: value
            for name, value in problem.extra.items()
            if "" in self.kinds or name != COLUMN
        }

    def advance(
        self, dialogs: Sequence[Dialog], timeout_s: float | None = None
    ) -> list[Turn | Exception]:
        if dialogs and dialogs[0].group:  # only ever groups: their dialogs have no episode
            scorer = self.task if self.rewards is None else WithRewards(self.task, self.rewards)
            return scorer.advance(dialogs, timeout_s)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        futures = [self._start(dialog, timeout_s) for dialog in dialogs]
        turns = [self._wait(future, end, timeout_s) for future in futures]
        self._stuck = [future for future in self._stuck if not future.done()]
        if len(self._stuck) >= _MAX_STUCK:  # only reward workers have a time limit
            os._exit(os.EX_SOFTWARE)
        return turns

    def _start(self, dialog: Dialog, timeout_s: float | None) -> Future[Turn]:
        play = self._play
        if not dialog.responses:
            self._instances[dialog.episode] = Instance()
            play = self._open
        instance = self._instances.get(dialog.episode)
        if instance is None:
            raise RuntimeError(
                f"the dialog {dialog.episode!r} must be opened before its first turn, but it was "
                "not."
            )
        instance.timeout_s = timeout_s
        return instance.call(partial(play, instance, dialog))

    def _wait(
        self, future: Future[Turn], end: float | None, timeout_s: float | None
    ) -> Turn | Exception:
        try:
            return future.result(None if end is None else max(0.0, end - time.monotonic()))
        except TimeoutError as error:
            if end is None or time.monotonic() < end:  # raised by the environment itself
                return error
            if not future.done():
                self._stuck.append(future)
            return InvalidRewardError(
                f"an environment must return within env.reward_timeout_s={timeout_s:g}, but it did "
                "not: raise the limit, or find out what it waits for.",
                "timeout",
            )
        except Exception as error:
            return error

    def load_models(self) -> None:
        super().load_models()
        if self.rewards is not None:
            self.rewards.load_models()

    def close(self, episode: str) -> None:
        instance = self._instances.pop(episode, None)
        if instance is not None:
            instance.close()

    # In the thread of an instance

    def _open(self, instance: Instance, dialog: Dialog) -> Turn:
        kind = self.kind_of(dialog.problem)
        instance.environment = kind.make()
        arguments = kind.arguments(self._columns(dialog.problem))
        observation = wait_for_result(instance.environment.reset(**arguments), instance.timeout_s)
        prompt = _prompt(dialog.messages, observation, kind.name)
        return Turn(prompt, None, tools=kind.toolbox.schemas)

    def _play(self, instance: Instance, dialog: Dialog) -> Turn:
        kind = self.kind_of(dialog.problem)
        turn = Turn(None, None)
        # Otherwise its last observation did not fit into the context.
        has_new_turn = len(instance.rewards) < len(dialog.responses)
        if kind.steps and has_new_turn:
            turn = self._step(instance, kind, dialog)
        elif not kind.steps and dialog.finish_reason == "stop":
            turn = self._call(instance, kind, dialog)
        if turn.messages is None or dialog.last:
            turn = replace(turn, score=self._score(instance, kind, dialog))
        return turn

    def _step(self, instance: Instance, kind: Kind, dialog: Dialog) -> Turn:
        options = {"truncated": dialog.finish_reason == "length"} if kind.takes_truncated else {}
        result = wait_for_result(
            instance.environment.step(dialog.responses[-1], **options), instance.timeout_s
        )
        try:
            observation, value, done = result
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"step of the environment {kind.name} must return (observation, reward, done), but "
                f"it returned {result!r:.80} ({error}): return these three."
            ) from error
        reward = check_reward(value, f"the reward of a step of {kind.name}")
        if observation is None and not done:
            raise ValueError(
                f"step of the environment {kind.name} must return an observation unless the game "
                "is over, but it returned None: return text, or done=True."
            )
        instance.rewards.append(reward)
        content = _content(observation, f"step of the environment {kind.name}")
        messages = None if done else [{"role": "user", "content": content}]
        return Turn(messages, None, {}, reward)

    def _call(self, instance: Instance, kind: Kind, dialog: Dialog) -> Turn:
        toolbox = kind.tools_of(instance.environment)
        calls = toolbox.calls(dialog)
        if not calls:
            return Turn(None, None)
        messages, counts = toolbox.run_all(calls)
        reward, done = kind.outcome(instance.environment)
        return Turn(None if done else messages, None, counts, reward)

    def _score(self, instance: Instance, kind: Kind, dialog: Dialog) -> Score:
        if self.judged:
            return self.task.judge(dialog)
        reward: float | None = None
        if kind.steps:
            reward = sum(instance.rewards)
        elif kind.owns_reward:
            value = wait_for_result(instance.environment.get_reward(), instance.timeout_s)
            reward = check_reward(value, f"get_reward of {kind.name}")
        if self.rewards is None:
            assert reward is not None
            return Score(reward, reward >= 1)
        dialog = replace(dialog, environment=instance.environment)
        score = self.rewards.start(dialog, instance.timeout_s).result()
        if reward is None:
            return score
        return Score(score.reward + reward, reward >= 1, {**score.parts, kind.name: reward})


def _prompt(messages: Sequence[Message], observation: Any, name: str) -> list[Message]:
    """Return a problem's chat with the first observation at the end of the user's message."""
    observed = message_content(observation, f"reset of the environment {name}")
    if observed is None and not isinstance(observation, str | None):
        raise TypeError(
            f"reset of the environment {name} must return text, an image, a list of parts, or "
            f"None, but it returned {observation!r:.80}."
        )
    observed = observation or "" if observed is None else observed
    *before, last = messages
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": observed}]
    content = last["content"]
    if isinstance(content, str) and isinstance(observed, str):
        content += observed
    elif observed:
        content = [*_parts(content), *_parts(observed)]
    if not content:
        raise ValueError(
            f"reset of the environment {name} must return the first prompt if there is no data "
            f"set, but it returned {observation!r}: return text, or set env.dataset or "
            "env.prompt_template."
        )
    return [*before, {**last, "content": content}]


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return the content of a message as a list of parts."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _content(observation: Any, what: str) -> Content:
    """Return an observation as the content of a message: text, or a list of its texts and images.

    Raises:
        ValueError: a part beside images is neither a text nor an image.
    """
    content = message_content(observation, what)
    return str(observation) if content is None else content

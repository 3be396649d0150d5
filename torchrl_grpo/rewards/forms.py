"""A reward function: its arguments, by the form that its parameters show, and the interpretation of
its result.

========  ====================
================================================================================== form      told by
given ========  ====================
================================================================================== own
``FACTS`` and the columns by name; columns alone to ``**kwargs`` TRL's     ``completions``,
lists of one: ``prompts``, ``completions``, ``completion_ids`` and the columns;
          ``completion_ids``,   ``trainer_state=None``, and ``log_extra`` and ``log_metric``, which
          do nothing ``prompts``, or ``environments``
verl's    ``solution_str``      ``data_source``, ``solution_str``, ``ground_truth``, ``extra_info``;
columns by name ========  ====================
==================================================================================
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any, Literal

from torchrl_grpo.checks import check_reward
from torchrl_grpo.rewards.spec import RewardEntry

FACTS = ("response", "prompt", "messages", "answer", "finish_reason", "tokens", "prefill")
"""Arguments available for each response besides the columns of its row."""

Form = Literal["own", "trl", "verl"]
Given = dict[str, Any]


def _ignore(*args: Any, **kwargs: Any) -> None:
    """No-op for TRL's logging arguments; parts of a reward are logged anyway."""


def _own(facts: Given, columns: Given) -> tuple[Given, Given]:
    return columns | {
        name: facts[name] for name in (*FACTS, *(facts.keys() & _ENVIRONMENTS))
    }, columns


def _trl(facts: Given, columns: Given) -> tuple[Given, Given]:
    chat = isinstance(columns.get(facts["prompt_column"]), list)
    given: Given = {name: [value] for name, value in columns.items() if name != "prompt"}
    given = {"answer": [facts["answer"]]} | given | {
        "prompts": [facts["asked"] if chat else facts["prompt"]],
        "completions": [facts["written"] if chat else facts["response"]],
        "completion_ids": [facts["tokens"]],
        "trainer_state": None,
        "log_extra": _ignore,
        "log_metric": _ignore,
    } | {name: facts[name] for name in facts.keys() & _ENVIRONMENTS}  # fmt: skip
    return given, given


def _verl(facts: Given, columns: Given) -> tuple[Given, Given]:
    model, extra = columns.get("reward_model"), columns.get("extra_info")
    truth = columns.get("ground_truth", facts["answer"])
    return columns | {
        "data_source": columns.get("data_source", facts["dataset"]),
        **dict.fromkeys(_OF_VERL, facts["response"]),
        "ground_truth": model.get("ground_truth", truth) if isinstance(model, Mapping) else truth,
        "extra_info": columns if extra is None else extra,
    }, {}  # fmt: skip


# From facts and columns to what is matched by name, and what else ``**kwargs`` gets.
_FORMS: dict[Form, Callable[[Given, Given], tuple[Given, Given]]] = {
    "own": _own,
    "trl": _trl,
    "verl": _verl,
}
_OWN = set(FACTS) - {"answer"}
_OF_TRL = {"completions", "completion_ids", "prompts"}
_ENVIRONMENTS = {"environments"}
"""Argument where environments play the dialogs: a list with the response's own."""
_OF_VERL = ("solution_str", "model_output", "predict_str")
_ABSENT = object()
_NOTHING: Given = dict.fromkeys((*FACTS, "prompt_column", "asked", "written", "dataset"))


class RewardFunction:
    """A function of a reward, with its name and options.

    Attributes:
        name: of the function in logs.
        form: how it is called.
        asynchronous: whether it is an ``async def``.

    Args:
        function: of any form.
        entry: what the config says about it.

    Raises:
        ValueError: the function has not the arguments that it is given as options, or can not be
            called by name.

    >>> def short(response, limit): return len(response) < limit
    >>> reward = RewardFunction(short, RewardEntry("my.py:short", "short", 1.0, {"limit": 3}))
    >>> reward.parts(reward.call({**_NOTHING, "response": "yes"}, {}))
    {'short': 0.0}
    """

    def __init__(self, function: Callable[..., Any], entry: RewardEntry) -> None:
        self.function = function
        self.name = entry.name
        self.options = dict(entry.options)
        self._expected = set(entry.weight) if isinstance(entry.weight, Mapping) else set()
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"reward {self.name} must show its parameters ({error}): wrap it in a `def`."
            ) from error
        named = {
            p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        self._names = set(named)
        self._needed = {key for key, p in named.items() if p.default is p.empty}
        self._takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        of_trl = _OF_TRL & set(named) or (_ENVIRONMENTS & set(named) and not _OWN & set(named))
        self.form: Form = "trl" if of_trl else "verl" if named.keys() & set(_OF_VERL) else "own"
        unknown = sorted(set(self.options) - self._names)
        if unknown and not self._takes_rest:
            keys = sorted({"name", "weight"} | self._names)
            close = difflib.get_close_matches(unknown[0], keys, 1)
            raise ValueError(
                f"reward {self.name} must take the options that it is given, it has no {', '.join(unknown)}: "
                + (f"did you mean {close[0]}?" if close else f"use some of {keys}.")
            )
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ValueError(
                f"reward {self.name} must take its arguments by name: remove the '/' from its "
                "parameters."
            )
        if self.form == "verl" and self._expected:
            raise ValueError(
                f"weight of reward {self.name} must be a number, it is verl's form, where `score` "
                "alone trains: use 1."
            )

    @property
    def asynchronous(self) -> bool:
        function = inspect.unwrap(self.function)
        call = getattr(function, "__call__", None)  # noqa: B004  # of an object whose class defines it
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    def check(
        self, columns: Collection[str], has_answer: bool = True, has_environment: bool = False
    ) -> None:
        """Refuse arguments that are neither columns nor built-in.

        Args:
            columns: of the data.
            has_answer: whether its problems have an answer.
            has_environment: whether environments play its dialogs.

        Raises:
            ValueError: there are some.
        """
        facts = _NOTHING if has_answer else _NOTHING | {"answer": _ABSENT}
        facts = facts | (dict.fromkeys(_ENVIRONMENTS) if has_environment else {})
        given = _FORMS[self.form](facts, dict.fromkeys(columns))[0]
        there = {name for name, value in given.items() if value not in (_ABSENT, [_ABSENT])}
        if not self._takes_rest and not (self._names - set(self.options)) & there:
            raise ValueError(
                f"reward {self.name} must take something of a response, such as `response` or "
                f"`completions`, its parameters are {sorted(self._names)}: if it makes a reward "
                f"function, call it in a file of yours, `{self.name}_made = {self.name}(...)`, and "
                f"name that, file.py:{self.name}_made."
            )
        missing = sorted(self._needed - set(self.options) - there)
        if missing:
            raise ValueError(
                f"reward {self.name} needs {' and '.join(missing)}, "
                f"{'which is' if len(missing) == 1 else 'which are'} neither a column nor a "
                f"built-in argument: use names of these: {', '.join(sorted(there))}; or give it as "
                f"an option, {{fn: ..., {missing[0]}: ...}}."
            )

    def call(self, facts: Given, columns: Given) -> Any:
        """Call the function; the result is an awaitable where it is asynchronous.

        Args:
            facts: ``FACTS``; ``prompt_column``, ``asked`` (the messages of the prompt), ``written``
                (those since) and ``dataset``.
            columns: of the row.
        """
        given, rest = _FORMS[self.form](facts, columns)
        arguments = {name: value for name, value in given.items() if name in self._names}
        return self.function(
            **((rest | arguments if self._takes_rest else arguments) | self.options)
        )

    def parts(self, result: Any) -> dict[str, float | None]:
        """The parts of a result by name, None for one that does not apply.

        Raises:
            ValueError: the result is not what a reward returns.
        """
        if self.form == "trl":
            try:
                (result,) = result
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"reward {self.name} must return a list with one reward for each completion, "
                    f"for one it gave {type(result).__name__} ({error}): return [reward]."
                ) from error
        elif self.form == "verl" and isinstance(result, tuple | list) and result:
            result = result[0]  # verl takes the first of several, too
        if not isinstance(result, Mapping):
            result = {"": result}
        elif self.form == "verl":
            if "score" not in result:
                raise ValueError(
                    f"reward {self.name} must return a score, its dict has {sorted(result)}: add "
                    "`score`."
                )
            numbers = {key: value for key, value in result.items() if isinstance(value, Real)}
            result = {"": result["score"]} | {
                key: value for key, value in numbers.items() if key != "score"
            }
        if not self._expected <= set(result):
            raise ValueError(
                f"reward {self.name} must return the parts that have a weight, "
                f"{sorted(self._expected)}, it returned {sorted(map(str, result))}: return None "
                "for one that does not apply."
            )
        named = {f"{self.name}/{key}" if key else self.name: value for key, value in result.items()}
        return {
            name: None if value is None else check_reward(value, f"reward {name}")
            for name, value in named.items()
        }

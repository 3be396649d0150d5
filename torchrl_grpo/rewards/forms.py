"""Reward functions: the arguments of each form, and the interpretation of the result.

========  ==========================  ===================================================
form      recognized by               arguments
========  ==========================  ===================================================
own                                   ``FACTS`` and the columns by name; columns alone to
                                      ``**kwargs``
TRL's     ``completions``,            lists of one: ``prompts``, ``completions``,
          ``completion_ids``,         ``completion_ids`` and the columns;
          ``prompts``, or             ``trainer_state=None``, and ``log_extra`` and
          ``environments``            ``log_metric``, which do nothing
verl's    ``solution_str``            ``data_source``, ``solution_str``,
                                      ``ground_truth``, ``extra_info``; columns by name
========  ==========================  ===================================================
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
"""Arguments that exist for each response besides the columns of its row."""

Form = Literal["own", "trl", "verl"]
Arguments = dict[str, Any]


def _ignore(*args: Any, **kwargs: Any) -> None:
    """No-op for TRL's logging arguments; parts of a reward are logged anyway."""


def _own(facts: Arguments, columns: Arguments) -> tuple[Arguments, Arguments]:
    names = (*FACTS, *(facts.keys() & _OF_SOME))
    return columns | {name: facts[name] for name in names}, columns


def _trl(facts: Arguments, columns: Arguments) -> tuple[Arguments, Arguments]:
    chat = isinstance(columns.get(facts["prompt_column"]), list)
    lists: Arguments = {"answer": [facts["answer"]]}
    lists |= {name: [value] for name, value in columns.items() if name != "prompt"}
    lists |= {
        "prompts": [facts["prompt_messages"] if chat else facts["prompt"]],
        "completions": [facts["completion_messages"] if chat else facts["response"]],
        "completion_ids": [facts["tokens"]],
        "trainer_state": None,
        "log_extra": _ignore,
        "log_metric": _ignore,
    }
    lists |= {name: facts[name] for name in facts.keys() & _ENVIRONMENTS}
    lists |= {name: [facts[name]] for name in facts.keys() & _IMAGES}
    return lists, lists


def _verl(facts: Arguments, columns: Arguments) -> tuple[Arguments, Arguments]:
    model, extra = columns.get("reward_model"), columns.get("extra_info")
    truth = columns.get("ground_truth", facts["answer"])
    return columns | {
        "data_source": columns.get("data_source", facts["dataset"]),
        **dict.fromkeys(_VERL_RESPONSE_NAMES, facts["response"]),
        "ground_truth": model.get("ground_truth", truth) if isinstance(model, Mapping) else truth,
        "extra_info": columns if extra is None else extra,
    }, {}  # fmt: skip


# Each returns the arguments by name, and those for ``**kwargs``, from facts and columns.
_FORMS: dict[Form, Callable[[Arguments, Arguments], tuple[Arguments, Arguments]]] = {
    "own": _own,
    "trl": _trl,
    "verl": _verl,
}
_OWN_NAMES = set(FACTS) - {"answer"}
_TRL_NAMES = {"completions", "completion_ids", "prompts"}
_ENVIRONMENTS = {"environments"}
"""Argument if environments play the dialogs: a list of the response's environment."""
_IMAGES = {"images"}
"""Argument if problems have images: a list of PIL images."""
_OF_SOME = _ENVIRONMENTS | _IMAGES
_VERL_RESPONSE_NAMES = ("solution_str", "model_output", "predict_str")
_ABSENT = object()
_NOTHING: Arguments = dict.fromkeys(
    (*FACTS, "prompt_column", "prompt_messages", "completion_messages", "dataset")
)


class RewardFunction:
    """A reward function with its name and options.

    Args:
        function: function of any form.
        entry: its entry in the config.

    Attributes:
        name: name of the function in logs.
        form: form of its arguments.
        asynchronous: whether it is an ``async def``.

    Raises:
        ValueError: the function does not accept its options, or cannot be called with arguments by
            name.

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
                f"reward {self.name} must have a readable signature ({error}): wrap it in a `def`."
            ) from error
        by_name = {
            p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        self._names = set(by_name)
        self._needed = {key for key, p in by_name.items() if p.default is p.empty}
        self._takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        is_trl = _TRL_NAMES & set(by_name) or (
            _ENVIRONMENTS & set(by_name) and not _OWN_NAMES & set(by_name)
        )
        self.form: Form = (
            ("trl") if is_trl else "verl" if by_name.keys() & set(_VERL_RESPONSE_NAMES) else "own"
        )
        unknown = sorted(set(self.options) - self._names)
        if unknown and not self._takes_rest:
            keys = sorted({"name", "weight"} | self._names)
            close = difflib.get_close_matches(unknown[0], keys, 1)
            hint = f"did you mean {close[0]}?" if close else f"use some of {keys}."
            raise ValueError(
                f"reward {self.name} must accept its options, but it has no {', '.join(unknown)}: "
                f"{hint}"
            )
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ValueError(
                f"reward {self.name} must accept its arguments by name: remove the '/' from its "
                "parameters."
            )
        if self.form == "verl" and self._expected:
            raise ValueError(
                f"weight of reward {self.name} must be a number, because in verl's form only "
                "`score` is the reward: use 1."
            )

    @property
    def asynchronous(self) -> bool:
        function = inspect.unwrap(self.function)
        call = getattr(function, "__call__", None)  # noqa: B004  # an object's
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    def check(
        self,
        columns: Collection[str],
        has_answer: bool = True,
        has_environment: bool = False,
        has_images: bool = False,
    ) -> None:
        """Check that all arguments are columns or built-in arguments.

        Args:
            columns: columns of the data.
            has_answer: whether its problems have an answer.
            has_environment: whether environments play its dialogs.
            has_images: whether its problems have images.

        Raises:
            ValueError: some are neither.
        """
        facts = _NOTHING if has_answer else _NOTHING | {"answer": _ABSENT}
        facts = facts | (dict.fromkeys(_ENVIRONMENTS) if has_environment else {})
        facts = facts | (dict.fromkeys(_IMAGES) if has_images else {})
        arguments = _FORMS[self.form](facts, dict.fromkeys(columns))[0]
        known = {name for name, value in arguments.items() if value not in (_ABSENT, [_ABSENT])}
        if not self._takes_rest and not (self._names - set(self.options)) & known:
            raise ValueError(
                f"reward {self.name} must take something of a response, such as `response` or "
                f"`completions`, but its parameters are {sorted(self._names)}: if it returns a "
                f"reward function, call it in a file of your own, `my_{self.name} = "
                f"{self.name}(...)`, and use file.py:my_{self.name}."
            )
        missing = sorted(self._needed - set(self.options) - known)
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            fix = f"set it as an option, {{fn: ..., {missing[0]}: ...}}"
            if missing[0] in _IMAGES:
                fix = "name the column of the images as env.columns.images"
            raise ValueError(
                f"reward {self.name} needs {' and '.join(missing)}, which {verb} neither a column "
                f"nor a built-in argument: use some of these names: {', '.join(sorted(known))}; or "
                f"{fix}."
            )

    def call(self, facts: Arguments, columns: Arguments) -> Any:
        """Call the function; the result is an awaitable if it is asynchronous.

        Args:
            facts: ``FACTS``, ``prompt_column``, ``prompt_messages``, ``completion_messages`` and
                ``dataset``.
            columns: columns of the row.
        """
        by_name, rest = _FORMS[self.form](facts, columns)
        arguments = rest if self._takes_rest else {}
        arguments = arguments | {name: by_name[name] for name in by_name.keys() & self._names}
        return self.function(**arguments | self.options)

    @staticmethod
    def feedback(result: Any) -> str:
        """Return the text ``feedback`` of a result; empty without one."""
        text = result.get("feedback") if isinstance(result, Mapping) else None
        return text if isinstance(text, str) else ""

    def parts(self, result: Any) -> dict[str, float | None]:
        """Return the parts of a result by name; None for a part that does not apply.

        Raises:
            ValueError: the result is not a reward.
        """
        if self.form == "trl":
            try:
                (result,) = result
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"reward {self.name} must return a list with one reward for each completion, "
                    f"but for one completion it returned {type(result).__name__} ({error}): return "
                    "[reward]."
                ) from error
        elif self.form == "verl" and isinstance(result, tuple | list) and result:
            result = result[0]  # verl also takes the first of several
        if not isinstance(result, Mapping):
            result = {"": result}
        elif self.form == "verl":
            if "score" not in result:
                raise ValueError(
                    f"reward {self.name} must return a score, but its dict has {sorted(result)}: "
                    "add `score`."
                )
            score = result["score"]
            numbers = {key: value for key, value in result.items() if isinstance(value, Real)}
            numbers.pop("score", None)
            result = {"": score} | numbers
        if not self._expected <= set(result):
            raise ValueError(
                f"reward {self.name} must return the parts that have a weight, "
                f"{sorted(self._expected)}, but it returned {sorted(map(str, result))}: return "
                "None for a part that does not apply."
            )
        by_name = {
            (f"{self.name}/{key}") if key else self.name: value
            for key, value in result.items()
            if not (key == "feedback" and isinstance(value, str))
        }
        return {
            name: None if value is None else check_reward(value, f"reward {name}")
            for name, value in by_name.items()
        }

"""Reward functions: their arguments, and the interpretation of the result.

A function gets ``FACTS`` and the columns of its row by name, and only the columns as ``**kwargs``.
Group reward functions, and functions with the parameters of another library, are called in their own
form (``integrations/reward_forms.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.checks import check_reward, did_you_mean
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.rewards.spec import RewardEntry

FACTS = ("response", "prompt", "messages", "answer", "finish_reason", "tokens", "prefill")
"""Arguments that exist for each response besides the columns of its row."""

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """Calling convention of reward functions.

    Attributes:
        arguments: returns the arguments by name, and those for ``**kwargs``, from facts and columns.
        result: returns a number or parts by name, from the name of a reward and what it returned.
        split: only for group reward functions, whose facts have each response's facts as
            ``members``. Takes the name of a reward, what it returned and the number of responses,
            and returns one argument of ``result`` for each response.
    """

    arguments: Callable[[Arguments, Arguments], tuple[Arguments, Arguments]]
    result: Callable[[str, Any], Any]
    split: Callable[[str, Any, int], Sequence[Any]] | None = None


def _plain_arguments(facts: Arguments, columns: Arguments) -> tuple[Arguments, Arguments]:
    return columns | {name: facts[name] for name in facts.keys() & _ALL_FACTS}, columns


def plain_result(name: str, result: Any) -> Any:
    """Return a result that has the form of ours."""
    return result


_PLAIN = Form(_plain_arguments, plain_result)
FOREIGN_NAMES = {
    "completions",
    "completion_ids",
    "prompts",
    "solution_str",
    "model_output",
    "predict_str",
}
"""Parameters of other libraries' functions."""
ENVIRONMENTS = {"environments"}
"""Argument if environments play the dialogs: a list of the response's environment."""
IMAGES = {"images"}
"""Argument if problems have images: a list of PIL images."""
_ALL_FACTS = {*FACTS} | ENVIRONMENTS | IMAGES
_ABSENT = object()
_EMPTY_FACTS: Arguments = dict.fromkeys(
    (*FACTS, "prompt_column", "prompt_messages", "completion_messages", "dataset")
)


class RewardFunction:
    """A reward function with its name and options.

    A function may have an attribute ``check_options``: a function that takes the options by name and
    raises ``ValueError`` for a wrong one, before the run starts.

    Args:
        function: function of any form.
        entry: its entry in the config.

    Attributes:
        name: name of the function in logs.
        form: form of its arguments and results.
        asynchronous: whether it is an ``async def``.

    Raises:
        ValueError: the function does not accept its options or their values, or cannot be called with arguments by
            name.

    >>> def short(response, limit): return len(response) < limit
    >>> reward = RewardFunction(short, RewardEntry("my.py:short", "short", 1.0, {"limit": 3}))
    >>> reward.read(reward.call({**_EMPTY_FACTS, "response": "yes"}, {}))
    ({'short': 0.0}, '')
    """

    def __init__(self, function: Callable[..., Any], entry: RewardEntry) -> None:
        self.function = function
        self.name = entry.name
        self.options = dict(entry.options)
        self._weighted_parts = set(entry.weight) if isinstance(entry.weight, Mapping) else set()
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
        self._required_names = {key for key, p in by_name.items() if p.default is p.empty}
        self._takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        unknown = sorted(set(self.options) - self._names)
        if unknown and not self._takes_rest:
            keys = sorted({"name", "weight", "per"} | self._names)
            hint = did_you_mean(unknown[0], keys, f"use some of {keys}.")
            raise ValueError(
                f"reward {self.name} must accept its options, but it has no {', '.join(unknown)}: "
                f"{hint}"
            )
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ValueError(
                f"reward {self.name} must accept its arguments by name: remove the '/' from its "
                "parameters."
            )
        getattr(function, "check_options", dict)(**self.options)  # dict takes any
        self.form = _PLAIN
        per_group = entry.per == "group" or ("responses" in self._names and not entry.per)
        if (
            per_group
            or self._names & FOREIGN_NAMES
            or (self._names & ENVIRONMENTS and not self._names & {*FACTS} - {"answer"})
        ):
            self.form = load_extra("reward_form")(
                self.name, self._names, bool(self._weighted_parts), per_group
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
        facts = _EMPTY_FACTS if has_answer else _EMPTY_FACTS | {"answer": _ABSENT}
        facts = facts | (dict.fromkeys(ENVIRONMENTS) if has_environment else {})
        facts = facts | (dict.fromkeys(IMAGES) if has_images else {})
        facts = facts | {"members": [facts]}
        arguments = self.form.arguments(facts, dict.fromkeys(columns))[0]
        available = {name for name, value in arguments.items() if value not in (_ABSENT, [_ABSENT])}
        missing = sorted(self._required_names - set(self.options) - available)
        hint = load_extra("explain_arguments")(missing, sorted(available)) if missing else ""
        if not hint and not self._takes_rest and not (self._names - set(self.options)) & available:
            raise ValueError(
                f"reward {self.name} must have a parameter for a response, such as `response` or "
                f"`completions`, but its parameters are {sorted(self._names)}: if it returns a "
                f"reward function, call it in a file of your own, `my_{self.name} = "
                f"{self.name}(...)`, and use file.py:my_{self.name}."
            )
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            fix = hint or f"set it as an option, {{fn: ..., {missing[0]}: ...}}"
            if missing[0] in IMAGES:
                fix = "name the column of the images as env.columns.images"
            raise ValueError(
                f"reward {self.name} needs {' and '.join(missing)}, which {verb} neither a column "
                f"nor a built-in argument: use only these names: {', '.join(sorted(available))}; "
                f"or {fix}."
            )

    def call(self, facts: Arguments, columns: Arguments) -> Any:
        """Call the function; the result is an awaitable if it is asynchronous.

        Args:
            facts: ``FACTS``, ``prompt_column``, ``prompt_messages``, ``completion_messages`` and
                ``dataset``; for a group those of its first response, and all of them as
                ``members``.
            columns: columns of the row.
        """
        by_name, rest = self.form.arguments(facts, columns)
        arguments = rest if self._takes_rest else {}
        arguments = arguments | {name: by_name[name] for name in by_name.keys() & self._names}
        return self.function(**arguments | self.options)

    def read(self, result: Any) -> tuple[dict[str, float | None], str]:
        """Return the parts of a result by name, None for one that does not apply, and its text
        ``feedback``, empty without one.

        Raises:
            ValueError: the result is not a reward.
        """
        result = self.form.result(self.name, result)
        result = dict(result) if isinstance(result, Mapping) else {"": result}
        text = result.pop("feedback") if isinstance(result.get("feedback"), str) else ""
        if not self._weighted_parts <= set(result):
            raise ValueError(
                f"reward {self.name} must return the parts that have a weight, "
                f"{sorted(self._weighted_parts)}, but it returned {sorted(map(str, result))}: "
                "return None for a part that does not apply."
            )
        parts = {}
        for key, value in result.items():
            name = f"{self.name}/{key}" if key else self.name
            parts[name] = None if value is None else check_reward(value, f"reward {name}")
        return parts, text

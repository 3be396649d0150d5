"""Group reward functions and those of other libraries: their arguments and results.

========  ==========================  ===================================================
form      recognized by               arguments
========  ==========================  ===================================================
TRL's     ``completions``,            lists of one: ``prompts``, ``completions``,
          ``completion_ids``,         ``completion_ids`` and the columns;
          ``prompts``, or             ``trainer_state=None``, and ``log_extra`` and
          ``environments``            ``log_metric``, which do nothing
verl's    ``solution_str``            ``data_source``, ``solution_str``,
                                      ``ground_truth``, ``extra_info``; columns by name
group     ``responses``               ``responses``, ``messages``, ``finish_reason``,
                                      ``tokens`` and ``prefill`` as lists; ``prompt``,
                                      ``answer``, ``images``, and columns by name
========  ==========================  ===================================================

With ``per: group``, the lists in TRL's form hold all responses of the group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from itertools import chain
from numbers import Real
from typing import Any

from torchrl_grpo.rewards.forms import (
    ENVIRONMENTS,
    FOREIGN_NAMES,
    IMAGES,
    Arguments,
    Form,
    plain_result,
)

_RESPONSE_NAMES = ("solution_str", "model_output", "predict_str")
"""Names of the response in verl's functions."""


def reward_form(
    name: str, parameters: Collection[str], has_part_weights: bool, per_group: bool
) -> Form:
    """Return the form of a group reward function or of a function with another library's parameters.

    Args:
        name: name of the reward.
        parameters: names of all its parameters.
        has_part_weights: whether its parts have weights of their own.
        per_group: whether it compares the responses to a problem.

    Raises:
        ValueError: one of these is true, but the function has verl's form.
    """
    names = FOREIGN_NAMES & set(parameters)
    if per_group and names & set(_RESPONSE_NAMES):
        raise ValueError(
            f"per=group of reward {name} needs a function of several responses, but verl's form "
            "takes one response: use a function with the parameter `responses`."
        )
    if per_group:
        return _TRL_GROUP if names else _GROUP
    if not names or names - set(_RESPONSE_NAMES):
        return _TRL
    if has_part_weights:
        raise ValueError(
            f"weight of reward {name} must be a number, because in verl's form only "
            "`score` is the reward: use 1."
        )
    return _VERL


def _ignore(*args: Any, **kwargs: Any) -> None:
    """No-op for TRL's logging arguments; parts of a reward are logged anyway."""


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
    lists |= {name: facts[name] for name in facts.keys() & ENVIRONMENTS}
    lists |= {name: [facts[name]] for name in facts.keys() & IMAGES}
    return lists, lists


class _Members(list[Any]):
    """List with an entry for each response. In another order, it would give rewards to the wrong ones."""

    def __init__(self, entries: Iterable[Any]) -> None:
        super().__init__(entries)
        self._entries = [*self]

    def sort(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "lists of a group reward function must keep their order, which is that of its rewards: "
            "use sorted(), reversed() or random.sample(), which leave a list as it is."
        )

    def reverse(self) -> None:
        self.sort()

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        is_reordered = sorted(map(id, self)) == sorted(map(id, self._entries))
        if is_reordered and self != self._entries:
            self.sort()

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([*self],)  # a copy may have any order


def _trl_group(facts: Arguments, columns: Arguments) -> tuple[Arguments, Arguments]:
    each = [_trl(member, columns)[0] for member in facts["members"]]
    lists = {
        name: _Members(chain(*(of_one[name] for of_one in each)))
        if isinstance(value, list)
        else value
        for name, value in each[0].items()
    }
    return lists, lists


def _group(facts: Arguments, columns: Arguments) -> tuple[Arguments, Arguments]:
    names = {name: name for name in ("messages", "finish_reason", "tokens", "prefill")}
    lists = {
        new: _Members(member[name] for member in facts["members"])
        for new, name in {**names, "responses": "response"}.items()
    }
    shared = {name: facts[name] for name in facts.keys() & {"prompt", "answer", *IMAGES}}
    return columns | shared | lists, columns


_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Types that can be iterated over, but are not in the order of the responses, or have no rewards."""


def _split(name: str, result: Any, size: int) -> list[Any]:
    entries = list(result) if hasattr(result, "__iter__") else []
    if isinstance(result, _NO_LISTS) or len(entries) != size:
        raise ValueError(
            f"reward {name} must return a list with a reward for each of {size} responses, but it "
            f"returned {result!r:.200}: use None where none applies."
        )
    return entries


def _verl(facts: Arguments, columns: Arguments) -> tuple[Arguments, Arguments]:
    model, extra = columns.get("reward_model"), columns.get("extra_info")
    truth = columns.get("ground_truth", facts["answer"])
    return columns | {
        "data_source": columns.get("data_source", facts["dataset"]),
        **dict.fromkeys(_RESPONSE_NAMES, facts["response"]),
        "ground_truth": model.get("ground_truth", truth) if isinstance(model, Mapping) else truth,
        "extra_info": columns if extra is None else extra,
    }, {}  # fmt: skip


def _trl_result(name: str, result: Any) -> Any:
    try:
        (reward,) = result
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward {name} must return a list with one reward for each completion, "
            f"but for one completion it returned {type(result).__name__} ({error}): return "
            "[reward]."
        ) from error
    return reward


def _verl_result(name: str, result: Any) -> Any:
    if isinstance(result, tuple | list) and result:
        result = result[0]  # verl also takes the first of several
    if not isinstance(result, Mapping):
        return result
    if "score" not in result:
        raise ValueError(
            f"reward {name} must return a score, but its dict has {sorted(result)}: add `score`."
        )
    rest = {
        key: value
        for key, value in result.items()
        if isinstance(value, Real) or (key == "feedback" and isinstance(value, str))
    }
    rest.pop("score", None)
    return {"": result["score"]} | rest


_TRL = Form(_trl, _trl_result)
_VERL = Form(_verl, _verl_result)
_GROUP = Form(_group, plain_result, _split)
_TRL_GROUP = Form(_trl_group, plain_result, _split)

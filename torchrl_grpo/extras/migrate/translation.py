"""Translates another library's settings into overrides of ``config/grpo_gsm8k.yaml``, with notes on
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo.extras.migrate.problems import problems
from torchrl_grpo.extras.migrate.readers import Settings
from torchrl_grpo.extras.migrate.scripts import Unknown
from torchrl_grpo.extras.migrate.sizes import SETTLES, SIZES, sizes
from torchrl_grpo.extras.migrate.tables import BASE, SET_ME, Row, Table
from torchrl_grpo.generation.engines import engines_with


@dataclass
class Translation:
    """Translation of a file into our keys.

    Attributes:
        table: of the peer whose file it is.
        asynchronous: whether it is a run of ``grpo-async.py``.
        overrides: our keys with their values, those that are so anyway left out but for model and
            data.
        unset: our keys that are to be set by hand, because the file does not tell their values.
        differs: what means something else, by key.
        lacks: what has no counterpart, by key.
        ignored: keys that ask for nothing here, by why they do not.
        unknown: keys that the table has not.
    """

    table: Table
    asynchronous: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)
    unset: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def translate(settings: Settings, source: str, devices: int | None = None) -> Translation:
    """The same run here.

    Args:
        settings: of a peer's file.
        source: the file, for functions that are defined in it.
        devices: processes of the peer's run, where its file does not say how many.
    """
    table, values = settings.table, settings.values
    made = Translation(table)
    ours: dict[str, Any] = {key: _plain(value) for key, value in table.always.items()}
    asked: dict[str, Any] = {}
    rows = table.rows
    for key, row in rows.items():
        if row.null and key in values and values[key] is None:
            made.unset[row.null] = (
                f"{key} is null, which is no bound: the most tokens of a response"
            )
        elif (
            not _given(key, row, values) and row.default is not None and _counts(row, table, values)
        ):
            _apply(key, row, _plain(row.default), ours, asked, made)
    if devices is not None:
        asked["devices"] = devices
    for key, value in values.items():
        if key in rows:
            continue
        if key.startswith("**"):
            made.unset[key] = (
                "may set any of their keys, and only running the file would tell which"
            )
        elif (why := table.ignores(key)) is not None:
            made.ignored.setdefault(why, []).append(key)
        elif value is not None and value != {}:
            made.unknown.append(key)
    for key, row in rows.items():
        if _given(key, row, values):
            if _counts(row, table, values):
                value = True if row.table else values[key]
                taken = _apply(key, row, value, ours, asked, made)
                if taken and (difference := _difference(row, value, table, values)):
                    made.differs[key] = difference
            else:
                made.ignored.setdefault("read with other settings alone", []).append(key)
    differs, lacks, unset = made.differs.setdefault, made.lacks.setdefault, made.unset.setdefault
    if ours.get("model.name") is None:
        unset("model.name", "the model is not in the file")
    if "divergence" in asked and not asked.get("teacher"):
        unset("teacher.model", "the teacher is not in the file")
    if ours.get("algo") == "sft" and not {"env.columns.completion", "env.columns.messages"} & set(
        ours
    ):
        unset(
            "env.columns.completion",
            "the column with the response, or env.columns.messages=COLUMN of whole chats",
        )
    ours |= sizes(asked, {**BASE, **ours}, differs, lacks, unset)
    scored = ours.get("algo") != "sft" or ours.get("evaluation.num_prompts") != 0
    ours |= problems(asked, source, differs, unset, scored=scored)
    made.asynchronous = bool(ours.get("train.max_staleness"))
    if table.title == "TorchRL" and not _is_synchronous(asked, values):
        made.asynchronous = True
        made.differs["train.max_staleness"] = (
            "TorchRL's asynchronous script has no bound; ours is 1 unless it is given"
        )
    if "env.num_envs" in made.unset:
        for key in (key for key in SIZES if ours.get(key) is not None):
            unset(key, "depends on env.num_envs")
    ours |= {key: SET_ME for key in made.unset if ours.get(key) is None}
    _tidy(ours)
    for key in [key for key in made.unset if key in BASE]:
        if key not in ours:
            made.lacks[key] = f"{made.unset.pop(key)}; nothing reads it beside the other settings"
        elif SET_ME not in str(ours[key]):
            ours[key] = SET_ME
    made.overrides = {
        key: ours[key]
        for key in BASE
        if key in ours and (ours[key] != BASE[key] or key in ("model.name", "env.dataset"))
    }
    return made


def _given(key: str, row: Row, values: Mapping[str, Any]) -> bool:
    if row.table:
        return values.get(key) is not None or any(name.startswith(f"{key}.") for name in values)
    return values.get(key) not in (None, {})


def _plain(value: Any) -> Any:
    return None if value == "null" else value


def _counts(row: Row, table: Table, values: Mapping[str, Any]) -> bool:
    """Whether the keys that a row depends on have the required values."""
    return all(
        _is_so(condition, table, values)
        for condition in (row.when, row.also_when)
        if condition is not None
    )


def _is_so(condition: str, table: Table, values: Mapping[str, Any]) -> bool:
    name, _, wanted = condition.partition("=")
    key = name.removesuffix("!")
    other = table.rows[key]
    value = _given(key, other, values) if other.table else values.get(key, other.default)
    return (str(value) in wanted.split(",")) is (key == name) if wanted else bool(value)


def _difference(row: Row, value: Any, table: Table, values: Mapping[str, Any]) -> str | None:
    """What a value means there and not here, where that concerns this file."""
    if row.said_when is not None and not _is_so(row.said_when, table, values):
        return None
    if isinstance(row.differs, Mapping):
        return row.differs.get(_name(value))
    return row.differs if value else None


def _apply(
    key: str, row: Row, value: Any, ours: dict[str, Any], asked: dict[str, Any], made: Translation
) -> bool:
    """Apply a row to a value; return whether there is an equivalent."""
    if any(type(value) is type(one) and value == one for one in row.same) or _number_in(
        value, row.same
    ):
        return False
    if _is_unknown(value):
        return _leave(key, row, value, ours, asked, made)
    if _is_number(row.default) and isinstance(value, str | list):
        made.lacks[key] = f"{value} is no number, {row.default:g} is taken"
        value = row.default
    if row.values is not None:
        name, taken = _name(value), _name(row.default)
        if name not in row.values:
            known = taken in row.values
            made.lacks[key] = f"{name} has no counterpart; there are {', '.join(row.values)}"
            made.lacks[key] += f", and {taken if known else 'our own default'} is taken"
            made.lacks[key] += f": {row.none}" if row.none else ""
            return known and _apply(key, row, row.default, ours, asked, made)
        value = row.values[name]
    elif row.ours is None:
        made.lacks[key] = f"{row.none}"
        return False
    else:
        value = _as_ours(row, value)
        if isinstance(value, list) and not isinstance(BASE.get(row.ours, value), list):
            made.lacks[key] = f"[{', '.join(map(str, value))}] are several, {row.ours} is one"
            return False
    for name, one in (
        value if row.values and isinstance(value, Mapping) else {str(row.ours): value}
    ).items():
        (asked if name.startswith("@") else ours)[name.removeprefix("@")] = one
    return True


def _name(value: Any) -> str:
    """A value as the tables write it among a row's choices."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_unknown(value: Any) -> bool:
    return isinstance(value, Unknown) or (
        isinstance(value, Mapping) and any(map(_is_unknown, value.values()))
    )


def _leave(
    key: str, row: Row, value: Any, ours: dict[str, Any], asked: dict[str, Any], made: Translation
) -> bool:
    """Mark the equivalents of an unknown value as to be set by hand; return whether there are any."""
    settled = (
        SETTLES[row.ours[1:]] if row.ours is not None and row.ours.startswith("@") else (row.ours,)
    )
    several = [
        name for one in (row.values or {}).values() if isinstance(one, Mapping) for name in one
    ]
    named = list(dict.fromkeys(name for name in (*settled, *several) if name and name[0] != "@"))
    if not named:
        made.lacks[key] = f"{row.none}"
        return False
    if row.default is not None:
        _apply(key, row, _plain(row.default), ours, asked, made)
    for name in named:
        why = f"{key} is {value}, which only running the file would tell"
        made.unset[name] = f"{made.unset[name]}; {why}" if name in made.unset else why
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_in(value: Any, same: tuple[Any, ...]) -> bool:
    """Whether a number is one of those, 1 being 1.0."""
    return _is_number(value) and value in [one for one in same if _is_number(one)]


def _as_ours(row: Row, value: Any) -> Any:
    if row.list and not isinstance(value, list):
        return [value]
    whole = (
        isinstance(BASE.get(str(row.ours)), int) and isinstance(value, float) and value.is_integer()
    )
    return int(value) if whole else value


def _is_synchronous(asked: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether a file of TorchRL's is for its synchronous script: ``train.sync``, or ``mode: sync``
    in the defaults.
    """
    modes = [one.get("mode") for one in values.get("defaults") or [] if isinstance(one, dict)]
    return bool(asked.get("synchronous", "sync" in modes))


def _tidy(ours: dict[str, Any]) -> None:
    """Remove settings that nothing would read, which our config refuses, and those that exclude
    each other.
    """
    if ours.get("env.dataset") is None:
        ours.pop("env.dataset", None)
    if ours.get("env.datasets") and (prompt := ours.pop("env.columns.prompt", None)):
        ours["env.datasets"] = [
            {**one, "columns": {"prompt": prompt}} for one in ours["env.datasets"]
        ]
    if ours.get("algo") != "sft":
        ours.pop("env.columns.completion", None)
    if ours.get("env.columns.messages"):
        ours.pop("env.columns.completion", None)
        ours.pop("env.columns.prompt", None)
    if ours.get("policy.teacher_divergence") != "jsd":
        ours.pop("policy.teacher_beta", None)
    if ours.get("algo", "grpo") != "grpo":
        ours.pop("ref_model.dtype", None)
    if not ours.get("train_model.lora.enabled"):
        for name in ("r", "alpha", "target_modules"):
            ours.pop(f"train_model.lora.{name}", None)
    if ours.get("policy.behaviour_weight", "none") == "none":
        ours.pop("policy.behaviour_level", None)
        ours.pop("policy.behaviour_cap", None)
    if ours.get("policy.aggregation") != "constant":
        ours.pop("policy.constant_length", None)
    if ours.get("policy.advantage_level") != "token":
        ours.pop("policy.gae_gamma", None)
        ours.pop("policy.gae_lambda", None)
    if not ours.get("policy.kl_coef", BASE["policy.kl_coef"]):
        ours.pop("policy.kl_in_reward", None)
        if not ours.get("policy.kl_to_behaviour_coef"):
            ours.pop("policy.kl_estimator", None)
    if ours.get("policy.kl_estimator") == ("k1" if ours.get("policy.kl_in_reward") else "k3"):
        ours.pop("policy.kl_estimator")
    unread = [] if ours.get("evaluation.k", 1) else ["temperature"]
    for name in (
        unread if ours.get("evaluation.num_prompts", 1) else ("frequency", "k", "temperature")
    ):
        ours.pop(f"evaluation.{name}", None)
    if not ours.get("policy.kl_coef", BASE["policy.kl_coef"]) or ours.get(
        "train_model.lora.enabled"
    ):
        ours.pop("ref_model.num_devices", None)
    if "logging.wandb.mode" not in ours:
        for name in ("project", "name", "entity", "group", "tags"):
            ours.pop(f"logging.wandb.{name}", None)
    if ours.get("inference_model.backend", BASE["inference_model.backend"]) not in engines_with(
        "tensor_parallel"
    ):
        ours.pop("inference_model.tensor_parallel_size", None)
    rounds = ours.get("policy.max_sampling_rounds", 10)
    rows = ours.get("env.num_envs", 1) * rounds if rounds != SET_ME else math.inf
    if (
        ours.get("policy.dynamic_sampling")
        and (ours.get("train.dialog_turns_per_batch") or 0) > rows
    ):
        ours.pop("policy.max_sampling_rounds", None)

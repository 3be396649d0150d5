"""Translates another library's settings into overrides of ``config/grpo_gsm8k.yaml``, with notes on
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo.engines import engines_with
from torchrl_grpo.extras.migrate.problems import problems
from torchrl_grpo.extras.migrate.readers import Settings
from torchrl_grpo.extras.migrate.scripts import Unknown
from torchrl_grpo.extras.migrate.sizes import SIZES, sizes
from torchrl_grpo.extras.migrate.tables import BASE, SET_ME, Row, Table
from torchrl_grpo.extras.peers import DETERMINES


@dataclass
class Translation:
    """Translation of a file into our keys.

    Attributes:
        table: table of the peer.
        asynchronous: whether the run needs ``grpo-async.py``.
        overrides: our keys with their values, without those that equal the default, except model
            and data.
        unset: our keys to set by hand, because the file does not contain their values.
        differs: differences in meaning, by key.
        lacks: notes on keys without an equivalent.
        ignored: keys without an effect here, by reason.
        unknown: keys that are not in the table.
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
    """Translate a peer's settings.

    Args:
        settings: settings of a peer's file.
        source: the file, for functions that are defined in it.
        devices: number of processes of the peer's run, if its file does not contain it.
    """
    table = settings.table
    values = settings.values
    result = Translation(table)
    ours: dict[str, Any] = {key: _plain(value) for key, value in table.always.items()}
    quantities: dict[str, Any] = {}
    rows = table.rows
    for key, row in rows.items():
        if row.null and key in values and values[key] is None:
            result.unset[row.null] = (
                f"{key} is null, which is no bound: the most tokens of a response"
            )
        elif (
            not _is_given(key, row, values)
            and row.default is not None
            and _applies(row, table, values)
        ):
            _apply(key, row, _plain(row.default), ours, quantities, result)
    if devices is not None:
        quantities["devices"] = devices
    for key, value in values.items():
        if key in rows:
            continue
        if key.startswith("**"):
            result.unset[key] = "may set any of their keys, which only running the file would show"
        elif (why := table.ignores(key)) is not None:
            result.ignored.setdefault(why, []).append(key)
        elif value is not None and value != {}:
            result.unknown.append(key)
    for key, row in rows.items():
        if _is_given(key, row, values):
            if _applies(row, table, values):
                value = True if row.table else values[key]
                applied = _apply(key, row, value, ours, quantities, result)
                if applied and (difference := _difference(row, value, table, values)):
                    result.differs[key] = difference
            else:
                result.ignored.setdefault("read only with other settings", []).append(key)
    differs, lacks, unset = (
        result.differs.setdefault,
        result.lacks.setdefault,
        result.unset.setdefault,
    )
    if ours.get("model.name") is None:
        unset("model.name", "the model is not in the file")
    if ours.get("teacher.model") == "policy" and not ours.get("teacher.prompt"):
        unset("teacher.prompt", "the function that shows the teacher what the policy does not see")
    elif (
        ("divergence" in quantities or ours.get("algo") == "distill")
        and not ours.get("teacher.model")
        and not quantities.get("teacher")
    ):
        unset("teacher.model", "the teacher is not in the file")
    if ours.get("algo") == "sft" and not {"env.columns.completion", "env.columns.messages"} & set(
        ours
    ):
        unset(
            "env.columns.completion",
            "the column with the response, or env.columns.messages=COLUMN of whole chats",
        )
    if not ours.get("inference_model.top_k"):
        for key in ("inference_model.top_p", "inference_model.min_p"):
            if ours.get(key, BASE[key]) != BASE[key]:
                ours["inference_model.top_k"] = 100
                differs(
                    key, "is a choice among the 100 most likely tokens here, which top_k bounds"
                )
    ours |= sizes(quantities, {**BASE, **ours}, differs, lacks, unset)
    scored = ours.get("algo") != "sft" or ours.get("evaluation.num_prompts") != 0
    ours |= problems(quantities, source, differs, unset, scored=scored)
    result.asynchronous = bool(ours.get("train.max_staleness"))
    if table.title == "TorchRL" and not _is_synchronous(quantities, values):
        result.asynchronous = True
        result.differs["train.max_staleness"] = (
            "TorchRL's asynchronous script has no bound; ours is 1 unless it is given"
        )
    if "env.num_envs" in result.unset:
        for key in (key for key in SIZES if ours.get(key) is not None):
            unset(key, "depends on env.num_envs")
    ours |= {key: SET_ME for key in result.unset if ours.get(key) is None}
    _tidy(ours)
    for key in [key for key in result.unset if key in BASE]:
        if key not in ours:
            result.lacks[key] = f"{result.unset.pop(key)}; nothing reads it with the other settings"
        elif SET_ME not in str(ours[key]):
            ours[key] = SET_ME
    result.overrides = {
        key: ours[key]
        for key in BASE
        if key in ours and (ours[key] != BASE[key] or key in ("model.name", "env.dataset"))
    }
    return result


def _is_given(key: str, row: Row, values: Mapping[str, Any]) -> bool:
    if row.table:
        return values.get(key) is not None or any(name.startswith(f"{key}.") for name in values)
    return values.get(key) not in (None, {})


def _plain(value: Any) -> Any:
    return None if value == "null" else value


def _applies(row: Row, table: Table, values: Mapping[str, Any]) -> bool:
    """Return whether the keys that a row depends on have the required values."""
    return all(
        _holds(condition, table, values)
        for condition in (row.when, row.also_when)
        if condition is not None
    )


def _holds(condition: str, table: Table, values: Mapping[str, Any]) -> bool:
    name, _, expected = condition.partition("=")
    key = name.removesuffix("!")
    other = table.rows[key]
    value = _is_given(key, other, values) if other.table else values.get(key, other.default)
    return (str(value) in expected.split(",")) is (key == name) if expected else bool(value)


def _difference(row: Row, value: Any, table: Table, values: Mapping[str, Any]) -> str | None:
    """Return the difference in the meaning of a value, if it concerns this file."""
    if row.said_when is not None and not _holds(row.said_when, table, values):
        return None
    if isinstance(row.differs, Mapping):
        return row.differs.get(_name(value))
    return row.differs if value else None


def _apply(
    key: str,
    row: Row,
    value: Any,
    ours: dict[str, Any],
    quantities: dict[str, Any],
    result: Translation,
) -> bool:
    """Apply a row to a value; return whether there is an equivalent."""
    is_same = any(type(value) is type(other) and value == other for other in row.same)
    if is_same or _number_in(value, row.same):
        return False
    if _is_unknown(value):
        return _mark_unset(key, row, value, ours, quantities, result)
    if _is_number(row.default) and isinstance(value, str | list):
        result.lacks[key] = f"{value} is not a number; {row.default:g} is used"
        value = row.default
    if row.values is not None:
        name = _name(value)
        default = _name(row.default)
        if name not in row.values:
            has_default = default in row.values
            used = default if has_default else "our own default"
            note = f"{name} has no equivalent among {', '.join(row.values)}; {used} is used"
            result.lacks[key] = f"{note}: {row.none}" if row.none else note
            return has_default and _apply(key, row, row.default, ours, quantities, result)
        value = row.values[name]
    elif row.ours is None:
        result.lacks[key] = f"{row.none}"
        return False
    else:
        value = _as_ours(row, value)
        if isinstance(value, list) and not isinstance(BASE.get(row.ours, value), list):
            result.lacks[key] = (
                f"[{', '.join(map(str, value))}] are several values, but {row.ours} is a single one"
            )
            return False
    is_several = row.values and isinstance(value, Mapping)
    for name, entry in (value if is_several else {str(row.ours): value}).items():
        target = quantities if name.startswith("@") else ours
        target[name.removeprefix("@")] = entry
    return True


def _name(value: Any) -> str:
    """Return a value as it is written in a row's choices."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_unknown(value: Any) -> bool:
    return isinstance(value, Unknown) or (
        isinstance(value, Mapping) and any(map(_is_unknown, value.values()))
    )


def _mark_unset(
    key: str,
    row: Row,
    value: Any,
    ours: dict[str, Any],
    quantities: dict[str, Any],
    result: Translation,
) -> bool:
    """Mark the equivalents of an unknown value as unset; return whether there are any."""
    keys: tuple[str | None, ...] = (row.ours,)
    if row.ours is not None and row.ours.startswith("@"):
        keys = DETERMINES[row.ours[1:]]
    nested = [choice for choice in (row.values or {}).values() if isinstance(choice, Mapping)]
    candidates = (*keys, *(name for choice in nested for name in choice))
    names = list(dict.fromkeys(name for name in candidates if name and name[0] != "@"))
    if not names:
        result.lacks[key] = f"{row.none}"
        return False
    if row.default is not None:
        _apply(key, row, _plain(row.default), ours, quantities, result)
    for name in names:
        why = f"{key} is {value}, which only running the file would reveal"
        result.unset[name] = f"{result.unset[name]}; {why}" if name in result.unset else why
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_in(value: Any, same: tuple[Any, ...]) -> bool:
    """Return whether a number is among others, where 1 equals 1.0."""
    return _is_number(value) and value in filter(_is_number, same)


def _as_ours(row: Row, value: Any) -> Any:
    if row.list and not isinstance(value, list):
        return [value]
    is_integer = isinstance(value, float) and value.is_integer()
    return int(value) if is_integer and isinstance(BASE.get(str(row.ours)), int) else value


def _is_synchronous(quantities: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return whether TorchRL's file is for its synchronous script: ``train.sync``, or ``mode:
    sync`` in the defaults.
    """
    defaults = values.get("defaults") or []
    modes = [entry.get("mode") for entry in defaults if isinstance(entry, dict)]
    return bool(quantities.get("synchronous", "sync" in modes))


def _tidy(ours: dict[str, Any]) -> None:
    """Remove settings that our config refuses, because they are unused or exclude each other."""
    if ours.get("env.dataset") is None:
        ours.pop("env.dataset", None)
    if ours.get("env.datasets") and (prompt := ours.pop("env.columns.prompt", None)):
        ours["env.datasets"] = [
            {**entry, "columns": {"prompt": prompt}} for entry in ours["env.datasets"]
        ]
    if ours.get("algo") != "sft" and not ours.get("teacher.prompt"):
        ours.pop("env.columns.completion", None)
    if ours.get("teacher.weights") != "ema":
        ours.pop("teacher.decay", None)
    if not (ours.get("ref_model.refresh_every") and ours.get("policy.kl_coef", 1)):
        ours.pop("ref_model.decay", None)
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
        ours.pop("policy.behaviour_floor", None)
    if ours.get("policy.aggregation") != "constant":
        ours.pop("policy.constant_length", None)
    if ours.get("policy.advantage_level") != "token":
        ours.pop("policy.gae_gamma", None)
        ours.pop("policy.gae_lambda", None)
    if not ours.get("policy.kl_coef", BASE["policy.kl_coef"]):
        ours.pop("policy.kl_in_reward", None)
        ours.pop("policy.kl_bias_correction", None)
        if not ours.get("policy.kl_to_behaviour_coef"):
            ours.pop("policy.kl_estimator", None)
    if ours.get("policy.kl_estimator") == ("k1" if ours.get("policy.kl_in_reward") else "k3"):
        ours.pop("policy.kl_estimator")
    of_samples = ("temperature", "top_p", "top_k", "min_p")
    unread = () if ours.get("evaluation.k", 1) else of_samples
    for name in (
        unread if ours.get("evaluation.num_prompts", 1) else ("frequency", "k", *of_samples)
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

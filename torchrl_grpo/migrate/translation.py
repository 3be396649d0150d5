"""A peer's settings in our words: overrides of ``config/grpo_gsm8k.yaml``, and what is to be said about the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo.migrate.problems import problems
from torchrl_grpo.migrate.readers import Settings
from torchrl_grpo.migrate.sizes import sizes
from torchrl_grpo.migrate.tables import BASE, Row, Table


@dataclass
class Translation:
    """What a file says, in our words.

    Attributes:
        table: of the peer whose file it is.
        asynchronous: whether it is a run of ``grpo-async.py``.
        overrides: our keys with their values, those that are so anyway left out.
        differs: what means something else, by key.
        lacks: what has no counterpart, by key.
        ignored: keys about the peer's own machinery.
        unknown: keys that the table has not.
    """

    table: Table
    asynchronous: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
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
    asked: dict[str, Any] = {} if devices is None else {"devices": devices}
    rows = table.rows
    for key, row in rows.items():
        if not _given(key, row, values) and row.default is not None and _counts(row, table, values):
            _apply(key, row, _plain(row.default), ours, asked, made)
    for key in values:
        if key not in rows:
            (made.ignored if table.ignores(key) else made.unknown).append(key)
    for key, row in rows.items():
        if _given(key, row, values):
            if _counts(row, table, values):
                value = True if row.table else values[key]
                taken = _apply(key, row, value, ours, asked, made)
                if taken and row.differs and _is_said(row, value, table, values):
                    made.differs[key] = row.differs
            else:
                made.ignored.append(key)
    differs, lacks = made.differs.setdefault, made.lacks.setdefault
    ours |= sizes(asked, {**BASE, **ours}, differs, lacks)
    ours |= problems(asked, source, differs, lacks)
    made.asynchronous = bool(ours.get("train.max_staleness"))
    if table.title == "TorchRL" and not _is_synchronous(asked, values):
        made.asynchronous = True
        made.differs["train.max_staleness"] = "TorchRL's asynchronous script has no bound; ours is 1 unless it is given"
    _tidy(ours)
    made.overrides = {key: ours[key] for key in BASE if key in ours and ours[key] != BASE[key]}
    return made


def _given(key: str, row: Row, values: Mapping[str, Any]) -> bool:
    if row.table:
        return any(name == key or name.startswith(f"{key}.") for name in values)
    return values.get(key) is not None


def _plain(value: Any) -> Any:
    return None if value == "null" else value


def _counts(row: Row, table: Table, values: Mapping[str, Any]) -> bool:
    """Whether the keys that a row depends on are as it asks."""
    return all(_is_so(condition, table, values) for condition in (row.when, row.also_when) if condition is not None)


def _is_so(condition: str, table: Table, values: Mapping[str, Any]) -> bool:
    key, _, wanted = condition.partition("=")
    other = table.rows[key]
    value = _given(key, other, values) if other.table else values.get(key, other.default)
    return str(value) == wanted if wanted else bool(value)


def _is_said(row: Row, value: Any, table: Table, values: Mapping[str, Any]) -> bool:
    """Whether what a row says of a difference concerns this file."""
    concerns = value in row.said_for if row.said_for else bool(value)
    return concerns and (row.said_when is None or _is_so(row.said_when, table, values))


def _apply(key: str, row: Row, value: Any, ours: dict[str, Any], asked: dict[str, Any], made: Translation) -> bool:
    """Takes what a row makes of a value, and returns whether there is something of ours for it."""
    if any(type(value) is type(one) and value == one for one in row.same) or _number_in(value, row.same):
        return False
    if isinstance(value, str) and value.startswith("$") and "/" not in value:
        made.lacks[key] = "its value is not in the file: only running it would tell"
        return row.default is not None and _apply(key, row, _plain(row.default), ours, asked, made)
    if _is_number(row.default) and isinstance(value, str):
        made.lacks[key] = f"{value} is no number, {row.default:g} is taken"
        value = row.default
    if row.values is not None:
        name = str(value).lower() if isinstance(value, bool) else str(value)
        if name not in row.values:
            made.lacks[key] = f"{name} has no counterpart; there are {', '.join(row.values)}"
            return value != row.default and row.default is not None and _apply(key, row, row.default, ours, asked, made)
        value = row.values[name]
        ours |= value if isinstance(value, Mapping) else {str(row.ours): value}
    elif row.ours is None:
        made.lacks[key] = f"{row.none}"
        return False
    elif row.ours.startswith("@"):
        asked[row.ours[1:]] = value
    else:
        ours[row.ours] = _as_ours(row, value)
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_in(value: Any, same: tuple[Any, ...]) -> bool:
    """Whether a number is one of those, 1 being 1.0."""
    return _is_number(value) and value in [one for one in same if _is_number(one)]


def _as_ours(row: Row, value: Any) -> Any:
    if row.list and not isinstance(value, list):
        return [value]
    whole = isinstance(BASE[str(row.ours)], int) and isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _is_synchronous(asked: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether a file of TorchRL's is for its synchronous script: ``train.sync``, or ``mode: sync`` in the defaults."""
    modes = [one.get("mode") for one in values.get("defaults") or [] if isinstance(one, dict)]
    return bool(asked.get("synchronous", "sync" in modes))


def _tidy(ours: dict[str, Any]) -> None:
    """Takes out what nothing would read, which our config refuses, and what it excludes."""
    if ours.get("env.dataset") is None:
        ours.pop("env.dataset", None)
    if ours.get("env.datasets") and (prompt := ours.pop("env.columns.prompt", None)):
        ours["env.datasets"] = [{**one, "columns": {"prompt": prompt}} for one in ours["env.datasets"]]
    if not ours.get("train_model.lora.enabled"):
        for name in ("r", "alpha", "target_modules"):
            ours.pop(f"train_model.lora.{name}", None)
    if ours.get("policy.behaviour_weight", "none") == "none":
        ours.pop("policy.behaviour_level", None)
        ours.pop("policy.behaviour_cap", None)
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
    for name in unread if ours.get("evaluation.num_prompts", 1) else ("frequency", "k", "temperature"):
        ours.pop(f"evaluation.{name}", None)
    if not ours.get("policy.kl_coef", BASE["policy.kl_coef"]) or ours.get("train_model.lora.enabled"):
        ours.pop("ref_model.num_devices", None)
    if "logging.wandb.mode" not in ours:
        for name in ("project", "name", "entity", "group", "tags"):
            ours.pop(f"logging.wandb.{name}", None)
    if ours.get("inference_model.backend", "vllm") != "vllm":
        ours.pop("inference_model.tensor_parallel_size", None)
    rows = ours.get("env.num_envs", 1) * ours.get("policy.max_sampling_rounds", 10)
    if ours.get("policy.dynamic_sampling") and (ours.get("train.dialog_turns_per_batch") or 0) > rows:
        ours.pop("policy.max_sampling_rounds", None)

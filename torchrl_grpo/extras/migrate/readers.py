"""Reads a file into flat settings, ``{"actor.optimizer.lr": 1e-6}``, without running it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from torchrl_grpo.extras.migrate.scripts import Unknown, read_python, read_shell
from torchrl_grpo.extras.migrate.tables import NAMES, TRL, Table, read_table
from torchrl_grpo.host.trees import dotted

_OTHERS = {
    "OpenRLHF": r"openrlhf\.cli",
    "NeMo-RL": r"nemo_rl|num_prompts_per_step|^(grpo|policy):",
    "SkyRL": r"skyrl|trainer\.policy\.model\.path",
    "slime": r"--rollout-batch-size|--actor-num-gpus-per-node",
}
"""What only files of libraries that are not read have, by their names."""
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_REFERENCE = re.compile(r"\$\{(?:oc\.(select|env):)?\s*([\w.]+)\s*(?:,([^${}]*))?\}")


@dataclass(frozen=True)
class Settings:
    """Contents of a peer's file.

    Attributes:
        table: of the peer.
        values: by its dotted keys.
    """

    table: Table
    values: Mapping[str, Any]


def read(path: Path) -> Settings:
    """Read a file, and tell which library it belongs to.

    Raises:
        ValueError: there is no such file, it is broken, or it is none of the five peers', whose
            name is said if known.
    """
    if not path.is_file():
        raise ValueError(
            f"FILE={path} must be a file, but it does not exist: give the path of a script or a "
            "config."
        )
    try:
        text = path.read_text(encoding="utf-8")
        data = _parse(path.suffix.lower(), text)
    except (yaml.YAMLError, ValueError, SyntaxError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"FILE={path} must be whole {path.suffix or 'yaml'}, and it is not: {why}."
        ) from error
    for name, sign in _OTHERS.items():
        if match := re.search(sign, text, re.MULTILINE):
            raise ValueError(
                f"FILE={path} must be a config of one of five libraries, and with {match[0]} it is "
                f"one of {name}, which is not read: docs/migrate.md names the five."
            )
    values = _flat(data) if isinstance(data, Mapping) else {}
    values = {key: _known(_number(_resolved(value, values))) for key, value in values.items()}
    is_script = path.suffix == ".py"
    for name in TRL if is_script else NAMES:
        table = read_table(name)
        if table.is_of(values) or (values and is_script and name == TRL[-1]):
            _refuse(table, values, path)
            return Settings(table, _folded(values, table))
    looked = "; ".join(
        f"{table.title}: {', '.join(table.marks)}" for table in map(read_table, NAMES)
    )
    looked += ", or one of these classes of TRL in a .py"
    raise ValueError(
        f"FILE={path} must be a config of one of five libraries, and has none of their keys "
        f"({looked})."
    )


def _folded(values: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """The settings with arguments of functions together, where they are one key here."""
    folded = dict(values)
    for key in (key for key in table.rows if key.endswith(("_kwargs", "_kwargs.vllm"))):
        own = (name for name in values if name not in table.rows and table.ignores(name) is None)
        inner = {
            name.removeprefix(f"{key}."): folded.pop(name)
            for name in own
            if name.startswith(f"{key}.")
        }
        if inner:
            folded[key] = inner
    return folded


def _refuse(table: Table, values: Mapping[str, Any], path: Path) -> None:
    lists = {
        f"{key}[{n}]": one
        for key, value in values.items()
        if isinstance(value, list)
        for n, one in enumerate(value)
    }
    entries = {
        key: value
        for name, one in lists.items()
        if isinstance(one, Mapping)
        for key, value in _flat(one, name).items()
    }
    for refusal in table.refused:
        if (why := refusal.found_in({**values, **entries})) is not None:
            raise ValueError(
                f"FILE={path} must be a run of {table.title} with a counterpart here, and with "
                f"{why} it is {refusal.what}: give the config of such a run (docs/migrate.md)."
            )


def _parse(suffix: str, text: str) -> Any:
    if suffix == ".json":
        return json.loads(text)
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".py":
        return read_python(text)
    if suffix in (".sh", ".bash", ".txt"):
        return read_shell(text)
    return yaml.safe_load(text)


def _flat(node: Mapping[Any, Any], name: str = "") -> dict[str, Any]:
    """Return the leaves of nested tables by their dotted names, without those that are still to be
    set.
    """
    return {key: value for key, value in dotted(node, name) if key and value != "???"}


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """A value with what ``${other.key}`` in it stands for, where the file says that."""
    for _ in range(8):
        if not isinstance(value, str) or not (found := _REFERENCE.search(value)):
            break
        kind, key, default = found.groups()
        if key in values and kind != "env":
            other = values[key]
        elif kind and default is not None:
            other = yaml.safe_load(default)
        else:
            break
        value = other if found[0] == value else value.replace(found[0], str(other))
    return value


def _known(value: Any) -> Any:
    """A value, or that it is unknown where a ``${reference}`` is left in it."""
    several = value if isinstance(value, list) else [value]
    return (
        Unknown(str(value))
        if any(isinstance(one, str) and "${" in one for one in several)
        else value
    )


def _number(value: Any) -> Any:
    """The number that a text is: yaml takes ``1e-6`` for a text."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value.strip()):
        return value
    text = value.strip().replace("_", "")
    return float(text) if re.search(r"[.eE]", text) else int(text)

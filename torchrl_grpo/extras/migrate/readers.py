"""Reads a file into flat settings, such as ``{"actor.optimizer.lr": 1e-6}``, without running it."""

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
"""Patterns that identify files of unsupported libraries, by library."""
_MAX_VALUES = 100_000
"""Largest number of values in a file, counting an alias's values each time."""
_MAX_DEPTH = 100
"""Largest number of tables and lists around a value."""
_LONGEST = 10_000
"""Largest number of characters in which references are resolved."""
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_REFERENCE = re.compile(r"\$\{(?:oc\.(select|env):)?\s*([\w.]+)\s*(?:,([^${}]*))?\}")


@dataclass(frozen=True)
class Settings:
    """Contents of a peer's file.

    Attributes:
        table: table of the peer.
        values: values by the peer's dotted keys.
    """

    table: Table
    values: Mapping[str, Any]


def read(path: Path) -> Settings:
    """Read a file, and find the library that it belongs to.

    Raises:
        ValueError: the file does not exist, is malformed, or does not belong to one of the five
            libraries.
    """
    if not path.is_file():
        raise ValueError(
            f"FILE={path} must be a file, but it does not exist: pass the path of a script or a "
            "config."
        )
    try:
        text = path.read_text(encoding="utf-8")
        data = _parse(path.suffix.lower(), text)
        _check_size(data)
    except (yaml.YAMLError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        why = (
            " ".join(str(error).split()) or "it is nested too deeply"
        )  # a MemoryError of Python's parser
        raise ValueError(
            f"FILE={path} must be valid {path.suffix or 'yaml'}, but it is not: {why}."
        ) from error
    for name, sign in _OTHERS.items():
        if match := re.search(sign, text, re.MULTILINE):
            raise ValueError(
                f"FILE={path} must be a config of one of five libraries, but {match[0]} shows that "
                f"it is one of {name}, which is not supported: see docs/migrate.md."
            )
    values = _flat(data) if isinstance(data, Mapping) else {}
    values = {key: _mark_unknown(_number(_resolve(value, values))) for key, value in values.items()}
    is_script = path.suffix == ".py"
    for name in TRL if is_script else NAMES:
        table = read_table(name)
        if table.is_of(values) or (values and is_script and name == TRL[-1]):
            _refuse(table, values, path)
            return Settings(table, _fold_arguments(values, table))
    marks = "; ".join(
        f"{table.title}: {', '.join(table.marks)}" for table in map(read_table, NAMES)
    )
    marks += ", or one of these classes of TRL in a .py"
    raise ValueError(
        f"FILE={path} must be a config of one of five libraries, but has none of their keys "
        f"({marks})."
    )


def _fold_arguments(values: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """Return the settings, with the arguments of a function merged if they are one key here."""
    folded = dict(values)
    for key in (key for key in table.rows if key.endswith(("_kwargs", "_kwargs.vllm"))):
        names_of_file = (
            name for name in values if name not in table.rows and table.ignores(name) is None
        )
        inner = {
            name.removeprefix(f"{key}."): folded.pop(name)
            for name in names_of_file
            if name.startswith(f"{key}.")
        }
        if inner:
            folded[key] = inner
    return folded


def _refuse(table: Table, values: Mapping[str, Any], path: Path) -> None:
    lists = {
        f"{key}[{index}]": entry
        for key, value in values.items()
        if isinstance(value, list)
        for index, entry in enumerate(value)
    }
    entries = {
        key: value
        for name, entry in lists.items()
        if isinstance(entry, Mapping)
        for key, value in _flat(entry, name).items()
    }
    for refusal in table.refused:
        if (why := refusal.found_in({**values, **entries})) is not None:
            raise ValueError(
                f"FILE={path} must be a run of {table.title} with an equivalent here, but with "
                f"{why} it is {refusal.what}: use the config of another run (docs/migrate.md)."
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


def _check_size(data: Any) -> None:
    """Refuse data with too many values, as nested aliases have, or nested too deeply, such as an
    alias of itself.

    Raises:
        ValueError: there are too many values or levels.
    """
    waiting = [(data, 0)]
    for _ in range(_MAX_VALUES):
        if not waiting:
            return
        node, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(f"a value is inside more than {_MAX_DEPTH} tables and lists")
        inner = node.values() if isinstance(node, Mapping) else node
        if isinstance(node, Mapping | list | tuple):
            waiting += [(value, depth + 1) for value in inner]
    raise ValueError(f"it has more than {_MAX_VALUES:,} values, counting each alias")


def _flat(node: Mapping[Any, Any], name: str = "") -> dict[str, Any]:
    """Return the leaves of nested tables by dotted name, without missing values (``???``) and empty
    lists.
    """
    return {key: value for key, value in dotted(node, name) if key and value not in ("???", [])}


def _resolve(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value with references such as ``${other.key}`` resolved, if the file contains their
    values.
    """
    for _ in range(8):
        if not isinstance(value, str) or len(value) > _LONGEST:
            break
        match = _REFERENCE.search(value)
        if match is None:
            break
        kind, key, default = match.groups()
        if key in values and kind != "env":
            other = values[key]
        elif kind and default is not None:
            try:
                other = yaml.safe_load(default)
            except yaml.YAMLError:
                break
        else:
            break
        value = other if match[0] == value else value.replace(match[0], str(other))
    return value


def _mark_unknown(value: Any) -> Any:
    """Return a value, or ``Unknown`` if it has an unresolved ``${reference}``."""
    entries = value if isinstance(value, list) else [value]
    is_unknown = any(isinstance(entry, str) and "${" in entry for entry in entries)
    return Unknown(str(value)) if is_unknown else value


def _number(value: Any) -> Any:
    """Convert a text to a number if possible, because YAML reads ``1e-6`` as text."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value.strip()):
        return value
    text = value.strip().replace("_", "")
    return float(text) if re.search(r"[.eE]", text) else int(text)

"""Metadata of a field of the config's dataclasses beside its type and default, and the fields of a
whole config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args


def limited(default: Any, **limits: float) -> Any:
    """A field with limits: ``ge``, ``gt``, ``le``, ``lt``. ``validate`` checks them; None is always
    allowed.
    """
    return dataclasses.field(default=default, metadata={"limits": limits})


def choice(literal: Any, default: str | None) -> Any:
    """A field that takes the values of a ``Literal``."""
    return dataclasses.field(default=default, metadata={"choices": get_args(literal)})


def plain(config: Any) -> dict[str, Any]:
    """Return a config as nested dictionaries of plain types."""
    return dataclasses.asdict(config)


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every leaf of a config: its dotted name, its field and its value."""
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", item, value


def written(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)

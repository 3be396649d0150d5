"""Metadata of the config's dataclass fields besides type and default, and iteration over all
fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args


def limited(default: Any, **limits: float) -> Any:
    """Return a field with limits (``ge``, ``gt``, ``le``, ``lt``), which ``validate`` checks. None
    is always allowed.
    """
    return dataclasses.field(default=default, metadata={"limits": limits})


def choice(literal: Any, default: str | None) -> Any:
    """Return a field that accepts the values of a ``Literal``."""
    return dataclasses.field(default=default, metadata={"choices": get_args(literal)})


def plain(config: Any) -> dict[str, Any]:
    """Return a config as nested dictionaries of plain types."""
    return dataclasses.asdict(config)


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield the dotted name, the field and the value of each leaf of a config."""
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", item, value


def written(value: Any) -> str:
    """Return a value as one writes it on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def split_override(text: str) -> tuple[str, str]:
    """Return key and value of an override. The key of one that deletes begins with ``~``.

    >>> split_override("+env.task.level=3")
    ('env.task.level', '3')
    """
    name, _, value = text.lstrip("+").partition("=")
    return name, value

"""What a field of the config's dataclasses says beside its type and default, and the fields of a whole config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, get_args


def limited(default: Any, **limits: float) -> Any:
    """A field with limits: ``ge``, ``gt``, ``le``, ``lt``. ``validate`` checks them; None is always allowed."""
    return dataclasses.field(default=default, metadata={"limits": limits})


def choice(literal: Any, default: str | None, removed: Mapping[str, str] = MappingProxyType({})) -> Any:
    """A field that takes the values of a ``Literal``. Each of those ``removed`` stands, for a release, for another."""
    return dataclasses.field(default=default, metadata={"choices": get_args(literal), "removed": removed})


def old_name(now: str) -> Any:
    """The old name of the field that is called ``now`` in full: for a release a value given by it is that field's."""
    return dataclasses.field(default=None, metadata={"now": now})


def torchrl_name(now: str) -> Any:
    """TorchRL's name of the field that is called ``now`` in full."""
    return dataclasses.field(default=None, metadata={"now": now, "stays": True})


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every leaf of a config, those with old names included: its dotted name, its field and its value."""
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", item, value

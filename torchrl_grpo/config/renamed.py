"""Old names of keys and of values: for a release they still work, and one line says what to write instead."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torchrl_grpo.config.schema import GRPOConfig, leaves
from torchrl_grpo.errors import ConfigError


def renamed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a saved config, in plain types, with today's names."""
    copied = copy.deepcopy(dict(plain))
    list(take_old_names(copied))
    return copied


def take_old_names(config: Any) -> Iterator[str]:
    """Gives today's keys the values of the old ones, and yields a line for each.

    Args:
        config: a nested mapping, which is changed.

    Raises:
        ConfigError: a key is given by both names.
    """
    fields = {name: item for name, item, _ in leaves(GRPOConfig())}
    for name, item in fields.items():
        node, key = _at(config, name)
        value = node.get(key) if item.metadata.keys() & {"now", "removed"} else None
        if value is None:
            continue
        if "now" in item.metadata:
            now = item.metadata["now"]
            new_node, new_key = _at(config, now)
            if new_node.get(new_key) not in (None, fields[now].default, value):
                raise ConfigError(
                    f"{name}={value} must be left out with {now}={new_node.get(new_key)}, because it is the old name "
                    f"of the same key: use {now} alone."
                )
            new_node[new_key], node[key] = value, None
            yield f"{name} is now called {now}: use {now}={value}. The old name works for this release."
        elif value in item.metadata["removed"]:
            node[key] = item.metadata["removed"][value]
            yield f"{name}={value} was removed, {name}={node[key]} is used instead; this release still takes it."


def _at(config: Any, name: str) -> tuple[Any, str]:
    """The mapping that holds a dotted name, and the key in it."""
    *groups, key = name.split(".")
    for group in groups:
        config = config.get(group, {})
    return config, key

"""Other names of keys and of values: an old one works for a release, and one line says what to write instead."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torchrl_grpo.config.schema import FIELDS, GRPOConfig
from torchrl_grpo.errors import ConfigError


def plain(config: GRPOConfig) -> dict[str, Any]:
    """A config as nested dictionaries of plain types, without old names."""
    made = dataclasses.asdict(config)
    for name, item in FIELDS.items():
        if "now" in item.metadata:
            node, key = _at(made, name)
            del node[key]
    return made


def renamed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what ``plain`` gave in this release or an earlier one, with today's names."""
    copied = copy.deepcopy(dict(saved))
    list(take_old_names(copied))
    return copied


def take_old_names(config: Any) -> Iterator[str]:
    """Gives today's keys the values of the old ones, and yields a line for each.

    Args:
        config: a nested mapping, which is changed.

    Raises:
        ConfigError: a key is given by both names.
    """
    for name, item in FIELDS.items():
        (node, key), now, removed = _at(config, name), item.metadata.get("now"), item.metadata.get("removed", {})
        value = node.get(key) if now or removed else None
        if now and value is not None:
            new, new_key = _at(config, now)
            if new.get(new_key) not in (None, FIELDS[now].default, value):
                raise ConfigError(
                    f"{name}={value} must be left out with {now}={new[new_key]}, because both name the same key: use "
                    f"{now} alone."
                )
            new[new_key], node[key] = value, None
            if "stays" not in item.metadata:
                yield f"{name} is now called {now}: use {now}={value}. The old name works for this release."
        elif value in removed:
            node[key] = removed[value]
            yield f"{name}={value} was removed, {name}={node[key]} is used instead; this release still takes it."


def _at(config: Any, name: str) -> tuple[Any, str]:
    """The mapping that holds a dotted name, and the key in it."""
    *groups, key = name.split(".")
    for group in groups:
        config = config.get(group, {})
    return config, key

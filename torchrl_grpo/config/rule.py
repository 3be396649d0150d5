"""``Rule``: what a node of the config must fulfill. A node's rules are in the file of its
fields."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Container
from functools import partial
from operator import attrgetter
from typing import Any

from torchrl_grpo.config.fields import written
from torchrl_grpo.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule that a node of the config must fulfill. Its error is ``KEY=VALUE WHY: FIX.``

    In ``why`` and ``fix``, ``{repeats}`` is the value of the node's key ``repeats``, ``{repeats=}``
    the key and its value, and ``{at}`` the prefix of the node's keys.

    Attributes:
        key: the key at fault.
        why: the rule.
        fix: what to change.
        broken: None if the key must not be set; another key if both must not be set; or a function
            that returns whether a node breaks the rule. It may return a dictionary with values of
            further placeholders; its ``key`` replaces the key at fault.
        bad: returns whether a value of the key breaks the rule; by default any value that is not
            the default does.
    """

    key: str
    why: str
    fix: str
    broken: str | Callable[[Any], Any] | None = None
    bad: Callable[[Any], Any] | None = None

    def check(self, node: Any, prefix: str = "", **values: Any) -> None:
        """Check a node whose keys begin with ``prefix``; ``values`` fill in placeholders.

        Raises:
            ConfigError: it breaks the rule.
        """
        if callable(self.broken):
            broken = self.broken(node)
        else:
            bad = self.bad(attrgetter(self.key)(node)) if self.bad else is_set(node, self.key)
            broken = (self.broken is None or is_set(node, self.broken)) and bad
        if not broken:
            return
        values |= {"at": prefix, "key": self.key}
        if isinstance(broken, dict):
            values |= broken

        def replacement(match: re.Match[str]) -> str:
            name, equals = match.groups()
            value = written(values[name] if name in values else attrgetter(name)(node))
            return f"{prefix}{name}={value}" if equals else value

        text = f"{{{values['key']}=}} {self.why}: {self.fix}."
        raise ConfigError(re.sub(r"\{([^{} :=]+)(=?)\}", replacement, text))


def is_set(node: Any, key: str) -> bool:
    """Return whether a key of a node has another value than its default."""
    get = attrgetter(key)
    return bool(get(node) != get(type(node)()))


def arguments(key: str, example: str) -> Rule:
    """Return the rule of a key whose value is arguments by name."""
    return Rule(
        key,
        "must be arguments by name",
        f"for example, '{{at}}{key}={{{example}}}'",
        bad=lambda value: not isinstance(value, dict | None),
    )


def exclusive(key: str, other: str) -> Rule:
    """Return the rule that only one of two keys may be set."""
    return Rule(key, f"and {{at}}{other} exclude each other", "set only one of them", other)


def read_with(
    switch: str,
    values: Container[Any],
    example: str,
    *keys: str,
    unless: Callable[[Any], Any] = lambda config: False,
) -> list[Rule]:
    """Return the rules of keys that are read only with some values of another key.

    Args:
        switch: the other key.
        values: those values.
        example: one of them.
        keys: the keys.
        unless: returns whether a config reads them despite that.
    """

    def broken(key: str, config: Any) -> bool:
        is_unread = attrgetter(switch)(config) not in values and not unless(config)
        return is_unread and is_set(config, key)

    why = f"must be left out with {{{switch}=}}, which makes it unused"
    fix = f"to use it, set {switch}={example}"
    return [Rule(key, why, fix, partial(broken, key)) for key in keys]

"""Extras that a run calls: the core finds them by name and imports none."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from torchrl_grpo.errors import ConfigError


def load_extra(name: str) -> Callable[..., Any]:
    """Return the function that ``pyproject.toml`` registers as an extra's entry point.

    Raises:
        ConfigError: the installation does not list it.
    """
    for extra in entry_points(group="torchrl_grpo.extras", name=name):
        function: Callable[..., Any] = extra.load()
        return function
    raise ConfigError(
        f"the installed torchrl_grpo must list its entry point {name}, but it is from another "
        "version: pip install -e . (or make install)."
    )

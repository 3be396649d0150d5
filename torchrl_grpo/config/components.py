"""Objects that the config names as ``_target_``, with arguments beside it."""

from __future__ import annotations

from functools import partial
from typing import Any

from hydra.utils import instantiate

from torchrl_grpo.errors import ConfigError


def make_component(
    field: str, node: dict[str, Any], base: type[Any], *args: Any, **settings: Any
) -> Any:
    """An object of the class that ``_target_`` names, one of the package's or the user's own.

    Args:
        field: the node's dotted name.
        node: ``_target_`` and further arguments.
        base: what the class must derive from.
        *args: first arguments.
        **settings: arguments that follow from other fields.

    Raises:
        ConfigError: there is no such class, or it does not take the arguments.
    """
    name = node.get("_target_")
    try:
        made = instantiate({**node, "_partial_": True}, _convert_="all")
    except Exception as error:  # whatever importing the user's module may raise
        raise ConfigError(
            f"{field}._target_={name} must name a class that can be imported "
            f"({error.__cause__ or error}): use {base.__module__}.{base.__name__}, or put the "
            "folder of yours on PYTHONPATH."
        ) from error
    if not (
        isinstance(made, partial) and isinstance(made.func, type) and issubclass(made.func, base)
    ):
        raise ConfigError(
            f"{field}._target_={name} must be a subclass of {base.__name__}: derive it from "
            f"{base.__module__}."
        )
    try:
        return made.func(*args, **settings, **made.keywords)
    except TypeError as error:
        raise ConfigError(
            f"{field}={node} must be _target_ and arguments that it takes beside those of other "
            f"fields ({error}): use "
            f"{' '.join(f'~{field}.{key}' for key in made.keywords) or '**kwargs in your __init__'}."
        ) from error
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{field}._target_={name} was refused: {error}") from error

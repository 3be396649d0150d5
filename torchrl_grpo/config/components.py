"""Objects that the config names as ``_target_``, with their arguments."""

from __future__ import annotations

from typing import Any

from hydra.utils import instantiate

from torchrl_grpo.errors import ConfigError


def make_component(
    field: str,
    node: dict[str, Any],
    base: type[Any],
    target: type[Any],
    *args: Any,
    part: tuple[str, type[Any]] | None = None,
    **settings: Any,
) -> Any:
    """Return an object of the class that ``_target_`` names, ours or the user's.

    Args:
        field: dotted name of the node.
        node: ``_target_``, the name of the class, and further arguments.
        base: required base class.
        target: the class.
        *args: positional arguments.
        part: name of an argument of ``base`` that the class may be for instead, and its class.
        **settings: arguments that other config fields determine.

    Raises:
        ConfigError: the class is another one, or does not accept the arguments.
    """
    name = f"{field}._target_={node['_target_']}"
    argument, part_base = part or ("", ())
    if not issubclass(target, (base, part_base)):
        or_part = others = ""
        if part is not None:
            or_part = f" or {part[1].__name__}"
            others = ", whose __init__ takes other parts (docs/tutorials/own_loss.md)"
        raise ConfigError(
            f"{name} must be a subclass of {base.__name__}{or_part}: derive it from "
            f"{base.__module__}.{base.__name__}{others}."
        )
    try:
        arguments = instantiate({**node, "_target_": "builtins.dict"}, _convert_="all")
    except Exception as error:  # importing the user's module may raise anything
        raise ConfigError(
            f"{name} must have arguments that can be made, but {error.__cause__ or error}: fix "
            "their _target_."
        ) from error
    try:
        if issubclass(target, part_base):
            return base(*args, **settings, **{argument: target(**arguments)})
        return target(*args, **settings, **arguments)
    except TypeError as error:
        passed = ", ".join(f"{field}.{key}" for key in arguments)
        fix = f"leave out {passed}" if passed else "use **kwargs in your __init__"
        raise ConfigError(
            f"{field}={node} must be _target_ and arguments that it accepts, besides those that "
            f"other fields determine ({error}): {fix}."
        ) from error
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{name} was refused: {error}") from error

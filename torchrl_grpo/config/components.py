"""Objects that the config names as ``_target_``, with their arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

from hydra.utils import instantiate

from torchrl_grpo.errors import ConfigError


def make_component(
    field: str,
    node: dict[str, Any],
    base: type[Any],
    name: str,
    *args: Any,
    part: tuple[str, type[Any]] | None = None,
    **settings: Any,
) -> Any:
    """Return an object of the class that ``_target_`` names, ours or the user's.

    Args:
        field: dotted name of the node.
        node: ``_target_``, the class or its name, and further arguments.
        base: required base class.
        name: of the class, as the config has it.
        *args: positional arguments.
        part: name of an argument of ``base`` that the class may be for instead, and its class.
        **settings: arguments that other config fields determine.

    Raises:
        ConfigError: the class does not exist, or does not accept the arguments.
    """
    target = node.get("_target_")
    if isinstance(target, type):  # Hydra would import it by its name
        node = {**node, "_target_": "builtins.dict"}
    try:
        factory = instantiate({**node, "_partial_": True}, _convert_="all")
    except Exception as error:  # importing the user's module may raise anything
        raise ConfigError(
            f"{field}._target_={name} must name a class that can be imported "
            f"({error.__cause__ or error}): use {base.__module__}.{base.__name__}, or "
            "a class of yours, as path/to/file.py:Class."
        ) from error
    if isinstance(target, type):
        factory = partial(target, **factory.keywords)
    is_class = isinstance(factory, partial) and isinstance(factory.func, type)
    is_part = is_class and part is not None and issubclass(factory.func, part[1])
    if not is_part and not (is_class and issubclass(factory.func, base)):
        or_part = others = ""
        if part is not None:
            or_part = f" or {part[1].__name__}"
            others = ", whose __init__ takes other parts (docs/tutorials/own_loss.md)"
        raise ConfigError(
            f"{field}._target_={name} must be a subclass of {base.__name__}{or_part}: derive it "
            f"from {base.__module__}.{base.__name__}{others}."
        )
    try:
        if is_part and part is not None:
            return base(*args, **settings, **{part[0]: factory.func(**factory.keywords)})
        return factory.func(*args, **settings, **factory.keywords)
    except TypeError as error:
        passed = ", ".join(f"{field}.{key}" for key in factory.keywords)
        fix = f"leave out {passed}" if passed else "use **kwargs in your __init__"
        raise ConfigError(
            f"{field}={node | {'_target_': name}} must be _target_ and arguments that it accepts, "
            f"besides those that other fields determine ({error}): {fix}."
        ) from error
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{field}._target_={name} was refused: {error}") from error

"""Objects that the config names as ``_target_``, with their arguments."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate

from torchrl_grpo.errors import ConfigError


def make_component(
    field: str, node: dict[str, Any], base: type[Any], *args: Any, **settings: Any
) -> Any:
    """Return an object of the class that ``_target_`` names, ours or the user's.

    Args:
        field: dotted name of the node.
        node: ``_target_``, ``package.module.Class`` or ``path/to/file.py:Class``, and further
            arguments.
        base: required base class.
        *args: positional arguments.
        **settings: arguments that other config fields determine.

    Raises:
        ConfigError: the class does not exist, or does not accept the arguments.
    """
    name = str(node.get("_target_"))
    try:
        target = {"_target_": _importable(name), "_partial_": True}
        factory = instantiate({**node, **target}, _convert_="all")
    except Exception as error:  # importing the user's module may raise anything
        raise ConfigError(
            f"{field}._target_={name} must name a class that can be imported "
            f"({error.__cause__ or error}): use {base.__module__}.{base.__name__}, or your own as "
            "path/to/file.py:Class."
        ) from error
    is_class = isinstance(factory, partial) and isinstance(factory.func, type)
    if not (is_class and issubclass(factory.func, base)):
        raise ConfigError(
            f"{field}._target_={name} must be a subclass of {base.__name__}: derive it from "
            f"{base.__module__}."
        )
    try:
        return factory.func(*args, **settings, **factory.keywords)
    except TypeError as error:
        removals = " ".join(f"~{field}.{key}" for key in factory.keywords)
        raise ConfigError(
            f"{field}={node} must be _target_ and arguments that it accepts, besides those that "
            f"other fields determine ({error}): use {removals or '**kwargs in your __init__'}."
        ) from error
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{field}._target_={name} was refused: {error}") from error


def _importable(name: str) -> str:
    """Return ``package.module.Class``. For ``path/to/file.py:Class`` the file's folder is added to
    the import path, also for processes that are started later.
    """
    file, _, class_name = name.rpartition(":")
    if not file.endswith(".py"):
        return name
    path = Path(file).expanduser().resolve()
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), folder]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    return f"{path.stem}.{class_name}"

"""Objects that the config names as ``_target_``, whose class may be in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl_grpo.config import GRPOConfig, components
from torchrl_grpo.host.objects import load_class


def make_component(
    field: str, node: dict[str, Any], base: type[Any], *args: Any, **settings: Any
) -> Any:
    """Make an object as ``config.components.make_component`` does, of ``package.module.Class``,
    ``file.py:Class`` or a class that an installed package registers.

    Raises:
        ConfigError: there is no such class, or it does not take the arguments.
        ValueError: the file has no such class, or cannot be imported.
    """
    name = str(node.get("_target_"))
    module, dot, attribute = name.rpartition(".")
    is_dotted = dot and ":" not in name and attribute != "py"
    loaded = load_class(
        name, f"{field}._target_", {name: f"{module}:{attribute}"} if is_dotted else {}
    )
    target = getattr(loaded, "__wrapped__", loaded)
    return components.make_component(field, node, base, target, *args, **settings)


def make_files_absolute(config: GRPOConfig) -> None:
    """Make the files of loss and advantage absolute: the learner's processes may run elsewhere."""
    for node in (config.policy.loss, config.policy.advantage):
        file, _, name = str(node.get("_target_")).rpartition(":")
        if file.endswith(".py"):
            node["_target_"] = f"{Path(file).expanduser().resolve()}:{name}"

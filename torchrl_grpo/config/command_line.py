"""From the command line to a validated config, and from errors to exit statuses."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import signal
import sys
import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrl_grpo.config.renamed import take_old_names
from torchrl_grpo.config.rules import check_choice, validate
from torchrl_grpo.config.schema import COMPONENTS, DATASETS, GRPOConfig, leaves
from torchrl_grpo.errors import ConfigError, RunLostError

_log = logging.getLogger(__name__)


def register() -> None:
    """Makes ``grpo_schema`` known to Hydra; the yaml files in ``config/`` start from it."""
    ConfigStore.instance().store(name="grpo_schema", node=GRPOConfig)


def from_hydra(cfg: DictConfig) -> GRPOConfig:
    """The typed, validated config of what Hydra composed.

    Raises:
        ConfigError: a rule is broken, or a key does not exist (``+`` adds any to what Hydra composes).
    """
    for name in _names(cfg):
        _check_name(name, name)
    for line in take_old_names(cfg):
        _log.warning(line)
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, GRPOConfig)
    validate(config)
    return config


def _names(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """The dotted names of all keys that hold no further ones, and of the nodes of ``COMPONENTS``."""
    for key in node:
        name = f"{prefix}{key!s}"
        child = None if OmegaConf.is_missing(node, key) else node[key]
        if isinstance(child, DictConfig) and name not in COMPONENTS:
            yield from _names(child, f"{name}.")
        else:
            yield name


def _schema_leaves() -> dict[str, dataclasses.Field[Any]]:
    return {name: item for name, item, _ in leaves(GRPOConfig())}


def check_command_line(arguments: Sequence[str]) -> None:
    """Checks Hydra overrides against the schema, so that a misspelt name or a wrong type gets a plain answer.

    Args:
        arguments: the command line after the script's name. Flags and Hydra's own keys are left to Hydra.

    Raises:
        ConfigError: an unknown key (with the closest match), or a value of the wrong type.
    """
    known = _schema_leaves()
    overrides = [text for text in arguments if "=" in text and not text.startswith("-")]
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException:
        return  # Hydra's own message on syntax is better than ours would be
    for override in parsed:
        name = override.key_or_group
        if name == "algo" or name.startswith("hydra") or override.is_delete() or override.is_add():
            continue
        if name.rpartition(".")[0] in COMPONENTS:
            continue  # its arguments are its own
        _check_name(name, override.input_line or name)
        if name in known:
            for value in _values(override):
                _check_type(name, value)
        elif isinstance(override.value(), str):
            instead = f"algo={override.value()}" if name == "policy" else "its keys, one by one"
            raise ConfigError(f"{override.input_line} must name a single value, and {name} is a group: use {instead}.")


def _check_name(name: str, text: str) -> None:
    """Refuses a dotted name that is neither a key nor a node of the schema; ``text`` is what was typed."""
    known = _schema_leaves()
    groups = {leaf.rsplit(".", depth)[0] for leaf in known for depth in range(1, leaf.count(".") + 1)}
    if name in known or name in groups:
        return
    same_leaf = [leaf for leaf in known if "." in name and leaf.rpartition(".")[2] == name.rpartition(".")[2]]
    close = difflib.get_close_matches(name, same_leaf or [*known, *groups], 1, cutoff=0.4)
    close = [known[found].metadata.get("now", found) if found in known else found for found in close]
    hint = f"did you mean {close[0]}?" if close else "run with --cfg job to see all keys."
    raise ConfigError(f"{text} names a config key that does not exist: {hint}")


def _values(override: Override) -> Iterable[Any]:
    """The values of an override, several in a sweep; none of an interval, which Hydra itself refuses."""
    if not override.is_sweep_override():
        return [override.value()]
    if override.is_interval_sweep():
        return []
    texts = override.sweep_string_iterator()
    return [OverridesParser.create().parse_override(f"{override.key_or_group}={text}").value() for text in texts]


def _default_of(item: dataclasses.Field[Any]) -> Any:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def _check_type(name: str, value: Any) -> None:
    item = _schema_leaves()[name]
    choices = item.metadata.get("choices", ())
    if choices and value not in (*choices, *item.metadata["removed"], item.default):
        check_choice(name, value, choices)
    node = OmegaConf.structured(GRPOConfig)
    try:
        OmegaConf.update(node, name, value)
    except OmegaConfBaseException as error:
        if name in COMPONENTS:
            target = value if isinstance(value, str) else _default_of(item)["_target_"]
            raise ConfigError(f"{name}={value} must be a node with _target_: use {name}._target_={target}.") from error
        current: Any = GRPOConfig
        for part in name.split("."):
            current = typing.get_type_hints(current)[part]
        default = _default_of(item)
        works = DATASETS[0] if default == MISSING else "null" if default is None else str(default).replace("'", "")
        raise ConfigError(
            f"{name}={value} must have the type {getattr(current, '__name__', current)}: use {name}={works}, say."
        ) from error


@contextmanager
def orderly_exit() -> Iterator[None]:
    """Turns a ``ConfigError`` and a ``RunLostError`` into their message on stderr, without a traceback, and exit status
    2 and 1; and SIGTERM into an ordinary exit (status 143), so that the run is saved as after Ctrl-C."""
    told = False

    def end(*_: Any) -> None:
        nonlocal told
        told = True
        sys.exit(143)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit:
        if told:
            sys.exit(143)  # Ray makes a status of its own of an exit that comes while it waits
        raise
    except ConfigError as error:
        sys.stderr.write(f"\nerror: {error}\n")
        sys.exit(2)
    except RunLostError as error:
        sys.stderr.write(f"\nerror: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, previous)

"""Turns the command line into a validated config, and errors into exit statuses."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import os
import re
import shlex
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)

from torchrl_grpo.compat.hydra import options_parser
from torchrl_grpo.config.data import ColumnsConfig, DatasetConfig
from torchrl_grpo.config.fields import written
from torchrl_grpo.config.resumed import on_saved_config
from torchrl_grpo.config.rules import (
    check_choice,
    check_integers,
    check_script,
    did_you_mean,
    validate,
)
from torchrl_grpo.config.schema import COMPONENTS, ENTRY_FIELDS, FIELDS, RETRY_PROMPT, GRPOConfig
from torchrl_grpo.config.security import check_not_secret
from torchrl_grpo.errors import STALLED_STATUS, ConfigError, RunLostError
from torchrl_grpo.host import interrupts
from torchrl_grpo.host.files import is_full
from torchrl_grpo.host.startup import begin, end, quick_imports, say
from torchrl_grpo.host.text import printable_lines

FindSaved = Callable[[str | None], tuple[Path, Mapping[str, Any]] | None]

_CUT = ("top_p", "top_k", "min_p")
_ENTRY = re.compile(r"([\w.-]+)['\"]?\s*:\s*([^,{}\[\]]+)")
"""A key and its value, in a node on the command line."""
_PACKAGE = Path(__file__).resolve().parents[1]
_IN_WHEEL = _PACKAGE / "config_files"
CONFIG_FILES = str(_IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent / "config")
"""The folder of ``grpo_*.yaml`` and ``algo/``: in a checkout ``config/``; a wheel has it inside the
package.
"""


def register() -> None:
    """Makes ``grpo_schema`` known to Hydra; the yaml files in ``config/`` start from it."""
    ConfigStore.instance().store(name="grpo_schema", node=GRPOConfig)


def from_hydra(
    cfg: DictConfig, overrides: Sequence[str] = (), find_saved: FindSaved | None = None
) -> GRPOConfig:
    """The typed, validated config of what Hydra composed.

    Args:
        cfg: what it composed.
        overrides: of the command line, where ``env.environment`` takes the place of a data set.
        find_saved: given ``train.resume``, finds the checkpoint that the run goes on from and the
            config in it, which is then the base of the overrides; None, or where it finds none, the
            run has the config that was composed.

    Raises:
        ConfigError: a rule is broken, or a key does not exist (``+`` adds any to what Hydra
            composes).
    """
    try:
        composed: Any = OmegaConf.to_container(cfg)
        check_integers("", composed)
        _check_not_missing(sorted(OmegaConf.missing_keys(cfg)))
        merged: Any = OmegaConf.merge(_schema(), composed)
        _check_turns(merged.env)
        if find_saved is not None and (saved := find_saved(merged.train.resume)) is not None:
            merged = on_saved_config(merged, overrides, *saved)
            check_integers("", OmegaConf.to_container(merged))
        given = {".".join(text.lstrip("+").partition("=")[0].split(".")[:2]) for text in overrides}
        if "env.environment" in given and not given & {"env.dataset", "env.datasets"}:
            merged.env.dataset = None
        if merged.env.max_steps is not None:
            merged.env.max_turns = merged.env.max_steps
            merged.env.max_steps = None
        if merged.env.reasoning:
            merged.env.retry_prompt = merged.env.retry_prompt or RETRY_PROMPT
            merged.env.max_turns = max(merged.env.max_turns, 2)
        if merged.policy.demonstrations and "env.repeats" not in given:
            merged.env.repeats = 1
        config: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_explained(error, sys.argv[1:])) from error
    try:
        validate(config)
    except ConfigError as error:
        raise ConfigError(f"{error}{_set_by_preset(str(error), config, overrides)}") from error
    return config


def _set_by_preset(message: str, config: GRPOConfig, overrides: Sequence[str]) -> str:
    """Return which keys in a message have their values from the file ``algo/NAME.yaml``, and how to
    take them back.
    """
    typed = dict(text.lstrip("+").partition("=")[::2] for text in overrides)
    name = typed.get("algo") or (
        HydraConfig.get().runtime.choices.get("algo") if HydraConfig.initialized() else None
    )
    path = Path(CONFIG_FILES) / "algo" / f"{name}.yaml"
    preset: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    return "".join(
        f" algo={name} sets {key}={written(value)}: {key}={written(FIELDS[key].default)} takes that back."
        for leaf, value in preset.items()
        if (key := f"policy.{leaf}") not in typed
        and key not in COMPONENTS
        and getattr(config.policy, leaf) == value
        and re.search(rf"(?<![\w.]){re.escape(key)}=", message)
    )


def _check_not_missing(names: Sequence[str]) -> None:
    """Refuse keys with OmegaConf's ``???``, a missing value: a merge treats them as keys that were
    not given.
    """
    if names:
        given = ", ".join(f"{name}={MISSING}" for name in names)
        raise ConfigError(
            f"{given} must have a value, {MISSING} stands for a missing one: give it, or leave the "
            "key out."
        )


def _check_turns(env: DictConfig) -> None:
    """Refuse two values for the number of turns, which has TorchRL's name as well as ours."""
    if env.max_steps is not None and env.max_turns not in (
        FIELDS["env.max_turns"].default,
        env.max_steps,
    ):
        raise ConfigError(
            f"env.max_steps={env.max_steps} must be left out with env.max_turns={env.max_turns}, "
            "because both name the same key: use env.max_turns alone."
        )


@functools.cache
def _schema() -> Any:
    return OmegaConf.structured(GRPOConfig)


def compose(name: str, overrides: Sequence[str]) -> GRPOConfig:
    """The typed, validated config of a file in ``CONFIG_FILES``, for commands that make no run.

    Raises:
        ConfigError: a rule is broken.
    """
    register()
    check_command_line(overrides)
    with hydra.initialize_config_dir(CONFIG_FILES, version_base="1.3"):
        return from_hydra(hydra.compose(name, list(overrides)), overrides)


def split_command_line(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into Hydra's options and the overrides, which may come in any order.

    Hydra's parser takes overrides in one place only: it refuses those on the other side of an
    option.

    Raises:
        ConfigError: two options exclude each other.
        SystemExit: an option has a value that it does not take.
    """
    words = [
        "--info=all"
        if word in ("--info", "-i") and "=" in following
        else word  # else the override is its value
        for word, following in zip(arguments, [*arguments[1:], ""], strict=False)
    ]
    given, _ = options_parser().parse_known_intermixed_args(words)
    modes = [
        f"--{name}"
        for name in ("run", "multirun", "cfg", "info", "shell-completion")
        if _is_set(given, name)
    ]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} exclude each other: use one of them alone.")
    if given.resolve and not (given.cfg or given.help):
        raise ConfigError("--resolve must have --cfg or --help with it: use --cfg job --resolve.")
    options, overrides = [], list(given.overrides)
    for word in words:
        if overrides and word == overrides[0]:
            del overrides[0]
        else:
            options.append(word)
    return (
        options,
        [] if given.hydra_help else given.overrides,
    )  # Hydra's own help knows no key of ours


def _is_set(given: argparse.Namespace, option: str) -> bool:
    return getattr(given, option.replace("-", "_")) not in (None, False)


def check_command_line(arguments: Sequence[str]) -> list[str]:
    """Checks the choices among Hydra's overrides. Hydra itself finds a wrong name or type in any
    job of a sweep before the first one starts; a wrong choice it does not know, and ``validate``
    sees one job at a time.

    Args:
        arguments: the overrides of a command line.

    Returns:
        overrides that go with them: in a dry run those with which Hydra writes nothing, and that
        Optuna maximizes.

    Raises:
        ConfigError: a value looks like a secret, is ``???`` or is not one of the key's choices, or
            both keys that say how long a run is are given.
    """
    _check_form(arguments)
    given = dict(text.lstrip("+").partition("=")[::2] for text in arguments)
    missing: list[str] = []
    for name, value in given.items():
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ConfigError(
                f"{name}={value!a:.80} must be text in UTF-8: use a terminal and files in that "
                "encoding."
            )
        check_not_secret(name, value)
        entries = _ENTRY.findall(value) if value.startswith(("{", "[")) else []
        for key, inner in entries:
            check_not_secret(f"{name}.{key}", None if inner.strip() == "null" else inner)
        missing += [name] if value.strip("'\"") == MISSING else []
        missing += [f"{name}.{key}" for key, inner in entries if inner.strip(" '\"") == MISSING]
    _check_not_missing(missing)
    if given.get("train.total_dialog_turns") == "null":
        raise ConfigError(
            "train.total_dialog_turns=null must be a number: leave it out, with "
            "train.total_epochs it is not read."
        )
    turns, epochs = (
        given.get(f"train.total_{name}", "null") for name in ("dialog_turns", "epochs")
    )
    if "null" not in (turns, epochs):
        raise ConfigError(
            f"train.total_dialog_turns={turns} and train.total_epochs={epochs} exclude each other: "
            "use one of them alone."
        )
    for name in ("hydra.run.dir", "hydra.sweep.dir"):
        if name in given and "$" not in given[name]:
            _check_folder(name, Path(given[name].strip("'\"")))
    for text in arguments:
        name, _, values = text.lstrip("+").partition("=")
        for number in re.findall(r"-?\d{19,}", values):
            check_integers(name, int(number[:4000]))
        item = FIELDS.get(name)
        if item is not None and "choices" in item.metadata and not re.search(r"[($]", values):
            also = ["null"] if item.default is None else []
            for value in re.findall(r"[^,'\"\s]+", values):
                check_choice(name, value, item.metadata["choices"], also=also)
    dry = given.get("dry_run") in ("true", "True")
    added = ["hydra.output_subdir=null", "hydra/job_logging=stdout"] if dry else []
    if given.get("hydra/sweeper") == "optuna" and "hydra.sweeper.direction" not in given:
        added.append("hydra.sweeper.direction=maximize")
    return added


def _check_form(overrides: Sequence[str]) -> None:
    """Refuse an argument that is no override: Hydra would show its grammar, or a traceback."""
    for text, following in zip(overrides, [*overrides[1:], "VALUE"], strict=False):
        if text.startswith("~") or (text.partition("=")[0] and "=" in text):
            continue
        if (Path(CONFIG_FILES) / f"{text}.yaml").is_file():
            use = f"--config-name={text}"
        else:
            use = f"{text or 'KEY'}={following}" if "=" not in text + following else "KEY=VALUE"
        raise ConfigError(f"{text or repr(text)} must be an override, KEY=VALUE: use {use}.")


def _check_folder(name: str, folder: Path) -> None:
    """Refuses a folder that cannot be made: Hydra makes it before our code runs."""
    there = next(
        (path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/")
    )
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        what = "cannot be written to" if there.is_dir() else "is a file"
        raise ConfigError(
            f"{name}={folder} must be a folder that can be made, but {there} {what}: use another."
        )


def _explained(error: Exception, arguments: Sequence[str]) -> str:
    """Return Hydra's complaint about the config, in plainer words where there are any."""
    if isinstance(error, MissingConfigException) and "primary config" in str(error):
        return _unknown_config(str(error.missing_cfg_file))
    if isinstance(error, MissingConfigException) and error.options:
        return _unknown_choice(str(error.missing_cfg_file), error.options)
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    cause = (
        error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    )
    key = str(getattr(cause, "full_key", None) or "")
    if isinstance(cause, InterpolationResolutionError):
        why = str(cause).splitlines()[0].rpartition(": ")[2].strip('"')
        return f"{key} must be a value that can be found, and {why}: give the value itself, or define what it names."
    name = key.partition("[")[0]
    if not name or name.rpartition(".")[0] in COMPONENTS:
        return str(error)  # an argument of a component is that component's
    in_entry = getattr(cause, "object_type", None) in (
        DatasetConfig,
        ColumnsConfig,
    ) and not key.startswith("env.")
    if in_entry or name in ("env.datasets", "evaluation.datasets"):
        lists = ("evaluation.datasets", "env.datasets")
        named = (
            listed
            for listed in lists
            if any(text.lstrip("+").startswith(listed) for text in arguments)
        )
        return _explained_entry(cause, key, next(named, lists[-1]) if in_entry else name)
    overrides = {text.lstrip("+~").partition("=")[0]: text for text in arguments}
    typed = next((key for key in overrides if key == name or key.startswith(f"{name}.")), name)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return _unknown(typed, overrides.get(typed, name))
    if isinstance(cause, ValidationError):
        return _mistyped(name, cause.value)
    return f"{error}. {cause}" if error.__cause__ is cause else str(error)


def _unreadable(error: OverrideParseException) -> str:
    """Return the error for an override that Hydra's grammar does not allow, usually for lack of
    quotes.
    """
    key, _, value = error.override.partition("=")
    name = key.lstrip("+")
    if name not in FIELDS or "str" not in _type_of(GRPOConfig, name).split(" | "):
        return f"{error.override} must be an override that Hydra can read:\n{error}"
    # Hydra reads a backslash as an escape before a quote only.
    text = re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + found[2].replace('"', '\\"'), value)
    quoted = shlex.quote(f'{key}="{text}"')
    return f"{error.override} must have quotes that Hydra sees, for characters of its grammar: use {quoted}."


def _explained_entry(cause: Any, name: str, listed: str) -> str:
    """Return the complaint about a key of a data set in the list ``listed``."""
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        hint = did_you_mean(name, ENTRY_FIELDS, f"use {', '.join(ENTRY_FIELDS)}.", 0.4)
        return f"{name} in {listed} names a config key that does not exist: {hint}"
    if name not in ENTRY_FIELDS:
        return f"{listed} must be a list of data sets, got {cause.value}: for example, [{{dataset: gsm8k}}]."
    kind, default = _type_of(DatasetConfig, name), ENTRY_FIELDS[name].default
    return (
        f"{name}={cause.value} in {listed} must have the type {kind}: leave it out for {default}."
    )


def _type_of(node: Any, name: str) -> str:
    """The type of a dotted name below a dataclass."""
    for part in name.split("."):
        node = typing.get_type_hints(node)[part]
    return str(getattr(node, "__name__", node))


def _unknown(name: str, text: str) -> str:
    """Return the error for a dotted name that does not exist; ``text`` is what was typed."""
    if name.rpartition(".")[2] in _CUT:
        return (
            f"{text} names a config key that does not exist: what is cut off changes the "
            "distribution that is sampled from, and the trainer's log-probs would be of another "
            "one; use inference_model.temperature alone, and evaluation.top_p, top_k and min_p "
            "for pass@k."
        )
    groups = {
        leaf.rsplit(".", depth)[0] for leaf in FIELDS for depth in range(1, leaf.count(".") + 1)
    }
    last = name.rpartition(".")[2]
    also = (
        last,
        "".join(word[:1] for word in last.split("_")) if "_" in last else last,
    )  # learning_rate is lr
    same_leaf = [
        leaf for leaf in FIELDS if re.search("[._]", name) and leaf.rpartition(".")[2] in also
    ]
    cutoff = 0.0 if same_leaf else 0.4
    names = same_leaf or [*FIELDS, *groups]
    hint = did_you_mean(name, names, "run with --cfg job to see all keys.", cutoff)
    return f"{text} names a config key that does not exist: {hint}"


def _unknown_config(name: str) -> str:
    """Return the error for a ``--config-name`` without a file."""
    names = sorted(path.stem for path in Path(CONFIG_FILES).glob("*.yaml"))
    close = [known for known in names if known.startswith(name)] or difflib.get_close_matches(
        name, names, 1
    )
    hint = f"did you mean {close[0]}?" if close else "give the folder of your own by --config-dir."
    return (
        f"--config-name={name} must be one of {', '.join(names)}, or a file in --config-dir: {hint}"
    )


def _unknown_choice(path: str, options: Sequence[str]) -> str:
    """Return the error for a file that a group, such as ``algo``, does not have; ``path`` is
    ``GROUP/NAME``.
    """
    group, _, name = path.rpartition("/")
    hint = did_you_mean(name, options, "use one of them.")
    if group in ("hydra/launcher", "hydra/sweeper"):
        hint += " Others come with pip install 'torchrl_grpo[sweep]'."
    return f"{group}={name} must be one of {', '.join(options)}: {hint}"


def _mistyped(name: str, value: Any) -> str:
    """Return the error for a key, or a group of keys, that cannot have a value."""
    item = FIELDS.get(name)
    if item is None:
        instead = f"algo={value}" if name == "policy" else "its keys, one by one"
        return f"{name}={value} must name a single value, and {name} is a group: use {instead}."
    default = (
        item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    )
    if name in COMPONENTS:
        target = value if isinstance(value, str) else default["_target_"] or "my_tasks.MyTask"
        return f"{name}={value} must be a node with _target_: use {name}._target_={target}."
    return f"{name}={value} must have the type {_type_of(GRPOConfig, name)}: for example, {name}={written(default)}."


def starting(config: GRPOConfig, *, asynchronous: bool = False) -> AbstractContextManager[None]:
    """Context in which a script imports a run: the user sees signs of life from here until the
    first step.

    Raises:
        ConfigError: the script, ``grpo.py`` or the asynchronous one, cannot do what the config asks
            for.
    """
    check_script(config, asynchronous)
    begin()
    say("importing PyTorch, TorchRL and transformers")
    return quick_imports(whole_torchrl=bool(config.env.transforms))


def _stalled() -> bool:
    return interrupts.status() == STALLED_STATUS


@contextmanager
def orderly_exit() -> Iterator[None]:
    """Turns a mistake in the config, and a ``RunLostError`` or a full disk, into a message on
    stderr, without a traceback, and the exit statuses 2 and 1; and SIGTERM and Ctrl-C into an
    ordinary exit (143, 130), for which the run is saved, as it is where it stands still (75). Where
    its output is a pipe that nobody reads any more, it goes on."""
    interrupts.ignore_broken_pipes()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else ``hydra.main`` prints its errors itself
    with interrupts.watched():
        try:
            yield
        except ConfigError as error:
            sys.stderr.write(f"\nerror: {printable_lines(str(error))}\n")
            sys.exit(2)
        except (HydraException, OmegaConfBaseException) as error:
            sys.stderr.write(f"\nerror: {_explained(error, sys.argv[1:])}\n")
            sys.exit(2)
        except RunLostError as error:
            sys.stderr.write(f"\nerror: {printable_lines(str(error))}\n")
            sys.exit(interrupts.status() if _stalled() else 1)
        except (SystemExit, KeyboardInterrupt) as error:
            status = interrupts.status()
            if isinstance(error, KeyboardInterrupt):
                sys.stderr.write("\ninterrupted\n")
                sys.exit(130)
            # Ray makes a status of its own of an exit that comes while it waits.
            sys.exit(error.code if status is None else status)
        except OSError as error:
            if not is_full(error):
                raise
            file = error.filename or "a file of the run"
            sys.stderr.write(
                f"\nerror: the disk has no room for {file}: make some, or use another "
                "hydra.run.dir.\n"
            )
            sys.exit(1)
        except BaseException:
            if _stalled():  # which has been said; Ray makes an error of its own of one that comes while it waits
                sys.exit(STALLED_STATUS)
            raise
        finally:
            end()

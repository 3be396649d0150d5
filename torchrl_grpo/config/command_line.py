"""Turn the command line into a validated config, and errors into exit statuses."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import shlex
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

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
from yaml import YAMLError

from torchrl_grpo.checks import did_you_mean
from torchrl_grpo.compat.hydra import options_parser
from torchrl_grpo.config.data import ColumnsConfig, DatasetConfig
from torchrl_grpo.config.fields import split_override, written
from torchrl_grpo.config.resumed import on_saved_config
from torchrl_grpo.config.rules import (
    check_choice,
    check_integers,
    validate,
)
from torchrl_grpo.config.schema import (
    COMPONENTS,
    ENTRY_FIELDS,
    FIELDS,
    LENGTHS,
    RETRY_PROMPT,
    GRPOConfig,
)
from torchrl_grpo.config.security import check_not_secret
from torchrl_grpo.errors import STALLED_STATUS, ConfigError, RunLostError
from torchrl_grpo.host import interrupts
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.files import is_full
from torchrl_grpo.host.startup import end, quick_imports, say
from torchrl_grpo.host.text import printable_lines, unescape

FindSaved = Callable[[str | None], tuple[Path, Mapping[str, Any]] | None]

_UNTRAINED = re.compile(r"\w+_penalty|logit_bias|bad_words|min(_new)?_tokens|\w*ngram_size")
"""Options of engines that change the distribution sampled from, and that the trainer does not know."""
_ARGUMENTS = tuple(f"{name}{then}" for name in COMPONENTS for then in (".", "={"))
_ENTRY = re.compile(r"([\w.-]+)['\"]?\s*:\s*([^,{}\[\]]+)")
"""A key and its value in a node on the command line."""
_TEXT = re.compile(
    r"""("|')(?:\\.|(?!\1).)*\1|(?<==)(?=\S)[^][{}=,"']*\\[nt][^][{}=,"']*\Z"""
    r"""|(?=\S)[^][{}=,:"']*\\[nt][^][{}=,:"']*""",
    re.S,
)
"""A text in quotes, or one with an escape: a whole value, or a part of a list or node."""
_PACKAGE = Path(__file__).resolve().parents[1]
_IN_WHEEL = _PACKAGE / "config_files"
CONFIG_FILES = str(_IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent / "config")
"""Folder of ``grpo_*.yaml`` and ``algo/``: ``config/`` in a checkout, inside the package in a
wheel.
"""


def register() -> None:
    """Register ``grpo_schema`` with Hydra; the yaml files in ``config/`` start from it."""
    ConfigStore.instance().store(name="grpo_schema", node=GRPOConfig)


def from_hydra(
    cfg: DictConfig, overrides: Sequence[str] = (), find_saved: FindSaved | None = None
) -> GRPOConfig:
    """Return the typed, validated config that Hydra composed.

    Args:
        cfg: the config as Hydra composed it.
        overrides: overrides on the command line, where ``env.environment`` replaces a data set.
        find_saved: returns, for ``train.resume``, the checkpoint to resume from and its config, to
            which the overrides are then applied; None, or a result of None, keeps the composed
            config.

    Raises:
        ConfigError: a rule is broken, or a key does not exist (with ``+`` Hydra accepts any key).
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
        prefixes = {".".join(name.split(".")[:2]) for name, _ in map(split_override, overrides)}
        if "env.environment" in prefixes and not prefixes & {"env.dataset", "env.datasets"}:
            merged.env.dataset = None
        if merged.env.max_steps is not None:
            merged.env.max_turns = merged.env.max_steps
            merged.env.max_steps = None
        if merged.env.reasoning:
            merged.env.retry_prompt = merged.env.retry_prompt or RETRY_PROMPT
            merged.env.max_turns = max(merged.env.max_turns, 2)
        if merged.policy.demonstrations and "env.repeats" not in prefixes:
            merged.env.repeats = 1
        config: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, overrides)) from error
    try:
        validate(config)
    except ConfigError as error:
        raise ConfigError(f"{error}{_set_by_preset(str(error), config, overrides)}") from error
    return config


def _set_by_preset(message: str, config: GRPOConfig, overrides: Sequence[str]) -> str:
    """Return a hint at the keys in a message whose values come from ``algo/NAME.yaml``, and how to
    undo them.
    """
    typed = dict(map(split_override, overrides))
    name = typed.get("algo") or (
        HydraConfig.get().runtime.choices.get("algo") if HydraConfig.initialized() else None
    )
    path = Path(CONFIG_FILES) / "algo" / f"{name}.yaml"
    preset: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    return "".join(
        f" algo={name} sets {key}={written(value)}: {key}={written(FIELDS[key].default)} undoes "
        "that."
        for leaf, value in preset.items()
        if (key := f"policy.{leaf}") not in typed
        and key not in COMPONENTS
        and getattr(config.policy, leaf) == value
        and re.search(rf"(?<![\w.]){re.escape(key)}=", message)
    )


def _check_not_missing(names: Sequence[str]) -> None:
    """Refuse keys with OmegaConf's missing value, ``???``: a merge would ignore such keys."""
    if names:
        missing = ", ".join(f"{name}={MISSING}" for name in names)
        raise ConfigError(
            f"{missing} must have a value, but {MISSING} means that it is missing: set it, or "
            "leave the key out."
        )


def _check_turns(env: DictConfig) -> None:
    """Refuse two values for the number of turns, which has both TorchRL's name and ours."""
    if env.max_steps is not None and env.max_turns not in (
        FIELDS["env.max_turns"].default,
        env.max_steps,
    ):
        raise ConfigError(
            f"env.max_steps={env.max_steps} must be left out with env.max_turns={env.max_turns}, "
            "because both name the same key: use only env.max_turns."
        )


@functools.cache
def _schema() -> Any:
    return OmegaConf.structured(GRPOConfig)


def compose(
    name: str,
    overrides: Sequence[str] | Mapping[str, Any],
    find_saved: FindSaved | None = None,
) -> GRPOConfig:
    """Return the typed, validated config of a file in ``CONFIG_FILES``, without ``hydra.main``.

    Args:
        name: of the file, without its suffix.
        overrides: as on the command line, or values of plain types by key.
        find_saved: see ``from_hydra``.

    Raises:
        ConfigError: a rule is broken, or there is no such file or key.
    """
    register()
    if isinstance(overrides, Mapping):
        overrides = [_added(f"{key}={_in_grammar(value)}") for key, value in overrides.items()]
    else:
        overrides = [*map(with_argument_added, overrides)]
    check_command_line(overrides)
    try:
        with hydra.initialize_config_dir(CONFIG_FILES, version_base="1.3"):
            return from_hydra(hydra.compose(name, overrides), overrides, find_saved)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(_explain(error, overrides)) from error


def _in_grammar(value: Any) -> str:
    """Return a value of plain types in Hydra's grammar; text in quotes.

    >>> _in_grammar([{"fn": "a b", "weight": 0.5}, None])
    '[{fn:"a b",weight:0.5},null]'
    """
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Mapping):
        entries = (f"{key}:{_in_grammar(inner)}" for key, inner in value.items())
        return f"{{{','.join(entries)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_in_grammar, value))}]"
    return written(value)


def _quoted(text: str) -> str:
    """Return text in the quotes of Hydra, for which a backslash is an escape only before a quote."""
    text = re.sub(r'(\\*)("|\Z)', lambda match: 2 * match[1] + match[2].replace('"', '\\"'), text)
    return f'"{text}"'


def split_command_line(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into Hydra's options and the overrides, which may come in any order.

    Hydra's parser accepts overrides only in one contiguous block, before or after its options.

    Raises:
        ConfigError: a word is not an option, or two options exclude each other.
        SystemExit: the version was printed.
    """
    words = [
        "--info=all"
        if word in ("--info", "-i") and "=" in following
        else word  # otherwise the override would be its value
        for word, following in zip(arguments, [*arguments[1:], ""], strict=False)
    ]

    def refuse(problem: str) -> NoReturn:
        raise ConfigError(load_extra("explain_words")(words, problem))

    parsed, unknown = options_parser(refuse).parse_known_intermixed_args(words)
    if unknown:
        refuse(f"unknown: {' '.join(unknown)}")
    modes = [
        f"--{name}"
        for name in ("run", "multirun", "cfg", "info", "shell-completion")
        if getattr(parsed, name.replace("-", "_"))
    ]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} exclude each other: set only one of them.")
    if parsed.resolve and not (parsed.cfg or parsed.help):
        raise ConfigError("--resolve needs --cfg or --help: use --cfg job --resolve.")
    _check_once(parsed.overrides)
    options, overrides = [], list(parsed.overrides)
    for word in words:
        if overrides and word == overrides[0]:
            del overrides[0]
        else:
            options.append(word)
    if parsed.hydra_help:  # Hydra's own help does not know our keys
        return options, []
    return options, [*map(with_argument_added, parsed.overrides)]


def _check_once(overrides: Sequence[str]) -> None:
    """Refuse a key with two values, of which Hydra would take the last one."""
    values: dict[str, str] = {}
    for name, value in map(split_override, overrides):
        if name in values and not name.startswith("~"):
            raise ConfigError(
                f"{name}={value} must be the only value of {name}, which has {values[name]} too: "
                f"leave one of them out, or sweep over both (--multirun {name}={values[name]},{value})."
            )
        values[name] = value


def with_argument_added(override: str) -> str:
    r"""Return an override as Hydra takes it: an argument of a component needs no ``+`` where the
    config has no such key yet, and ``\n`` and ``\t`` in texts are characters (``unescape``).

    >>> with_argument_added("policy.loss.width=0.1"), with_argument_added(r"env.system_prompt=a\nb")
    ('++policy.loss.width=0.1', 'env.system_prompt="a\nb"')
    """
    return _added(_TEXT.sub(_with_characters, override))


def _added(override: str) -> str:
    """Return an override with ``++`` if it sets an argument of a component, or all of them."""
    is_argument = override.startswith(_ARGUMENTS) and "._target_=" not in override
    return f"++{override}" if is_argument else override


def _with_characters(match: re.Match[str]) -> str:
    """Return a text of an override ``unescape``d, in quotes if it has become several lines."""
    text = unescape(match[0])
    return text if text == match[0] or text[0] in "\"'" else f'"{text}"'


def check_command_line(arguments: Sequence[str]) -> list[str]:
    """Check overrides before Hydra runs. In a sweep Hydra finds wrong names and types of any job
    before the first one starts, but not wrong choices, and ``validate`` sees one job at a time.

    Args:
        arguments: overrides on the command line.

    Returns:
        overrides to add: those that keep Hydra from writing files in a dry run, and the direction
        of Optuna's search.

    Raises:
        ConfigError: a value looks like a secret, is ``???`` or is not one of the key's choices, or
            several keys for the length of a run are set.
    """
    _check_form(arguments)
    values = dict(map(split_override, arguments))
    missing: list[str] = []
    for name, value in values.items():
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
    if values.get("train.total_dialog_turns") == "null":
        raise ConfigError(
            "train.total_dialog_turns=null must be a number: leave it out, because "
            "train.total_steps or train.total_epochs replaces it."
        )
    lengths = [f"{name}={values[name]}" for name in LENGTHS if values.get(name, "null") != "null"]
    if len(lengths) > 1:
        raise ConfigError(f"{' and '.join(lengths)} exclude each other: set only one of them.")
    for name in ("hydra.run.dir", "hydra.sweep.dir"):
        if name in values and "$" not in values[name]:
            _check_folder(name, Path(values[name].strip("'\"")))
    for name, value in map(split_override, arguments):
        for number in re.findall(r"-?\d{19,}", value):
            check_integers(name, int(number[:4000]))
        item = FIELDS.get(name)
        if item is not None and "choices" in item.metadata and not re.search(r"[($]", value):
            also = ["null"] if item.default is None else []
            for choice in re.findall(r"[^,'\"\s]+", value):
                check_choice(name, choice, item.metadata["choices"], also=also)
    dry = values.get("dry_run") in ("true", "True")
    added = ["hydra.output_subdir=null", "hydra/job_logging=stdout"] if dry else []
    if values.get("hydra/sweeper") == "optuna" and "hydra.sweeper.direction" not in values:
        added.append("hydra.sweeper.direction=maximize")
    return added


def _check_form(overrides: Sequence[str]) -> None:
    """Refuse an argument that is not an override: Hydra would print its grammar, or a traceback."""
    if not all(text.startswith("~") or "=" in text[1:] for text in overrides):
        raise ConfigError(load_extra("explain_words")(overrides))


def _check_folder(name: str, folder: Path) -> None:
    """Refuse a folder that cannot be created: Hydra creates it before our code runs."""
    ancestors = (path for path in (folder, *folder.absolute().parents) if path.exists())
    existing = next(ancestors, Path("/"))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        problem = "is not writable" if existing.is_dir() else "is a file"
        raise ConfigError(
            f"{name}={folder} must be a folder that can be created, but {existing} {problem}: use "
            "another folder."
        )


def _explain(error: Exception, arguments: Sequence[str]) -> str:
    """Return the message for an error of Hydra, in plainer words where possible."""
    if isinstance(error, MissingConfigException) and "primary config" in str(error):
        return _unknown_config(str(error.missing_cfg_file))
    if isinstance(error, MissingConfigException) and error.options:
        return _unknown_choice(str(error.missing_cfg_file), error.options)
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if "Ambiguous value" in str(error):
        return str(load_extra("explain_words")(arguments, str(error)))
    cause = (
        error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    )
    key = str(getattr(cause, "full_key", None) or "")
    if isinstance(cause, InterpolationResolutionError):
        why = str(cause).splitlines()[0].rpartition(": ")[2].strip('"')
        return (
            f"{key} must refer to something that exists, but {why}: give the value itself, or "
            "define what it refers to."
        )
    name = key.partition("[")[0]
    if not name or name.rpartition(".")[0] in COMPONENTS:
        return str(error)  # the component checks its own arguments
    in_entry = getattr(cause, "object_type", None) in (
        DatasetConfig,
        ColumnsConfig,
    ) and not key.startswith("env.")
    if in_entry or name in ("env.datasets", "evaluation.datasets"):
        lists = ("evaluation.datasets", "env.datasets")
        lists_on_command_line = (
            list_name
            for list_name in lists
            if any(text.lstrip("+").startswith(list_name) for text in arguments)
        )
        list_name = next(lists_on_command_line, lists[-1]) if in_entry else name
        return _explain_entry(cause, key, list_name)
    overrides = {split_override(text.lstrip("~"))[0]: text for text in arguments}
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
    key = error.override.partition("=")[0]
    name, value = split_override(error.override)
    if name not in FIELDS or "str" not in _type_of(GRPOConfig, name).split(" | "):
        return f"{error.override} must be an override that Hydra can read:\n{error}"
    quoted = shlex.quote(f"{key}={_quoted(value)}")
    return (
        f"{error.override} must be quoted for Hydra too, because it contains characters of Hydra's "
        f"grammar: use {quoted}."
    )


def _explain_entry(cause: Any, name: str, list_name: str) -> str:
    """Return the message about a key of a data set in the list ``list_name``."""
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        hint = did_you_mean(name, ENTRY_FIELDS, f"use {', '.join(ENTRY_FIELDS)}.", 0.4)
        return f"{name} in {list_name} names a config key that does not exist: {hint}"
    if name not in ENTRY_FIELDS:
        return (
            f"{list_name} must be a list of data sets, got {cause.value}: for example, "
            "[{dataset: gsm8k}]."
        )
    kind, default = _type_of(DatasetConfig, name), ENTRY_FIELDS[name].default
    return (
        f"{name}={cause.value} in {list_name} must have the type {kind}: leave it out for "
        f"{default}."
    )


def _type_of(node: Any, name: str) -> str:
    """Return the type of a dotted name below a dataclass."""
    for part in name.split("."):
        node = typing.get_type_hints(node)[part]
    return str(getattr(node, "__name__", node))


def _unknown(name: str, text: str) -> str:
    """Return the error for a dotted name that does not exist; ``text`` is what was typed."""
    if _UNTRAINED.fullmatch(name.rpartition(".")[2]):
        return (
            f"{text} names a config key that does not exist: it changes the distribution that is "
            "sampled from, which the trainer's log-probs would not match; use temperature, "
            "top_k, top_p and min_p of inference_model, which the trainer accounts for."
        )
    groups = {
        leaf.rsplit(".", depth)[0] for leaf in FIELDS for depth in range(1, leaf.count(".") + 1)
    }
    last = name.rpartition(".")[2]
    initials = "".join(word[:1] for word in last.split("_"))  # learning_rate is lr
    spellings = (last, initials if "_" in last else last)
    same_leaf = [leaf for leaf in FIELDS if leaf.rpartition(".")[2] in spellings]
    ours, reason = load_extra("same_as")(name)
    closest = difflib.get_close_matches(name, same_leaf, 1, 0.0)
    suggestions = [*dict.fromkeys([*filter(None, [ours]), *closest])]
    if suggestions:
        hint = f"did you mean {' or '.join(suggestions)}?"
    elif reason is not None:
        hint = f"{reason}."
    else:
        hint = did_you_mean(name, [*FIELDS, *groups], "run with --cfg job to see all keys.", 0.4)
    return f"{text} names a config key that does not exist: {hint}"


def _unknown_config(name: str) -> str:
    """Return the error for a ``--config-name`` without a file."""
    names = sorted(path.stem for path in Path(CONFIG_FILES).glob("*.yaml"))
    close = [known for known in names if known.startswith(name)] or difflib.get_close_matches(
        name, names, 1
    )
    hint = f"did you mean {close[0]}?" if close else "pass your own folder with --config-dir."
    return (
        f"--config-name={name} must be one of {', '.join(names)}, or a file in --config-dir: {hint}"
    )


def _unknown_choice(path: str, options: Sequence[str]) -> str:
    """Return the error for a file that does not exist in a group such as ``algo``; ``path`` is
    ``GROUP/NAME``.
    """
    group, _, name = path.rpartition("/")
    hint = did_you_mean(name, options, "use one of them.")
    if group in ("hydra/launcher", "hydra/sweeper"):
        hint += " Others come with pip install 'torchrl_grpo[sweep]'."
    return f"{group}={name} must be one of {', '.join(options)}: {hint}"


def _mistyped(name: str, value: Any) -> str:
    """Return the error for a key whose value has the wrong type, or a group with a value."""
    item = FIELDS.get(name)
    if item is None:
        instead = f"algo={value}" if name == "policy" else "its keys, one by one"
        return (
            f"{name}={value} must not have a value, because {name} is a group of keys: use "
            f"{instead}."
        )
    default = (
        item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    )
    if name in COMPONENTS:
        target = value if isinstance(value, str) else default["_target_"] or "my_tasks.MyTask"
        return f"{name}={value} must be a node with _target_: use {name}._target_={target}."
    return (
        f"{name}={value} must have the type {_type_of(GRPOConfig, name)}: for example, "
        f"{name}={written(default)}."
    )


@contextmanager
def starting(config: GRPOConfig) -> Iterator[None]:
    """Context in which a script imports a run."""
    say("importing PyTorch, TorchRL and transformers")
    # In somebody else's process, its other code may need what a quick import leaves out.
    needs_all = bool(config.env.transforms) or not interrupts.in_script()
    with interrupts.expendable(), quick_imports(whole_torchrl=needs_all):
        yield


def _stalled() -> bool:
    return interrupts.status() == STALLED_STATUS


def _exit(error: BaseException, message: str, status: Any) -> NoReturn:
    """End the process with a message and the notes of an error, such as how to resume the run."""
    sys.stderr.write(message + "".join(f"{note}\n" for note in getattr(error, "__notes__", ())))
    sys.exit(status)


@contextmanager
def orderly_exit() -> Iterator[None]:
    """Turn errors and signals into messages and exit statuses.

    A mistake in the config exits with 2, a ``RunLostError`` or a full disk with 1, each with a
    message on stderr and no traceback. SIGTERM (143), SIGHUP (129), Ctrl-C (130) and a stalled run
    (75) exit after the run is saved. A run whose output has no reader continues.
    """
    interrupts.ignore_broken_pipes()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise ``hydra.main`` prints its errors itself
    with interrupts.watched():
        try:
            yield
        except ConfigError as error:
            _exit(error, f"\nerror: {printable_lines(str(error))}\n", 2)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            _exit(error, f"\nerror: {_explain(error, sys.argv[1:])}\n", 2)
        except RunLostError as error:
            message = f"\nerror: {printable_lines(str(error))}\n"
            _exit(error, message, STALLED_STATUS if _stalled() else 1)
        except KeyboardInterrupt as error:
            status = interrupts.status() or 130
            _exit(error, "\ninterrupted\n" if status == 130 else "", status)
        except OSError as error:
            if not is_full(error):
                raise
            _exit(
                error,
                f"\nerror: the disk is full, so {error.filename or 'a file of the run'} cannot be "
                "written: free some space, or use another hydra.run.dir.\n",
                1,
            )
        except BaseException as error:
            # Already reported. Ray replaces an error that is raised while it waits.
            if _stalled():
                _exit(error, "", STALLED_STATUS)
            raise
        finally:
            end()

"""Hints for words of the command line that are neither options of Hydra nor overrides, and for a
script that a launcher starts once for each device.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from torchrl_grpo.compat.hydra import option_names
from torchrl_grpo.config import CONFIG_FILES, ConfigError
from torchrl_grpo.config.schema import FIELDS
from torchrl_grpo.extras.peers import same_as

_OVERRIDE = re.compile(r"[+~]*[\w.@/]+=")
_NUMBER = re.compile(r"-?[\d.]")
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_RANK")


def explain_words(words: Sequence[str], problem: str = "") -> str:
    """Return the error for words, some of which cannot be used, with what to write instead.

    Args:
        words: the command line without the script, or some of it in order.
        problem: what Hydra or its parser says; empty if there is a word without ``=``.

    >>> explain_words(["optimizer.lr", "=", "1e-4"])
    'optimizer.lr = 1e-4 must be one word, without spaces: use optimizer.lr=1e-4.'
    """
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        message = _split_override(words, index, following) or _option(word, following)
        message = message or _list(word, problem)
        if message:
            return message
    if problem:
        return f"{problem}: --help lists what the command takes, --hydra-help Hydra's options."
    wrong = next(
        (index for index, word in enumerate(words) if not (word[:1] == "~" or "=" in word[1:])), 0
    )
    word, following = words[wrong], "".join(words[wrong + 1 : wrong + 2]) or "VALUE"
    name = word.removesuffix(".yaml")
    if word and (Path(CONFIG_FILES) / f"{name}.yaml").is_file():
        use = f"--config-name={name}"
    elif "=" in word + following:
        use = "KEY=VALUE"
    else:
        use = f"{_known(word) or word or 'KEY'}={following}"
    return f"{word or repr(word)} must be an override, KEY=VALUE: use {use}."


def _split_override(words: Sequence[str], index: int, following: str) -> str:
    """Return the error for an override with spaces around its ``=``, or with ``:`` in its place."""
    word = words[index]
    name = word.rstrip("=:")
    if not _known(name) or "=" in name:
        return ""
    ends_key = word in (f"{name}=", f"{name}:") and "=" not in following
    if word == name and following == "=":
        parts = words[index : index + 3]
    elif (word == name and following[:1] == "=") or (ends_key and following[:1] not in ("", "-")):
        parts = words[index : index + 2]
    else:
        return ""
    value = "".join(parts)[len(name) :].lstrip("=:")
    use = shlex.quote(f"{_known(name)}={value or 'VALUE'}")
    return f"{' '.join(parts)} must be one word, without spaces: use {use}."


def _option(word: str, following: str) -> str:
    """Return the error for an option that Hydra does not have; empty if it has it."""
    if not word.startswith("-") or _NUMBER.match(word):
        return ""
    option, equals, value = word.partition("=")
    options = option_names()
    if option in options or sum(name.startswith(option) for name in options) == 1:
        return ""
    if not equals and "=" not in following and (following[:1] != "-" or _NUMBER.match(following)):
        value = following
    typed = word if equals or not value else f"{word} {value}"
    if option == "--config":
        path = Path(value or "NAME")
        folder = (
            f"--config-dir={shlex.quote(str(path.parent))} " if path.suffix or "/" in value else ""
        )
        return f"{typed} must be --config-name, with the name of a file: use {folder}--config-name={path.stem}."
    name = option.lstrip("-").replace("-", "_")
    if key := _known(name):
        is_flag = key in FIELDS and isinstance(FIELDS[key].default, bool)
        use = shlex.quote(f"{key}={value or ('true' if is_flag else 'VALUE')}")
        return f"{typed} must be an override, KEY=VALUE, without dashes: use {use}."
    close = [*difflib.get_close_matches(option, options, 1, 0.7)]
    close += [
        f"{key}={value or 'VALUE'}" for key in difflib.get_close_matches(name, FIELDS, 1, 0.7)
    ]
    hint = "--help lists the keys that most runs set, --hydra-help the options."
    if close:
        hint = f"did you mean {shlex.quote(close[0])}?"
    return f"{typed} must be an option of Hydra, or an override, KEY=VALUE: {hint}"


def _known(name: str) -> str | None:
    """Return our key for a name: a key or a group, the last part of a single key, or the key of
    another library.
    """
    if name in FIELDS or any(key.startswith(f"{name}.") for key in FIELDS):
        return name
    leaves = [key for key in FIELDS if key.rpartition(".")[2] == name]
    return leaves[0] if len(leaves) == 1 else same_as(name)[0] if name else None


def _list(word: str, problem: str) -> str:
    """Return the error for a value with commas, which Hydra takes for several runs."""
    name, _, value = word.partition("=")
    key = name.lstrip("+")
    if "mbiguous value" not in problem or f"'{word}'" not in problem:
        return ""
    is_group = key == "algo" or "/" in key
    kind = str(FIELDS[key].type) if key in FIELDS else "file" if is_group else "Any"
    if "list" in kind or "Any" in kind:
        what, fix = "a list in brackets", f"{name}=[{value}]"
    elif "str" in kind:
        what, fix = "quoted for Hydra too", f'{name}="{value}"'
    else:
        return f"{word} must be one value: use one, or --multirun for a run with each."
    return (
        f"{word} must be {what}: use {shlex.quote(fix)}, or --multirun for a run with each value."
    )


def check_launcher() -> None:
    """Refuse to run once for each device.

    Raises:
        ConfigError: torchrun, mpirun or the like started several of this process.
    """
    sizes = [os.environ.get(name, "") for name in _WORLD_SIZES]
    count = max((int(size) for size in sizes if size.isdecimal()), default=1)
    if count > 1 and any(name in os.environ for name in _RANKS):
        raise ConfigError(
            f"torchrun, accelerate or mpirun must not start this script, which starts a process for "
            f"each device itself: use python with train_model.num_devices={count}."
        )

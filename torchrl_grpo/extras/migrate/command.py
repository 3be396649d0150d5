"""Prints the command line equivalent to a config of TRL, verl, AReaL, prime-rl or TorchRL.

    python -m torchrl_grpo migrate train_trl.py --devices 8
    python -m torchrl_grpo migrate run_qwen2-7b_math.sh
    python -m torchrl_grpo migrate gsm8k_grpo.yaml

Below it are the keys that have a different meaning or no equivalent. The file is read, never run.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torchrl_grpo.extras.migrate.readers import read
from torchrl_grpo.extras.migrate.tables import NAMES, SET_ME, read_table
from torchrl_grpo.extras.migrate.translation import Translation, translate

_PLAIN = re.compile(r"[\w./:+\-@]+|[\w.]+\$(HOME|PWD)[\w./:+\-@]*")
_FOLDER_VARIABLE = re.compile(r"\$(HOME|PWD)\b")
_NOT_TEXT = re.compile(r"true|false|null|none|nan|inf|[-+.\d][\d.e+\-_]*", re.IGNORECASE)


def main(
    arguments: Sequence[str] | None = None, file: IO[str] | None = None, width: int | None = None
) -> None:
    """Print the command line for a file, and what it cannot express.

    Args:
        arguments: arguments on the command line; by default this process's.
        file: where to print; standard output by default.
        width: number of columns; by default the terminal's.
    """
    parser = argparse.ArgumentParser(
        "python -m torchrl_grpo migrate",
        description=(
            "Prints the command line that makes the same run as a config of another library."
        ),
        epilog="FILE is one of these: "
        + "; ".join(read_table(name).what.replace("`", "") for name in reversed(NAMES))
        + ".",
    )
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="a config of another library; it is read, never run"
    )
    parser.add_argument("--devices", type=_count, metavar="N", help="TRL: processes of the run (1)")
    options = parser.parse_args(arguments)
    try:
        translation = translate(read(options.file), str(options.file), options.devices)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    except Exception as error:  # a value of a form that its library would not take either
        why = f"{type(error).__name__}: {error}"
        parser.exit(
            2,
            f"error: FILE={options.file} must have values as its library takes them, but one is "
            f"different ({why:.200}): remove it, or fix it.\n",
        )
    (file or sys.stdout).write(report(translation, width or shutil.get_terminal_size().columns))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be an integer of at least 1")
    return int(text)


def report(translation: Translation, width: int) -> str:
    """Return the text to print for a translation."""
    parts = [" \\\n    ".join(command(translation)) + "\n"]
    lines = {
        f"Set these ({SET_ME} above): the file does not give their values": _lines(
            translation.unset
        ),
        f"Different meaning in {translation.table.title}": [
            *_lines(translation.differs),
            *translation.table.differs,
        ],
        "No equivalent": _lines(translation.lacks),
        "Ignored: not relevant here": [
            f"{why}: {', '.join(keys)}" for why, keys in translation.ignored.items()
        ],
        "Unknown keys: check these yourself": [", ".join(translation.unknown)],
    }
    for title, texts in lines.items():
        if any(texts):
            parts += [f"\n{title}\n", *(_wrap(text, width) for text in texts)]
    return "".join(parts)


def command(translation: Translation) -> list[str]:
    """Return the words of the command line, quoted for a shell."""
    script = "grpo-async.py" if translation.asynchronous else "grpo.py"
    return [
        f"python sota/grpo/{script}",
        *(_quote(f"{key}={_text(value)}") for key, value in translation.overrides.items()),
    ]


def _quote(word: str) -> str:
    """Quote a word for the shell, which still expands ``$HOME``."""
    if _PLAIN.fullmatch(word.replace("=", "")):
        return word
    if _FOLDER_VARIABLE.search(word):
        return '"' + re.sub(r'(["`\\])', r"\\\1", word) + '"'
    return shlex.quote(word)


def _text(value: Any) -> str:
    """Return a value as Hydra parses it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    text = re.sub(r"^~(?=/)", "$HOME", str(value))
    plain = isinstance(value, int | float) or (
        re.fullmatch(r"[\w./+\-$@%:]+", text) and not _NOT_TEXT.fullmatch(text)
    )
    if plain:
        return text
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)
    return '"' + re.sub(r"(\\+)\Z", r"\1\1", escaped) + '"'


def _lines(notes: Mapping[str, str]) -> list[str]:
    return [f"{key}: {text}" for key, text in notes.items()]


def _wrap(text: str, width: int) -> str:
    return textwrap.fill(text, max(width, 40), initial_indent="  ", subsequent_indent="    ") + "\n"

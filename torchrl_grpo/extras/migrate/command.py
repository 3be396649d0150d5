"""Prints the command line equivalent to a config of TRL, verl, AReaL, prime-rl or TorchRL.

    python -m torchrl_grpo.migrate train_trl.py --devices 8
    python -m torchrl_grpo.migrate run_qwen2-7b_math.sh
    python -m torchrl_grpo.migrate gsm8k_grpo.yaml

Below it stands what means something else and what has no counterpart. The file is read, never run.
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
_PLACE = re.compile(r"\$(HOME|PWD)\b")
_NO_TEXT = re.compile(r"true|false|null|none|nan|inf|[-+.\d][\d.e+\-_]*", re.IGNORECASE)


def main(
    arguments: Sequence[str] | None = None, file: IO[str] | None = None, width: int | None = None
) -> None:
    """Print the command line for a file, and what it cannot express.

    Args:
        arguments: of the command line; by default this process'.
        file: where to print; standard output by default.
        width: columns; those of the terminal by default.
    """
    parser = argparse.ArgumentParser(
        "python -m torchrl_grpo.migrate",
        description="Prints the command line that makes the same run as a config of another library.",
        epilog="FILE is "
        + "; ".join(read_table(name).what.replace("`", "") for name in NAMES)
        + ".",
    )
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="a config of another library; it is read, never run"
    )
    parser.add_argument("--devices", type=_count, metavar="N", help="TRL: processes of the run (1)")
    asked = parser.parse_args(arguments)
    try:
        made = translate(read(asked.file), str(asked.file), asked.devices)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    (file or sys.stdout).write(report(made, width or shutil.get_terminal_size().columns))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return int(text)


def report(made: Translation, width: int) -> str:
    """Return the text that is printed about a translation."""
    parts = [" \\\n    ".join(command(made)) + "\n"]
    lines = {
        f"Set these ({SET_ME} above): the file does not give their values": _lines(made.unset),
        f"Different meaning in {made.table.title}": [*_lines(made.differs), *made.table.differs],
        "No equivalent": _lines(made.lacks),
        "Ignored: not relevant here": [
            f"{why}: {', '.join(keys)}" for why, keys in made.ignored.items()
        ],
        "Unknown keys: check these yourself": [", ".join(made.unknown)],
    }
    for title, texts in lines.items():
        if any(texts):
            parts += [f"\n{title}\n", *(_wrapped(text, width) for text in texts)]
    return "".join(parts)


def command(made: Translation) -> list[str]:
    """Return the words of the command line, quoted for a shell."""
    script = "grpo-async.py" if made.asynchronous else "grpo.py"
    return [
        f"python sota/grpo/{script}",
        *(_quoted(f"{key}={_text(value)}") for key, value in made.overrides.items()),
    ]


def _quoted(word: str) -> str:
    """Quote a word for the shell, which still expands ``$HOME``."""
    if _PLAIN.fullmatch(word.replace("=", "")):
        return word
    return (
        '"' + re.sub(r'(["`\\])', r"\\\1", word) + '"' if _PLACE.search(word) else shlex.quote(word)
    )


def _text(value: Any) -> str:
    """Return a value as Hydra parses it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_text(one) for one in value) + "]"
    text = re.sub(r"^~(?=/)", "$HOME", str(value))
    plain = isinstance(value, int | float) or (
        re.fullmatch(r"[\w./+\-$@%:]+", text) and not _NO_TEXT.fullmatch(text)
    )
    if plain:
        return text
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)
    return '"' + re.sub(r"(\\+)\Z", r"\1\1", escaped) + '"'


def _lines(notes: Mapping[str, str]) -> list[str]:
    return [f"{key}: {text}" for key, text in notes.items()]


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, max(width, 40), initial_indent="  ", subsequent_indent="    ") + "\n"


if __name__ == "__main__":
    main()

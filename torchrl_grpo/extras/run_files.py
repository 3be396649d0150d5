"""Reads files in the folder of a run, which others may have written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from torchrl_grpo.host.files import thumbnail_name

_MOST_THUMBNAIL_BYTES = 1 << 17
"""More than a PNG file of 128 x 128 pixels has."""
_LONGEST_YAML = 300_000
"""Maximum length, which PyYAML reads in a few seconds. A run's config has a few thousand
characters.
"""


def open_inside(folder: Path, name: str) -> BinaryIO | None:
    """Open a file in a run's folder. Return None if it does not exist or is a link that leads out
    of the folder.
    """
    try:
        path = (folder / name).resolve(strict=True)
        if path.is_relative_to(folder.resolve()) and path.is_file():
            return path.open("rb")
    except (OSError, RuntimeError):  # missing, not readable, or a link to itself
        pass
    return None


def read_inside(folder: Path, name: str) -> str:
    """Return the text of a file in a run's folder; empty if ``open_inside`` returns None."""
    file = open_inside(folder, name)
    if file is None:
        return ""
    with file:
        return file.read().decode(errors="replace")


def read_thumbnail(folder: Path, image: str) -> bytes:
    """Return the thumbnail of the image with this hash, a PNG file; empty without one."""
    is_hash = re.fullmatch("[0-9a-f]{64}", image)
    file = open_inside(folder, thumbnail_name(image)) if is_hash else None
    if file is None:
        return b""
    with file:
        return file.read(_MOST_THUMBNAIL_BYTES)


class _PlainLoader(yaml.SafeLoader):
    """Loads YAML without aliases, by which a few lines can expand to more than fits into memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases")
        return super().compose_node(parent, index)


def load_yaml(text: str) -> Any:
    """Load a YAML file from a run's folder in bounded time and memory, because others may have
    written it.

    Raises:
        yaml.YAMLError: it cannot be loaded; the message says why.
    """
    if len(text) > _LONGEST_YAML:
        raise yaml.YAMLError(f"it has more than {_LONGEST_YAML:,} characters")
    try:
        return yaml.load(text, _PlainLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    # A malformed value, such as a date.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise yaml.YAMLError(str(error)) from error

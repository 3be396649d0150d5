"""Files of a run that may still grow. Nothing outside of the run's folder is ever opened."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from torchrl_grpo.host.files import open_inside


def changed_at(folder: Path, name: str) -> float:
    """When a file of a run was last written, in seconds since 1970; 0 where there is none."""
    file = open_inside(folder, name)
    if file is None:
        return 0.0
    with file:
        return os.fstat(file.fileno()).st_mtime


class Tail:
    """A jsonl file of a run, each line of which is read once.

    A run that is resumed writes the file anew, without the steps that it does again: then
    ``reopen`` says so, and all is read again. Until then the file that was opened stays open, so
    that a place in it keeps its meaning.

    Args:
        folder: of the run.
        name: of the file, which need not be there yet.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._end = 0
        self.file: BinaryIO | None = None

    def reopen(self) -> bool:
        """Whether the file was replaced; call it before ``rows``."""
        found = open_inside(self._folder, self._name)
        if found is None:
            return False
        now = os.fstat(found.fileno())
        if (
            self.file is not None
            and os.path.samestat(now, os.fstat(self.file.fileno()))
            and now.st_size >= self._end
        ):
            found.close()
            return False
        self.file = found
        self._end = 0
        return True

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Return new lines and their positions; a line without an end is left for later."""
        if self.file is None:
            return
        self.file.seek(self._end)
        for line in self.file:
            if not line.endswith(b"\n"):
                return
            start, self._end = self._end, self._end + len(line)
            yield start, line


def read_row(line: bytes) -> dict[str, Any]:
    """Parse a line as a mapping; empty if it is none, because a page shows what there is."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}

"""Files of a run that may still grow. Nothing outside the run's folder is ever opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from torchrl_grpo.extras.run_files import open_inside


def changed_at(folder: Path, name: str) -> float:
    """Return when a file of a run was last written, in Unix seconds; 0 if it does not exist."""
    file = open_inside(folder, name)
    if file is None:
        return 0.0
    with file:
        return os.fstat(file.fileno()).st_mtime


class Tail:
    """A jsonl file of a run, whose lines are read once.

    A resumed run rewrites the file without the steps that it repeats: then ``reopen`` returns True,
    and everything is read again. Until then the original file stays open, so that positions in it
    remain valid.

    Args:
        folder: of the run.
        name: name of the file, which need not exist yet.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._end = 0
        self.file: BinaryIO | None = None

    def reopen(self) -> bool:
        """Return whether the file was replaced. Call it before ``lines``."""
        file = open_inside(self._folder, self._name)
        if file is None:
            return False
        status = os.fstat(file.fileno())
        is_same = self.file is not None and os.path.samestat(status, os.fstat(self.file.fileno()))
        if is_same and status.st_size >= self._end:
            file.close()
            return False
        self.file = file
        self._end = 0
        return True

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield new lines with their positions; an incomplete line is left for later."""
        if self.file is None:
            return
        self.file.seek(self._end)
        for line in self.file:
            if not line.endswith(b"\n"):
                return
            start = self._end
            self._end += len(line)
            yield start, line

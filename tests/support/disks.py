"""File systems of a test's own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory on a new folder; skip the test where only root may."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # a log file there may be open

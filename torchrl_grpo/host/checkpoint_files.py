"""Checkpoints as files: which there are, whether they are whole, and their manifests. It imports nothing heavy.

A checkpoint is what ``torch.save`` writes, and after it a manifest (JSON), the manifest's length and a SHA-256 of all
of that. ``torch.load`` reads the file as if the rest were not there.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import IO, Any

_END = struct.Struct("<Q32s8s")
"""The manifest's length, the SHA-256, and what shows that they are there."""
_MARK = b"grpo-ck1"
_PART = 1 << 24
_CHECK = "sha256"
"""In a manifest, the checksum of the rest of it: it is read, and believed, before the whole file is."""


class SealedFile:
    """A file that is written front to back, by ``torch.save(state, sealed)``, and then sealed.

    Attributes:
        error: what ended a write.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.error: BaseException | None = None
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        try:
            self._hash.update(data)
            return self._file.write(data)
        except BaseException as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def seal(self, manifest: dict[str, Any]) -> None:
        """Writes the manifest and the checksum behind all that was written; nothing may be written after it."""
        text = json.dumps(manifest | {_CHECK: _digest(manifest)}).encode()
        self.write(text)
        self._hash.update(struct.pack("<Q", len(text)))
        self._file.write(_END.pack(len(text), self._hash.digest(), _MARK))


def checkpoints_in(directory: Path) -> list[Path]:
    """The files of a folder that are named like checkpoints, the one with the most steps first."""
    found = ((step, path) for path in directory.glob("checkpoint_*.pt") if (step := step_of(path)) is not None)
    return [path for _, path in sorted(found, reverse=True)]


def step_of(path: Path) -> int | None:
    """The step that a file's name says, None if it is not a checkpoint's name."""
    number = path.stem.removeprefix("checkpoint_")
    return int(number) if number.isdecimal() else None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: ``step``, ``config`` and ``metrics``. The rest of the file is not read.

    Raises:
        ValueError: the file has none.
    """
    with _opened(path) as file:
        start, length, _ = _end_of(path, file)
        file.seek(start)
        try:
            manifest = dict(json.loads(file.read(length)))
            if manifest.pop(_CHECK, None) != _digest(manifest):
                raise ValueError
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path.name} has a manifest that cannot be read") from error
    return manifest


def check_whole(path: Path) -> None:
    """Checks a checkpoint's checksum.

    Raises:
        ValueError: it has none, or a byte of the file is another than the one that was written.
    """
    hashed = hashlib.sha256()
    with _opened(path) as file:
        start, length, digest = _end_of(path, file)
        left = start + length + 8
        file.seek(0)
        while left and (part := file.read(min(left, _PART))):
            hashed.update(part)
            left -= len(part)
    if hashed.digest() != digest:
        raise ValueError(f"{path.name} is damaged: its contents do not have the checksum that they were written with")


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:  # a folder, a link to nothing, or not ours to read
        raise ValueError(f"{path.name} cannot be opened ({error.strerror})") from error


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _end_of(path: Path, file: IO[bytes]) -> tuple[int, int, bytes]:
    """Where the manifest starts, how long it is, and the checksum."""
    size = file.seek(0, 2)
    if size >= _END.size:
        file.seek(size - _END.size)
        length, digest, mark = _END.unpack(file.read(_END.size))
        if mark == _MARK and length <= size - _END.size:
            return size - _END.size - length, length, digest
    raise ValueError(f"{path.name} has no checksum: it is cut short, or something else wrote it")

"""Checkpoints as files: which there are, which one a run goes on from, whether they are whole, and their manifests.

Nothing heavy is imported here, so that what is refused is refused at once.

A checkpoint is what ``torch.save`` writes, and after it a manifest (JSON), the manifest's length and a SHA-256 of all
of that. ``torch.load`` reads the file as if the rest were not there.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.files import METRICS_FILE, read_jsonl

_END = struct.Struct("<Q32s8s")
"""The manifest's length, the SHA-256, and what shows that they are there."""
_MARK = b"grpo-ck1"
_PART = 1 << 24
_CHECK = "sha256"
"""In a manifest, the checksum of the rest of it: it is read, and believed, before the whole file is."""


AUTO = "auto"
"""``train.resume=auto``: the newest checkpoint in the run's own folder, or a fresh start."""
_MOST = 3
"""Damaged checkpoints that are named."""

_Read = TypeVar("_Read")


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


def saved_config(given: str | None, directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that a run goes on from, and the config in its manifest; None for a run that starts.

    Args:
        given: ``train.resume``.
        directory: of this run.

    Raises:
        ConfigError: there is no such checkpoint, or a run that starts would write into the folder of another one.
    """
    if given is None:
        check_unused(directory)
        return None
    return newest(given, directory, _read_config)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return dict(read_manifest(path)["config"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name} has no config that can be read") from error


def newest(given: str, directory: Path, read: Callable[[Path], _Read]) -> tuple[Path, _Read] | None:
    """The newest checkpoint that can be read, and what was read; None if ``auto`` finds no checkpoints.

    Args:
        given: ``train.resume``: a file, the folder of a run, or ``auto``.
        directory: of this run.
        read: raises ``ValueError`` where a checkpoint is not to be used.

    Raises:
        ConfigError: there is no such checkpoint, or none that can be read.
    """
    path = directory.resolve() if given == AUTO else Path(given).expanduser().resolve()
    if path.is_file():
        try:
            return path, read(path)
        except ValueError as error:
            raise ConfigError(
                f"train.resume={given} must be a whole checkpoint of this library, but {error}: give a "
                "checkpoint_*.pt, or the run's folder to have its latest whole one."
            ) from error
    if given == AUTO and (path / "checkpoints").exists() and not (path / "checkpoints").is_dir():
        raise ConfigError(
            f"hydra.run.dir={path} must have a folder {path / 'checkpoints'}, but that is a file: move it away, or use "
            "another folder."
        )
    reasons: dict[Path, str] = {}
    while candidates := [one for one in _checkpoints(path, given) if one not in reasons]:  # a live run replaces its own
        for candidate in candidates:
            try:
                return candidate, read(candidate)
            except ValueError as error:
                reasons[candidate] = str(error)
    if given == AUTO and not reasons:
        return None
    if given == AUTO:
        more = f" and {len(reasons) - _MOST} more" if len(reasons) > _MOST else ""
        raise ConfigError(
            f"train.resume=auto must find a checkpoint that is whole, but of those in {path / 'checkpoints'} none is: "
            f"{'; '.join([*reasons.values()][:_MOST])}{more}. Nothing is thrown away: to start afresh use another "
            "hydra.run.dir, or move that folder away."
        )
    found = (
        ("has none" if path.is_dir() else "does not exist")
        if not reasons
        else f"has none: {'; '.join(reasons.values())}"
    )
    raise ConfigError(
        f"train.resume={given} must be a checkpoint_*.pt, or a run's folder that has one, but it {found}: give such a "
        "path, or leave train.resume out to start a new run."
    )


def _checkpoints(path: Path, given: str) -> list[Path]:
    """The checkpoints of a run's folder or, unless it is the run's own, in the folder itself."""
    return [*checkpoints_in(path / "checkpoints"), *([] if given == AUTO else checkpoints_in(path))]


def check_unused(directory: Path) -> None:
    """Checks that the folder of a new run has no run in it: the files of two runs would be mixed.

    Raises:
        ConfigError: it has one.
    """
    saved = checkpoints_in(directory / "checkpoints")
    rows = read_jsonl(directory / METRICS_FILE)
    if saved or rows:
        what = f"{saved[0].name}" if saved else f"{len(rows)} rows of {METRICS_FILE}"
        raise ConfigError(
            f"hydra.run.dir={directory} must be a folder without a run, but it has {what}: use train.resume=auto to go "
            "on with that run, or another folder."
        )


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

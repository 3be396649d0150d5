"""Checkpoints as files: listing them, choosing the one to resume from, integrity checks, and
manifests.

Nothing heavy is imported here, so that what is refused is refused at once.

The checkpoint of one process is what ``torch.save`` writes, and after it a manifest (JSON), the
manifest's length and a SHA-256 of all of that. ``torch.load`` reads the file as if the rest were
not there.

The checkpoint of several ranks is a folder: the tensors as safetensors, each rank's part in files
of its own, all else in ``STATE``, and ``MANIFEST``, which has the size and SHA-256 of each file
too.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.files import METRICS_FILE, read_jsonl

_END = struct.Struct("<Q32s8s")
"""Trailer of the file: the manifest's length, the SHA-256, and a marker."""
_MARK = b"grpo-ck1"
_PART = 1 << 24
_LONGEST_MANIFEST = 1 << 26
_CHECK = "sha256"
"""Manifest entry with the checksum of its other entries, because the manifest is used before the
whole file is checked.
"""
MANIFEST = "manifest.json"
STATE = "state.pt"
_FILES = "files"
"""Manifest entry of a folder: size and SHA-256 of each file."""


AUTO = "auto"
"""``train.resume=auto``: the newest checkpoint in the run's own folder, or a fresh start."""
_MOST = 3
"""Damaged checkpoints that are named."""

_Read = TypeVar("_Read")


class SealedFile:
    """A file written front to back, by ``torch.save(state, sealed)``, and then sealed.

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
        """Append the manifest and the checksum; nothing may be written afterwards."""
        text = _with_digest(manifest)
        self.write(text)
        self._hash.update(struct.pack("<Q", len(text)))
        self._file.write(_END.pack(len(text), self._hash.digest(), _MARK))


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the paths in a folder with a checkpoint's name, the one with the most steps first."""
    steps = {
        path: step_of(path)
        for path in directory.glob("checkpoint_*")
        if path.suffix == ".pt" or is_sharded(path)
    }
    found = ((step, path) for path, step in steps.items() if step is not None)
    return [path for _, path in sorted(found, reverse=True)]


def is_sharded(path: Path) -> bool:
    """Whether a path is the checkpoint of several ranks; an exported model may be a folder of the
    same name.
    """
    return path.suffix == "" and any((path / name).exists() for name in (MANIFEST, STATE))


def remove(path: Path) -> None:
    """Remove a checkpoint; a partly removed folder no longer has a checkpoint's name."""
    if path.is_dir():
        path = path.rename(path.with_name(f"{path.name}.removed.tmp"))
        shutil.rmtree(path)
    else:
        path.unlink()


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name, None for other names."""
    number = path.stem.removeprefix("checkpoint_")
    return int(number) if number.isdecimal() else None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: ``step``, ``config`` and ``metrics``. Nothing else is read.

    Raises:
        ValueError: it has none.
    """
    if is_sharded(path):
        text = _read_bytes(path / MANIFEST, path)
    else:
        with _opened(path) as file:
            start, length, _ = _end_of(path, file)
            file.seek(start)
            text = file.read(length)
    try:
        manifest = dict(json.loads(text))
        if manifest.pop(_CHECK, None) != _digest(manifest):
            raise ValueError
        if not all(isinstance(manifest.get(name), dict) for name in ("config", "metrics")):
            raise ValueError
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path.name} has a manifest that cannot be read") from error
    return manifest


def write_manifest(
    folder: Path, manifest: Mapping[str, Any], files: Mapping[str, tuple[int, str]]
) -> None:
    """Writes the manifest of a checkpoint that is a folder.

    Args:
        folder: with all other files.
        manifest: ``step``, ``config`` and ``metrics``.
        files: size and SHA-256 of each file, by name (``measured``).
    """
    with (folder / MANIFEST).open("wb") as file:
        file.write(_with_digest({**manifest, _FILES: files}))
        file.flush()
        os.fsync(file.fileno())


def measured(path: Path) -> tuple[int, str]:
    """The size of a file in bytes, and its SHA-256."""
    hashed, length = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(_PART):
            hashed.update(part)
            length += len(part)
    return length, hashed.hexdigest()


def saved_config(given: str | None, directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint to resume from, and the config in its manifest; None for a new run.

    Args:
        given: ``train.resume``.
        directory: of this run.

    Raises:
        ConfigError: there is no such checkpoint, or a run that starts would write into the folder
            of another one.
    """
    if given is None:
        check_unused(directory)
        return None
    return newest(given, directory, _read_config)


def _read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_manifest(path)["config"]
    return config


def newest(given: str, directory: Path, read: Callable[[Path], _Read]) -> tuple[Path, _Read] | None:
    """Return the newest readable checkpoint, and the result of ``read``; None if ``auto`` finds no
    checkpoints.

    Args:
        given: ``train.resume``: a checkpoint, the folder of a run, or ``auto``.
        directory: of this run.
        read: raises ``ValueError`` where a checkpoint is not to be used.

    Raises:
        ConfigError: there is no such checkpoint, or none that can be read.
    """
    path = directory.resolve() if given == AUTO else Path(given).expanduser().resolve()
    if path.is_file() or is_sharded(path):
        try:
            return path, read(path)
        except ValueError as error:
            raise ConfigError(
                f"train.resume={given} must be a whole checkpoint of this library, but {error}: "
                "give another one, or the run's folder to have its latest whole one."
            ) from error
    if given == AUTO and (path / "checkpoints").exists() and not (path / "checkpoints").is_dir():
        raise ConfigError(
            f"hydra.run.dir={path} must have a folder {path / 'checkpoints'}, but that is a file: "
            "move it away, or use another folder."
        )
    reasons: dict[Path, str] = {}
    while candidates := [
        one for one in _checkpoints(path, given) if one not in reasons
    ]:  # a live run replaces its own
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
            "train.resume=auto must find a checkpoint that is whole, but of those in "
            f"{path / 'checkpoints'} none is: {'; '.join([*reasons.values()][:_MOST])}{more}. "
            "Nothing is thrown away: to start afresh use another hydra.run.dir, or move that "
            "folder away."
        )
    found = (
        ("has none" if path.is_dir() else "does not exist")
        if not reasons
        else f"has none: {'; '.join(reasons.values())}"
    )
    raise ConfigError(
        f"train.resume={given} must be a checkpoint, or a run's folder that has one, but it "
        f"{found}: give such a path, or leave train.resume out to start a new run."
    )


def _checkpoints(path: Path, given: str) -> list[Path]:
    """Return the checkpoints of a run's folder or, if the path is not one, of the folder itself."""
    return [*checkpoints_in(path / "checkpoints"), *([] if given == AUTO else checkpoints_in(path))]


def check_unused(directory: Path) -> None:
    """Refuse a folder that already has a run: the files of two runs would be mixed.

    Raises:
        ConfigError: it has one.
    """
    saved = checkpoints_in(directory / "checkpoints")
    rows = read_jsonl(directory / METRICS_FILE)
    if saved or rows:
        what = f"{saved[0].name}" if saved else f"{len(rows)} rows of {METRICS_FILE}"
        raise ConfigError(
            f"hydra.run.dir={directory} must be a folder without a run, but it has {what}: use "
            "train.resume=auto to go on with that run, or another folder."
        )


def check_whole(path: Path) -> None:
    """Verify a checkpoint's checksums.

    Raises:
        ValueError: it has none, or a byte is another than the one that was written.
    """
    if is_sharded(path):
        _check_files(path)
        return
    hashed = hashlib.sha256()
    with _opened(path) as file:
        start, length, digest = _end_of(path, file)
        left = start + length + 8
        file.seek(0)
        while left and (part := file.read(min(left, _PART))):
            hashed.update(part)
            left -= len(part)
    if hashed.digest() != digest:
        raise ValueError(
            f"{path.name} is damaged: its contents do not have the checksum that they were written "
            "with"
        )


def check_stored(path: Path) -> None:
    """Check that a state's file is not compressed: it might be unpacked to any size.

    Raises:
        ValueError: it is.
        BadZipFile: it is no file of ``torch.save``.
    """
    sharded = is_sharded(path)
    with _opened(path / STATE if sharded else path) as file:
        length = 0 if sharded else _end_of(path, file)[0]  # 0 is the whole file
        with (
            mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ) as state,
            zipfile.ZipFile(cast(IO[bytes], state)) as members,
        ):
            if any(member.compress_type != zipfile.ZIP_STORED for member in members.infolist()):
                raise ValueError("its tensors are compressed")


def _check_files(path: Path) -> None:
    """Check that the files of a folder are those of its manifest."""
    files = read_manifest(path).get(_FILES)
    there = {file.name for file in path.iterdir()} - {MANIFEST}
    if any(file.is_symlink() or not file.is_file() for file in path.iterdir()):
        raise ValueError(
            f"{path.name} must have files of its own, and has a link or something else"
        )
    if not isinstance(files, dict) or files.keys() != there:
        raise ValueError(
            f"{path.name} is damaged: it does not have the files that it was written with"
        )
    with ThreadPoolExecutor() as pool:
        try:
            for name, found in zip(
                files, pool.map(measured, [path / name for name in files]), strict=True
            ):
                if files[name] != [*found]:
                    raise ValueError(
                        f"{path.name} is damaged: {name} does not have the checksum that it was "
                        "written with"
                    )
        except OSError as error:
            raise ValueError(f"{path.name} cannot be read ({error.strerror})") from error


def _read_bytes(file: Path, checkpoint: Path) -> bytes:
    if file.exists() and not file.is_file():
        raise ValueError(f"{checkpoint.name} has a {file.name} that is no file")
    if file.exists() and file.stat().st_size > _LONGEST_MANIFEST:
        raise ValueError(f"{checkpoint.name} has a {file.name} of {file.stat().st_size} bytes")
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{checkpoint.name} has no {file.name} that can be opened ({error.strerror})"
        ) from error


def _opened(path: Path) -> IO[bytes]:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is no file")  # a pipe would never end
    try:
        return path.open("rb")
    except OSError as error:  # a folder, a link to nothing, or not ours to read
        raise ValueError(f"{path.name} cannot be opened ({error.strerror})") from error


def _with_digest(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest | {_CHECK: _digest(manifest)}).encode()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _end_of(path: Path, file: IO[bytes]) -> tuple[int, int, bytes]:
    """Return the manifest's offset and length, and the checksum."""
    size = file.seek(0, 2)
    if size >= _END.size:
        file.seek(size - _END.size)
        length, digest, mark = _END.unpack(file.read(_END.size))
        if mark == _MARK and length <= min(size - _END.size, _LONGEST_MANIFEST):
            return size - _END.size - length, length, digest
    raise ValueError(f"{path.name} has no checksum: it is cut short, or something else wrote it")

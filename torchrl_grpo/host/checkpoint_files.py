"""Checkpoints on disk: listing them, choosing the one to resume from, integrity checks, and
manifests.

This module imports nothing heavy, so that a bad checkpoint is refused at once.

A checkpoint is a folder: each rank's tensors in its own safetensors files, everything else in
``STATE``, and ``MANIFEST``, which also lists the size and SHA-256 of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.files import METRICS_FILE, read_jsonl

_MAX_MANIFEST_BYTES = 1 << 26
_CHECK = "sha256"
"""Manifest entry with the checksum of the other entries: the manifest is used before the whole
checkpoint is verified.
"""
MANIFEST = "manifest.json"
STATE = "state.pt"
_FILES = "files"
"""Manifest entry with the size and SHA-256 of each file."""

AUTO = "auto"
"""``train.resume=auto``: the newest checkpoint in the run's own folder, or a fresh start."""
_MAX_NAMED = 3
"""Maximum number of damaged checkpoints that a message names."""

_Read = TypeVar("_Read")


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the checkpoints in a folder, latest step first."""
    steps = [
        (step, path)
        for path in directory.glob("checkpoint_*")
        if (step := step_of(path)) is not None and is_checkpoint(path)
    ]
    return [path for _, path in sorted(steps, reverse=True)]


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, perhaps a damaged one."""
    return any((path / name).exists() for name in (MANIFEST, STATE))


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first: a partly removed one must not look whole."""
    shutil.rmtree(path.rename(path.with_name(f"{path.name}.removed.tmp")))


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None for other names."""
    number = path.name.removeprefix("checkpoint_")
    return int(number) if number.isdecimal() else None


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest (``step``, ``config`` and ``metrics``) and nothing else.

    Raises:
        ValueError: the checkpoint has no readable manifest.
    """
    if path.is_file():
        raise ValueError(
            f"{path.name} is a file, and checkpoints are folders "
            f"(python tools/convert_checkpoint.py {path} converts an older version's)"
        )
    try:
        if not (path / MANIFEST).is_file():  # reading a pipe would never end
            raise ValueError(f"{path.name} has no {MANIFEST}")
        length = (path / MANIFEST).stat().st_size
        if length > _MAX_MANIFEST_BYTES:
            raise ValueError(f"{path.name} has a {MANIFEST} of {length} bytes")
        text = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise ValueError(f"{path.name}/{MANIFEST} cannot be read ({error.strerror})") from error
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
    """Write the manifest of a checkpoint.

    Args:
        folder: contains all other files already.
        manifest: ``step``, ``config`` and ``metrics``.
        files: size and SHA-256 of each file (``sizes_and_sha256``).
    """
    entries = {**manifest, _FILES: files}
    with (folder / MANIFEST).open("wb") as file:
        file.write(json.dumps(entries | {_CHECK: _digest(entries)}).encode())
        file.flush()
        os.fsync(file.fileno())


def sizes_and_sha256(paths: Sequence[Path]) -> dict[str, tuple[int, str]]:
    """Return the size in bytes and the SHA-256 of each file, by name."""
    with ThreadPoolExecutor() as pool:
        measured = pool.map(_size_and_sha256, paths)
        return dict(zip((path.name for path in paths), measured, strict=True))


def _size_and_sha256(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def saved_config(resume: str | None, directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint to resume from and the config in its manifest; None for a new run.

    Args:
        resume: ``train.resume``.
        directory: folder of this run.

    Raises:
        ConfigError: there is no such checkpoint, or a new run would write into the folder of
            another run.
    """
    if resume is None:
        check_unused(directory)
        return None
    return newest(resume, directory, lambda path: read_manifest(path)["config"])


def newest(
    resume: str, directory: Path, read: Callable[[Path], _Read]
) -> tuple[Path, _Read] | None:
    """Return the newest readable checkpoint and the result of ``read``; None if ``auto`` finds no
    checkpoints.

    Args:
        resume: ``train.resume``: a checkpoint, the folder of a run, or ``auto``.
        directory: folder of this run.
        read: raises ``ValueError`` if a checkpoint must not be used.

    Raises:
        ConfigError: there is no such checkpoint, or none is readable.
    """
    auto = resume == AUTO
    path = directory.resolve() if auto else Path(resume).expanduser().resolve()
    if path.is_file() or is_checkpoint(path):
        try:
            return path, read(path)
        except ValueError as error:
            raise ConfigError(
                f"train.resume={resume} must be a complete checkpoint of this library, but {error}: "
                "give another one, or the run's folder for its latest complete one."
            ) from error
    folders = [path / "checkpoints"] if auto else [path / "checkpoints", path]
    if auto and folders[0].exists() and not folders[0].is_dir():
        raise ConfigError(
            f"hydra.run.dir={path} must have a folder {folders[0]}, but that is a file: move it "
            "away, or use another folder."
        )
    reasons: dict[Path, str] = {}
    while candidates := [
        checkpoint
        for folder in folders
        for checkpoint in (*checkpoints_in(folder), *folder.glob("checkpoint_*.pt"))
        if checkpoint not in reasons
    ]:  # listed again after failures, because a live run replaces its checkpoints
        for checkpoint in candidates:
            try:
                return checkpoint, read(checkpoint)
            except ValueError as error:
                reasons[checkpoint] = str(error)
    if auto and not reasons:
        return None
    damage = list(reasons.values())
    if auto:
        more = f" and {len(damage) - _MAX_NAMED} more" if len(damage) > _MAX_NAMED else ""
        raise ConfigError(
            f"train.resume=auto must find a complete checkpoint, but {folders[0]} has none: "
            f"{'; '.join(damage[:_MAX_NAMED])}{more}. Nothing is deleted: to start over, use "
            "another hydra.run.dir, or move that folder away."
        )
    problem = "has none" if path.is_dir() else "does not exist"
    if damage:
        problem = f"has none: {'; '.join(damage)}"
    raise ConfigError(
        f"train.resume={resume} must be a checkpoint, or a run's folder that has one, but it "
        f"{problem}: use the path of one."
    )


def check_unused(directory: Path) -> None:
    """Refuse a folder that already has a run, whose files would be mixed with a new run's.

    Raises:
        ConfigError: the folder has checkpoints or metrics.
    """
    checkpoints = checkpoints_in(directory / "checkpoints")
    rows = read_jsonl(directory / METRICS_FILE)
    if checkpoints or rows:
        what = checkpoints[0].name if checkpoints else f"{len(rows)} rows of {METRICS_FILE}"
        raise ConfigError(
            f"hydra.run.dir={directory} must be a folder without a run, but it has {what}: use "
            "train.resume=auto to continue that run, or another folder."
        )


def check_whole(path: Path) -> None:
    """Check that a checkpoint has the files in its manifest, unchanged, and nothing else.

    Raises:
        ValueError: it does not.
    """
    files = read_manifest(path).get(_FILES)
    entries = list(path.iterdir())
    if any(entry.is_symlink() or not entry.is_file() for entry in entries):
        raise ValueError(
            f"{path.name} must contain only regular files of its own, but has a link or something else"
        )
    names = {entry.name for entry in entries} - {MANIFEST}
    if not isinstance(files, dict) or files.keys() != names:
        raise ValueError(
            f"{path.name} is damaged: it does not have the files that it was written with"
        )
    try:
        measured = sizes_and_sha256([path / name for name in files])
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read ({error.strerror})") from error
    for name, actual in measured.items():
        if files[name] != [*actual]:
            raise ValueError(
                f"{path.name} is damaged: {name} does not have the checksum that it was "
                "written with"
            )


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()

"""The folder of a run: each start gets its own, and only one process at a time writes to it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from torchrl_grpo.errors import ConfigError

LOCK_FILE = ".lock"
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without ``flock``, such as some mounts of NFS and Lustre."""

_OWN_FILES = (
    ".lock",
    *(f"*.{end}" for end in ("json", "jsonl", "tmp", "log", "html", "png", "txt", "yaml")),
    *(
        "checkpoints",
        "checkpoints/*",
        "images",
        "images/*",
        "tensorboard",
        "wandb",
        "trackio",
        "mlflow",
        "mlflow/*",
        "*/run_id",
    ),
    *(".hydra", ".hydra/*", "*/.hydra", "*/.hydra/*"),
)
"""Files that runs and sweeps write into their folders."""

_open_files: set[int] = set()


def _close_in_child() -> None:
    """Close the locks' files in a forked child, which would otherwise keep the locks."""
    while _open_files:
        os.close(_open_files.pop())


os.register_at_fork(after_in_child=_close_in_child)


def numbered(path: Path) -> Iterator[Path]:
    """Yield the path, then its siblings ``NAME-2``, ``NAME-3`` and so on."""
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")


def claim(folder: Path) -> Path:
    """Create a new folder and return it: the first of ``numbered(folder)`` whose name is free."""
    for candidate in numbered(folder):
        with suppress(FileExistsError):
            candidate.mkdir(parents=True)
            break
    return candidate


def absent(folder: Path) -> list[Path]:
    """Return the missing folders of a path, innermost first, including itself."""
    return list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))


def remove_unused(new_folders: Sequence[Path], names: Iterable[str]) -> None:
    """Remove the folder of a refused start and the parents that the start created.

    Args:
        new_folders: see ``absent``; they exist by now.
        names: files and folders that may be in the first; with anything else in it, it stays.
    """
    folder, *parents = new_folders
    if {path.name for path in folder.iterdir()} <= {*names}:
        shutil.rmtree(folder)
        with suppress(OSError):  # another start has created a folder next to it
            for parent in parents:
                parent.rmdir()


def check_own_files(folder: Path) -> None:
    """Check that a run writes only into its own folder, which others may have prepared.

    Raises:
        ConfigError: a link leads out of the folder, or a pipe or a device is in place of a file.
    """
    root = folder.resolve()
    for path in itertools.chain.from_iterable(map(folder.glob, _OWN_FILES)):
        with suppress(OSError, RuntimeError):  # a link to itself
            target = path.resolve()
            is_usual = target.is_file() or target.is_dir() or not target.exists()
            if is_usual and target.is_relative_to(root):
                continue
        raise ConfigError(
            f"{folder} must contain only files of its own, but {path} is a link that leads out of "
            "it, or not a file: remove it, or use another folder."
        )


class FolderLock(AbstractContextManager["FolderLock"]):
    """Lock on the folder of a run, held from construction to ``close``, which can be called
    repeatedly.

    The kernel releases it when this process ends, however it ends, and child processes do not
    inherit it. On a file system without ``flock`` the lock is the file itself, which names the host
    and process that created it; it is taken over if that process ran on this host and has ended.
    Reading the folder needs no lock.

    Args:
        folder: created if it does not exist.

    Raises:
        ConfigError: another process holds the lock, the folder is not writable, or its files are
            links to elsewhere.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.abspath(folder))
        self._pid = os.getpid()
        self._file: int | None = None
        check_own_files(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self._lock()
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise self._unwritable(error) from error
        except OSError as error:
            if error.errno == errno.EROFS:
                raise self._unwritable(error) from error
            raise

    def close(self) -> None:
        """Release the lock."""
        if self._file is None or self._pid != os.getpid():
            return
        if self._is_current(self._file):
            os.unlink(self.folder / LOCK_FILE)
        self._close(self._file)
        self._file = None

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lock(self) -> int:
        """Take the lock; return the descriptor of its file."""
        while True:
            file, created = self._open()
            try:
                if self._take(file, created):
                    os.ftruncate(file, 0)
                    os.pwrite(
                        file,
                        f"{socket.gethostname()} {self._pid} {_start_time(self._pid)}\n".encode(),
                        0,
                    )
                    return file
            except BaseException:
                self._close(file)
                raise
            self._close(file)

    def _open(self) -> tuple[int, bool]:
        """Open the lock's file; return its descriptor and whether it was created now."""
        for flags in itertools.cycle((os.O_CREAT | os.O_EXCL, 0)):
            with suppress(FileExistsError, FileNotFoundError):
                file = os.open(self.folder / LOCK_FILE, os.O_RDWR | flags, 0o644)
                _open_files.add(file)
                return file, flags != 0
        raise AssertionError("unreachable")

    def _take(self, file: int, created: bool) -> bool:
        """Take the lock through an open file; return False if the file is gone, to try again."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._is_current(file)
        except BlockingIOError:
            raise self._held_error(file, "") from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
        if not created and not self._is_stale(file):
            raise self._held_error(
                file, f" If that process has ended, remove {self.folder / LOCK_FILE}."
            )
        if not created and self._is_current(file):
            os.unlink(self.folder / LOCK_FILE)
        return created

    def _is_current(self, file: int) -> bool:
        """Return whether an open file is still the one in the folder."""
        try:
            return os.path.samestat(os.stat(self.folder / LOCK_FILE), os.fstat(file))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _is_stale(self, file: int) -> bool:
        """Return whether the process named in a file ran on this host and has ended."""
        holder = os.pread(file, 1000, 0).decode(errors="replace").split()
        return (
            len(holder) == 3
            and holder[0] == socket.gethostname()
            and holder[2] != _start_time(holder[1])
        )

    def _held_error(self, file: int, hint: str) -> ConfigError:
        holder = os.pread(file, 1000, 0).decode(errors="replace").split()
        owner = (
            f"process {holder[1]} on host {holder[0]}" if len(holder) == 3 else "another process"
        )
        return ConfigError(
            f"hydra.run.dir={self.folder} must be a folder that no other run writes to, but "
            f"{owner} does: wait until it ends, or end it, or use another folder.{hint}"
        )

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"hydra.run.dir={self.folder} must be a writable folder, but it is not "
            f"({error.strerror}): use another folder."
        )

    @staticmethod
    def _close(file: int) -> None:
        _open_files.discard(file)
        os.close(file)


def _start_time(pid: int | str) -> str:
    """Return the start time of a process on this host, in kernel ticks, which distinguishes
    processes that reuse a pid. A process for which nobody waited has ended too.
    """
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state != "Z":
            return fields[18]
    return "ended"

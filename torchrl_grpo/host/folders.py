"""The folder of a run: each start gets its own, and only one process at a time writes to it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from torchrl_grpo.errors import ConfigError, RunLostError

LOCK_FILE = ".lock"
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without ``flock``, such as some mounts of NFS and Lustre."""

_WRITTEN = (
    ".lock",
    *(f"*.{end}" for end in ("json", "jsonl", "tmp", "log", "html", "png", "txt", "yaml")),
    *(
        "checkpoints",
        "checkpoints/*",
        "tensorboard",
        "wandb",
        "trackio",
        "mlflow",
        "mlflow/*",
        "*/run_id",
    ),
    *(".hydra", ".hydra/*", "*/.hydra", "*/.hydra/*"),
)
"""What runs and sweeps write into their folders."""

_open: set[int] = set()


def _close_in_child() -> None:
    """Close the locks' files in a forked child, which would otherwise keep the locks."""
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_in_child)


def numbered(path: Path) -> Iterator[Path]:
    """Yield the path, and after it ``NAME-2``, ``NAME-3`` and so on beside it."""
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")


def claim(folder: Path) -> Path:
    """Make a new folder and return it: the first of ``numbered(folder)`` whose name is free."""
    for claimed in numbered(folder):
        with suppress(FileExistsError):
            claimed.mkdir(parents=True)
            break
    return claimed


def absent(folder: Path) -> list[Path]:
    """Return the folders that must be created for a folder to exist, itself included, the innermost
    first.
    """
    return list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))


def check_own_files(folder: Path) -> None:
    """Check that what a run writes stays in its folder, which may come from others.

    Raises:
        ConfigError: a link leads out of it, or there is a pipe or a device in place of a file.
    """
    root = folder.resolve()
    for path in itertools.chain.from_iterable(map(folder.glob, _WRITTEN)):
        with suppress(OSError, RuntimeError):  # a link to itself
            target = path.resolve()
            if target.is_relative_to(root) and (
                target.is_file() or target.is_dir() or not target.exists()
            ):
                continue
        raise ConfigError(
            f"{folder} must have files of its own, but {path} is a link that leads out of it, or no file: remove that, "
            "or use another folder."
        )


class FolderLock(AbstractContextManager["FolderLock"]):
    """Lock on the folder of a run, held from construction to ``close``, which may be called again.

    The kernel ends it with this process, however that ends, and child processes do not keep it. On
    a file system without ``flock`` the lock is the file alone, with the host and process that made
    it: it is taken over from a process of this host that has ended. Reading the folder needs no
    lock.

    Args:
        folder: made when it is not there.

    Raises:
        ConfigError: another process holds the lock, or the folder cannot be written to, or its
            files are elsewhere.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.abspath(folder))
        self._pid = os.getpid()
        self._file: int | None = None
        check_own_files(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self._locked()
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise self._unwritable(error) from error
        except OSError as error:
            if error.errno == errno.EROFS:
                raise self._unwritable(error) from error
            raise

    def check_in_place(self) -> None:
        """Check that the folder, with the lock, is still at its path.

        Raises:
            RunLostError: it was moved or removed.
        """
        if self._file is None or not self._is_current(self._file):
            raise RunLostError(
                f"hydra.run.dir={self.folder} must stay in place while a run writes to it, but it "
                f"or its {LOCK_FILE} was moved or removed: the run ends here. Resume from its last "
                "checkpoint."
            )

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

    def _locked(self) -> int:
        """Take the lock; return its file."""
        while True:
            file, made = self._opened()
            try:
                if self._is_taken(file, made):
                    os.ftruncate(file, 0)
                    os.pwrite(
                        file,
                        f"{socket.gethostname()} {self._pid} {_started(self._pid)}\n".encode(),
                        0,
                    )
                    return file
            except BaseException:
                self._close(file)
                raise
            self._close(file)

    def _opened(self) -> tuple[int, bool]:
        """Open the lock's file; return it and whether it was created here."""
        for flags in itertools.cycle((os.O_CREAT | os.O_EXCL, 0)):
            with suppress(FileExistsError, FileNotFoundError):
                file = os.open(self.folder / LOCK_FILE, os.O_RDWR | flags, 0o644)
                _open.add(file)
                return file, flags != 0
        raise AssertionError("unreachable")

    def _is_taken(self, file: int, made: bool) -> bool:
        """Take the lock by an open file; False if that file is gone and another try is needed."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._is_current(file)
        except BlockingIOError:
            raise self._held(file, "") from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
        if not made and not self._is_stale(file):
            raise self._held(file, f" If that process has ended, remove {self.folder / LOCK_FILE}.")
        if not made and self._is_current(file):
            os.unlink(self.folder / LOCK_FILE)
        return made

    def _is_current(self, file: int) -> bool:
        """Whether an open file is still the one in the folder."""
        try:
            return os.path.samestat(os.stat(self.folder / LOCK_FILE), os.fstat(file))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _is_stale(self, file: int) -> bool:
        """Whether the process named in a file ran on this host and has ended."""
        holder = os.pread(file, 1000, 0).decode(errors="replace").split()
        return (
            len(holder) == 3
            and holder[0] == socket.gethostname()
            and holder[2] != _started(holder[1])
        )

    def _held(self, file: int, then: str) -> ConfigError:
        holder = os.pread(file, 1000, 0).decode(errors="replace").split()
        who = f"process {holder[1]} on host {holder[0]}" if len(holder) == 3 else "another process"
        return ConfigError(
            f"hydra.run.dir={self.folder} must be a folder that no other run writes to, but {who} "
            f"does: wait until it ends, or end it, or use another folder.{then}"
        )

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"hydra.run.dir={self.folder} must be a folder that can be written to, but it cannot "
            f"({error.strerror}): use another folder."
        )

    @staticmethod
    def _close(file: int) -> None:
        _open.discard(file)
        os.close(file)


def _started(pid: int | str) -> str:
    """Start time of a process of this host, in kernel ticks: it distinguishes processes that reuse
    a pid.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "ended"

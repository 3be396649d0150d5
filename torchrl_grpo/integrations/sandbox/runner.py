"""Runs a Python program in a process with limits and, if the kernel allows it, in namespaces:
without a network, and with a file system that contains only Python, the program, and an empty
``/tmp``.

``docs/security.md`` lists what this does not prevent.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Isolation = Literal["namespaces", "limits"]

_HERE = Path(__file__).parent
_CHUNK = 2**16
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 120.0
"""Timeout for creating a sandbox, on a busy machine."""
_ROOT = """\
set -e
mount -t tmpfs -o size={size},nr_inodes=4096,mode=755 tmpfs {root}
mkdir -p {root}/tmp {root}/dev {root}/program
chmod 1777 {root}/tmp
for place in {places}; do
  mkdir -p {root}"$place"
  mount --rbind "$place" {root}"$place"
  mount -o remount,bind,ro,nosuid,nodev {root}"$place"
done
for link in /bin /lib /lib64; do
  if [ -L "$link" ]; then ln -s "$(readlink "$link")" {root}"$link"; fi
done
for device in null zero urandom; do
  touch {root}/dev/$device
  mount --bind /dev/$device {root}/dev/$device
done
ln -s /tmp {root}/dev/shm
mount --bind {folder} {root}/program
mount -o remount,bind,ro,nosuid,nodev {root}/program
mount -o remount,bind,ro,nosuid,nodev {root}
mount -t tmpfs -o size={size},nr_inodes=4096,mode=1777 tmpfs {root}/tmp
unset PWD OLDPWD
set -- setpriv {identity} --pdeathsig=KILL --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
exec chroot {root} "$@"
"""
"""Shell script for a separate file system in which nothing can be mounted and from which no other
one can be reached: its processes have no capabilities, and the kernel creates no user namespace in
a ``chroot``. There is no ``/proc``, whose files root could write to.
"""
_NAMESPACES = ("--net", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program.

    Attributes:
        seconds: CPU time of a test, or wall-clock time of each piece of code in a ``Session``.
        memory: bytes of each process's address space.
        processes: processes and threads of the program in namespaces, otherwise of the user.
        file: bytes of each file; in namespaces also of all files together.
        output: bytes of output.
    """

    seconds: float = 10.0
    memory: int = 2**29
    processes: int = 32
    file: int = 2**25
    output: int = 2**20


@cache
def _missing_namespaces() -> str:
    """Return why programs cannot have namespaces on this machine; empty if they can."""
    if sys.platform != "linux":
        return f"this is {sys.platform}"
    for tool in ("unshare", "setpriv", "mount", "chroot"):
        if not shutil.which(tool, path=_PATH):
            return f"there is no {tool} in {_PATH}"
    try:
        with start_program(
            "print(6 * int(input()), flush=True)", Limits(), "namespaces"
        ) as process:
            answer = process.ask(7, START_S)
    except (OSError, EndedError, TimeoutError) as error:
        return str(error)
    return "" if answer == 42 else f"a program printed {answer!r:.80}"


def isolation() -> Isolation:
    """Return the isolation of programs on this machine: ``"namespaces"``, or only ``"limits"``."""
    return "limits" if _missing_namespaces() else "namespaces"


def require_isolation(sandbox: str) -> Isolation:
    """Return ``isolation``; refuse to run programs without the required one.

    Args:
        sandbox: ``"auto"`` uses what the machine offers, ``"strict"`` requires namespaces.

    Raises:
        ValueError: it is something else.
        RuntimeError: there are no namespaces.
    """
    if sandbox not in ("auto", "strict"):
        raise ValueError(f"sandbox={sandbox} must be auto or strict: for example, strict.")
    if sandbox == "strict" and isolation() != "namespaces":
        raise RuntimeError(
            "sandbox=strict needs namespaces for programs, which could not be created "
            f"({_missing_namespaces()}): use Linux with util-linux and user namespaces (in Docker "
            "--security-opt seccomp=unconfined), or sandbox=auto, which runs them with limits "
            "only: they can read files and use the network."
        )
    return isolation()


class EndedError(RuntimeError):
    """A program has exited, or sent an invalid answer."""


class Process:
    """A program that answers each line with a line.

    Attributes:
        pid: its process id.

    Args:
        process: process with pipes.
        limits: limits; ``output`` applies to each answer.
    """

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits) -> None:
        assert process.stdin and process.stdout
        self.pid = process.pid
        self._stdin = process.stdin.fileno()
        self._stdout = process.stdout.fileno()
        self._max_bytes = 8 * limits.output
        os.set_blocking(self._stdin, False)

    def ask(self, message: Any, seconds: float) -> Any:
        """Send a message, and return the answer; both are JSON.

        Raises:
            TimeoutError: it did not answer in time.
            EndedError: it has exited, or sent an invalid answer.
        """
        try:
            return json.loads(self.line(seconds, json.dumps(message).encode() + b"\n"))
        except (ValueError, RecursionError) as error:
            raise EndedError("it sent an invalid answer") from error

    def line(self, seconds: float, data: bytes = b"") -> bytes:
        """Send data, and return the line that it sends; raises the errors of ``ask``."""
        deadline = time.monotonic() + seconds
        answer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            if data:
                selector.register(self._stdin, selectors.EVENT_WRITE)
            while not answer.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready or time.monotonic() > deadline:
                    raise TimeoutError(f"it took longer than {seconds:g} s")
                for key, _ in ready:
                    if key.fd == self._stdin:
                        data = self._write(data)
                        if not data:
                            selector.unregister(self._stdin)
                        continue
                    chunk = os.read(self._stdout, _CHUNK)
                    answer += chunk
                    if not chunk:
                        raise EndedError("it has ended")
                    if len(answer) > self._max_bytes:
                        raise EndedError("it sent too much")
        return bytes(answer)

    def _write(self, data: bytes) -> bytes:
        """Write some of the data; return the rest, or nothing if the program no longer reads."""
        try:
            return data[os.write(self._stdin, data[:_CHUNK]) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""


@cache
def _starter(pid: int) -> ThreadPoolExecutor:
    """Return the executor whose one thread starts sandboxes: the kernel ends them with it."""
    return ThreadPoolExecutor(1, "sandboxes")


@contextmanager
def start_program(
    program: str, limits: Limits, isolated: Isolation, cpu_s: float = 3600.0
) -> Iterator[Process]:
    """Start a program, and wait until its sandbox exists; at the end it is killed with all its
    descendants.

    Args:
        program: source of the program.
        limits: limits on its resources; the reader of its output limits the time.
        isolated: isolation that the machine offers.
        cpu_s: CPU time of each of its processes.

    Raises:
        OSError: the process or its sandbox cannot be created.
    """
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        source = folder / "program"
        for path in (source, folder / "root", folder / "tmp"):
            path.mkdir()
        (source / "program.py").write_text(program, encoding="utf-8", errors="replace")
        shutil.copyfile(_HERE / "start.py", source / "start.py")
        process = (
            _starter(os.getpid())
            .submit(
                subprocess.Popen,
                _command(folder, limits, isolated, cpu_s),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,  # until the sandbox exists
                bufsize=0,  # so that nothing is left to write when it is closed
                cwd=folder / "tmp",
                env={
                    "PATH": _PATH,
                    "LANG": "C.UTF-8",
                    "TMPDIR": "/tmp" if isolated == "namespaces" else str(folder / "tmp"),
                },
                start_new_session=True,
            )
            .result()
        )
        assert process.stderr
        try:
            answering = Process(process, limits)
            try:
                answering.line(START_S)
            except (EndedError, TimeoutError) as error:
                os.set_blocking(process.stderr.fileno(), False)
                reason = (process.stderr.read(2000) or b"").decode(errors="replace").strip()
                raise OSError(
                    f"the sandbox of a program could not be created: {reason or error}"
                ) from error
            if isolated == "namespaces":  # nothing is left if this process is killed
                shutil.rmtree(folder, ignore_errors=True)
            yield answering
        finally:
            with suppress(ProcessLookupError):  # a PID namespace ends with its first process
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                with suppress(OSError):
                    stream.close()  # type: ignore[union-attr]


def _command(folder: Path, limits: Limits, isolated: Isolation, cpu_s: float) -> list[str]:
    """Return the command line that creates the sandbox of a program in a folder and starts it."""
    inside = isolated == "namespaces"
    python = os.path.realpath(sys.executable)
    source = folder / "program"
    place = Path("/program") if inside else source
    settings = {
        "program": str(place / "program.py"),
        "strict": inside,
        "limits": {
            "CPU": int(cpu_s),
            "AS": limits.memory,
            "NPROC": limits.processes if inside else 4096,
            "FSIZE": limits.file,
            "NOFILE": 64,
            "CORE": 0,
            "STACK": 2**26,
            "MSGQUEUE": 0,
            "SIGPENDING": 1024,
        },
    }
    command = [python, "-I", "-S", "-B", str(place / "start.py"), json.dumps(settings)]
    if not inside:
        return command
    identity = ""
    own_user = ["--user", "--map-root-user"]
    if os.geteuid() == 0:
        # Its own user, because the limit on processes is per user; two runs may have the same seed.
        user = 10**6 + secrets.randbelow(2**31 - 10**6)
        identity = f"--reuid={user} --regid={user} --clear-groups"
        own_user = []
    script = _ROOT.format(
        root=shlex.quote(str(folder / "root")),
        folder=shlex.quote(str(source)),
        size=limits.file,
        places=shlex.join(_places(python)),
        identity=identity,
    )
    # The sandbox ends with this process, even by SIGKILL.
    return [
        "setpriv",
        "--pdeathsig=KILL",
        "unshare",
        *own_user,
        *_NAMESPACES,
        "sh",
        "-c",
        script,
        "sh",
        *command,
    ]


def _places(python: str) -> list[str]:
    """Return the folders that Python needs, without nested ones."""
    places = {"/usr", sys.base_prefix, str(Path(python).parent.parent)}
    places |= {lib for lib in ("/lib", "/lib64") if os.path.isdir(lib) and not os.path.islink(lib)}
    return sorted(place for place in places if not places & set(map(str, Path(place).parents)))

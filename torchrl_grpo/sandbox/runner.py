"""Runs a Python program in a process with limits and, where the kernel lets an ordinary user make
them, in namespaces of its own: without a network, and with a file system that has Python, the
program and an empty ``/tmp`` in it.

``docs/security.md`` says what that does not stop.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Isolation = Literal["namespaces", "limits"]

_HERE = Path(__file__).parent
_READ = 2**16
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_START_S = 120.0
"""Longest time for a sandbox to be made, on a busy machine."""
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
set -- setpriv {identity} --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
exec chroot {root} "$@"
"""
"""Shell script for a separate file system in which nothing can be mounted and no other one be
reached: its processes have no capabilities, and the kernel creates no user namespace in a
``chroot``. There is no ``/proc``, whose files root could write."""
_NAMESPACES = ("--net", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program.

    Attributes: seconds: CPU time of a run, or of a test; of a ``Session``, of the clock for each
        piece of code. memory: bytes of each process's address space. processes: of the program,
        threads included, where it has namespaces of its own; elsewhere of the user. file: bytes of
        each file; with namespaces also of all files together. output: bytes of what it prints.
    """

    seconds: float = 10.0
    memory: int = 2**29
    processes: int = 32
    file: int = 2**25
    output: int = 2**20


@dataclass(frozen=True)
class Outcome:
    """Result of a program.

    Attributes: end: ``exit``, or the limit that it was killed at: ``time`` (its own CPU time, or it
        only waited), ``output``,
            or ``starved`` (the machine did not let it compute).
        status: exit status, negative the number of the signal that ended it; None where a limit
            did.
        output: what it printed on its standard output, as text.
        errors: the end of what it printed on its standard error.
    """

    end: str
    status: int | None
    output: str
    errors: str


@cache
def _missing() -> str:
    """What keeps programs from having namespaces here, as text; empty where nothing does."""
    lacking = [
        tool
        for tool in ("unshare", "setpriv", "mount", "chroot")
        if not shutil.which(tool, path=_PATH)
    ]
    if sys.platform != "linux" or lacking:
        return (
            f"this is {sys.platform}"
            if sys.platform != "linux"
            else f"there is no {lacking[0]} in {_PATH}"
        )
    try:
        with started("print(6 * int(input()), flush=True)", Limits(), "namespaces") as process:
            answer = process.ask(7, _START_S)
    except (OSError, EndedError, TimeoutError) as error:
        return str(error)
    return "" if answer == 42 else f"a program printed {answer!r:.80}"


def isolation() -> Isolation:
    """Return the isolation of programs here: ``"namespaces"``, or only ``"limits"``."""
    return "limits" if _missing() else "namespaces"


def require_isolation(sandbox: str) -> None:
    """Refuse to run programs without the required isolation.

    Args:
        sandbox: ``"auto"`` takes what there is, ``"strict"`` needs namespaces.

    Raises:
        ValueError: it is neither.
        RuntimeError: there are no namespaces.
    """
    if sandbox not in ("auto", "strict"):
        raise ValueError(f"sandbox={sandbox} must be auto or strict: for example, strict.")
    if sandbox == "strict" and isolation() != "namespaces":
        raise RuntimeError(
            "sandbox=strict must have namespaces for programs, which could not be made "
            f"({_missing()}): use Linux with util-linux and user namespaces (in Docker "
            "--security-opt seccomp=unconfined), or sandbox=auto, which runs them with limits "
            "alone: they can read files and use the network."
        )


class EndedError(RuntimeError):
    """A program has ended, or sent something that is no answer."""


class Process:
    """A program that answers lines with lines.

    Args:
        process: with pipes.
        limits: of which ``output`` holds for an answer.
    """

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits) -> None:
        assert process.stdin and process.stdout
        self._stdin, self._stdout, self._limits = (
            process.stdin.fileno(),
            process.stdout.fileno(),
            limits,
        )
        os.set_blocking(self._stdin, False)

    def ask(self, message: Any, seconds: float) -> Any:
        """Send a message, and return the answer to it; both are JSON.

        Raises:
            TimeoutError: it did not answer in time.
            EndedError: it has ended, or what it sent is no answer.
        """
        try:
            return json.loads(self.line(seconds, json.dumps(message).encode() + b"\n"))
        except (ValueError, RecursionError) as error:
            raise EndedError("it sent something that is no answer") from error

    def line(self, seconds: float, data: bytes = b"") -> bytes:
        """Send data, and return the line that it sends; raises as ``ask`` does."""
        deadline, answer = time.monotonic() + seconds, bytearray()
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
                    part = os.read(self._stdout, _READ)
                    answer += part
                    if not part:
                        raise EndedError("it has ended")
                    if len(answer) > 8 * self._limits.output:
                        raise EndedError("it sent too much")
        return bytes(answer)

    def _write(self, data: bytes) -> bytes:
        """Write some of the data; return what is left, nothing where it reads no more."""
        try:
            return data[os.write(self._stdin, data[:_READ]) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""


@contextmanager
def started(
    program: str, limits: Limits, isolated: Isolation, cpu_s: float = 3600.0
) -> Iterator[Process]:
    """Start a program, and wait until its sandbox is made; in the end it is killed, with all that
    it started.

    Args:
        program: its source.
        limits: on its resources; that of time is for who reads what it prints.
        isolated: what there is.
        cpu_s: CPU time of each of its processes.

    Raises:
        OSError: no process can be started, or no sandbox for it be made.
    """
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        for name in ("program", "root", "tmp"):
            (folder / name).mkdir()
        root, user = (
            os.geteuid() == 0,
            random.randrange(10**6, 2**31),
        )  # a user of its own, for its number of processes
        python, inside = os.path.realpath(sys.executable), isolated == "namespaces"
        source = folder / "program"
        (source / "program.py").write_text(program, encoding="utf-8", errors="replace")
        shutil.copyfile(_HERE / "start.py", source / "start.py")
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
        environment = {"PATH": _PATH, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
        if inside:
            script = _ROOT.format(
                root=shlex.quote(str(folder / "root")),
                folder=shlex.quote(str(source)),
                size=limits.file,
                places=shlex.join(_places(python)),
                identity=f"--reuid={user} --regid={user} --clear-groups" if root else "",
            )
            own_user = () if root else ("--user", "--map-root-user")
            command = ["unshare", *own_user, *_NAMESPACES, "sh", "-c", script, "sh", *command]
        else:
            environment["TMPDIR"] = str(folder / "tmp")
        with open(folder / "errors", "w+b") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,  # nothing is left to be written when it is closed
                cwd=folder / "tmp",
                env=environment,
                start_new_session=True,
            )
            try:
                asked = Process(process, limits)
                try:
                    asked.line(_START_S)
                except (EndedError, TimeoutError) as error:
                    errors.seek(0)
                    reason = errors.read(2000).decode(errors="replace").strip() or error
                    raise OSError(
                        f"the sandbox of a program could not be made: {reason}"
                    ) from error
                yield asked
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(
                        process.pid, signal.SIGKILL
                    )  # with a PID namespace all in it ends with its first one
                process.wait()
                for stream in (process.stdin, process.stdout):
                    with suppress(OSError):
                        stream.close()  # type: ignore[union-attr]


def _places(python: str) -> list[str]:
    """Folders that Python needs, none inside another."""
    wanted = {"/usr", sys.base_prefix, str(Path(python).parent.parent)}
    wanted |= {
        place
        for place in ("/lib", "/lib64")
        if Path(place).is_dir() and not Path(place).is_symlink()
    }
    return sorted(
        place
        for place in wanted
        if not any(place != other and Path(place).is_relative_to(other) for other in wanted)
    )


@contextmanager
def judging(limits: Limits, **program: Any) -> Iterator[Callable[[Any], dict[str, Any]]]:
    """Start a sandbox in which a program runs on one test after another.

    Gives a function that runs a test and says how it ended, as ``torchrl_grpo/sandbox/judge.py``
    does.

    Args:
        limits: of each test.
        program: see ``Program`` there.

    Raises:
        OSError: no sandbox can be made, or it is lost.
    """
    longest = _START_S + 20 * limits.seconds
    source = (_HERE / "judge.py").read_text(encoding="utf-8")
    with started(source, limits, isolation()) as process:
        try:
            process.ask(program | {"seconds": limits.seconds, "output": limits.output}, longest)
            yield lambda test: process.ask(test, longest)
        except (EndedError, TimeoutError) as error:
            raise OSError(f"the sandbox of a program was lost: {error}") from error


def run_python(program: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run a Python program, with the standard library alone, and wait for it.

    Args:
        program: its source.
        stdin: its standard input.
        limits: by default those of ``Limits``.

    Raises:
        OSError: no process can be started, or no sandbox for it be made.

    >>> run_python("print(int(input()) * 2)", "21").output
    '42\\n'
    """
    with judging(limits or Limits(), source=program) as test:
        return Outcome(**test(stdin))

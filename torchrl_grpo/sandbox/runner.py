"""Runs a Python program in a process with limits and, where the kernel lets an ordinary user make them, in namespaces
of its own: without a network, and with a file system that has Python, the program and an empty ``/tmp`` in it.

``docs/security.md`` says what that does not stop.
"""

from __future__ import annotations

import os
import random
import selectors
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
from typing import Literal

Isolation = Literal["namespaces", "limits"]

_READ = 2**16
_LIMITED = """\
import resource as r, sys
cpu, memory, processes, file = {cpu_s}, {memory}, {processes}, {file}
for name, value in (("CPU", cpu), ("AS", memory), ("NPROC", processes), ("FSIZE", file), ("NOFILE", 64), ("CORE", 0)):
    try:
        r.setrlimit(getattr(r, "RLIMIT_" + name), (value, value))
    except (AttributeError, ValueError, OSError):  # macOS has no limit on memory
        pass
del r, name, value, cpu, memory, processes, file
sys.path[:] = [path for path in sys.path if path]
with open({program!r}, encoding="utf-8") as source:
    code = compile(source.read(), "program.py", "exec")
del sys, source
exec(code, {{"__name__": "__main__"}})
"""
_ROOT = """\
set -e
mount -t tmpfs -o size={size},nr_inodes=4096,mode=755 tmpfs {root}
mkdir -p {root}/tmp {root}/dev {root}/program
chmod 1777 {root}/tmp
for place in {places}; do
  mkdir -p "{root}$place"
  mount --rbind "$place" "{root}$place"
  mount -o remount,bind,ro,nosuid,nodev "{root}$place"
done
for link in /bin /lib /lib64; do
  if [ -L "$link" ]; then ln -s "$(readlink "$link")" "{root}$link"; fi
done
for device in null zero urandom; do
  touch "{root}/dev/$device"
  mount --bind "/dev/$device" "{root}/dev/$device"
done
mount --bind {folder} {root}/program
mount -o remount,bind,ro,nosuid,nodev {root}/program
mount -o remount,bind,ro,nosuid,nodev {root}
mount -t tmpfs -o size={size},nr_inodes=4096,mode=1777 tmpfs {root}/tmp
unset PWD OLDPWD
: > {ready}
set -- setpriv {identity} --no-new-privs --bounding-set=-all --inh-caps=-all {python} -I -S -B /program/start.py
exec chroot {root} "$@"
"""
"""Shell script for a separate file system in which nothing can be mounted and no other one be reached: its processes
have no capabilities, and the kernel creates no user namespace in a ``chroot``. There is no ``/proc``, whose files root
could write."""
_NAMESPACES = ("--net", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program.

    Attributes:
        seconds: of the clock; of the CPU each process has as much.
        memory: bytes of each process's address space.
        processes: of the program, threads included, where it has namespaces of its own; elsewhere of the user.
        file: bytes of each file; with namespaces also of all files together.
        output: bytes of what it prints.
    """

    seconds: float = 10.0
    memory: int = 2**29
    processes: int = 32
    file: int = 2**25
    output: int = 2**20


@dataclass(frozen=True)
class Outcome:
    """Result of a program.

    Attributes:
        status: exit status, negative the number of the signal that ended it; None where a limit of time or output did.
        output: what it printed on its standard output, as text.
        errors: the end of what it printed on its standard error.
    """

    status: int | None
    output: str
    errors: str


@cache
def isolation() -> Isolation:
    """Return the isolation of programs here: ``"namespaces"``, or only ``"limits"``."""
    if sys.platform != "linux" or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        return "limits"
    try:
        outcome = _run("print(6 * 7)", "", Limits(), "namespaces")
    except OSError:
        return "limits"
    return "namespaces" if outcome.output == "42\n" else "limits"


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
            "sandbox=strict must have namespaces for programs, which this machine does not give: use Linux with "
            "util-linux and user namespaces (in Docker --security-opt seccomp=unconfined), or sandbox=auto, which "
            "runs them with limits alone."
        )


def run_python(program: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run a Python program, with the standard library alone, and wait for it and all that it started.

    Args:
        program: its source.
        stdin: its standard input.
        limits: by default those of ``Limits``.

    Raises:
        OSError: no process can be started, or no sandbox for it be made.

    >>> run_python("print(int(input()) * 2)", "21").output
    '42\\n'
    """
    return _run(program, stdin, limits or Limits(), isolation())


def _run(program: str, stdin: str, limits: Limits, isolated: Isolation) -> Outcome:
    with started(program, limits, isolated) as (process, ready):
        outcome = _communicate(process, stdin.encode(errors="replace"), limits)
        if outcome.status is not None and not ready():
            raise OSError(f"the sandbox of a program could not be made: {outcome.errors.strip() or outcome.status}")
        return outcome


@contextmanager
def started(
    program: str, limits: Limits, isolated: Isolation
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], bool]]]:
    """Start a program; in the end it is killed, with all that it started.

    Gives the process, and whether its sandbox has been made: what ends before has not run the program.

    Args:
        program: its source.
        limits: on its resources; that of the clock is for who reads what it prints.
        isolated: what there is.

    Raises:
        OSError: no process can be started.
    """
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        for name in ("program", "root", "tmp"):
            (folder / name).mkdir()
        root, user = os.geteuid() == 0, random.randrange(10**6, 2**31)  # a user of its own, for its number of processes
        ready = folder / "ready"  # out of the program's reach
        python, inside = os.path.realpath(sys.executable), isolated == "namespaces"
        source = folder / "program" / "program.py"
        source.write_text(program, encoding="utf-8", errors="replace")
        values = {
            "cpu_s": max(1, round(limits.seconds + 0.5)),
            "memory": limits.memory,
            "processes": limits.processes if inside else 4096,
            "file": limits.file,
            "program": "/program/program.py" if inside else str(source),
        }
        (folder / "program" / "start.py").write_text(_LIMITED.format(**values), encoding="utf-8")
        if inside:
            script = _ROOT.format(
                root=folder / "root",
                ready=ready,
                folder=folder / "program",
                size=limits.file,
                python=python,
                places=" ".join(_places(python)),
                identity=f"--reuid={user} --regid={user} --clear-groups" if root else "",
            )
            own_user = () if root else ("--user", "--map-root-user")
            command = ["unshare", *own_user, *_NAMESPACES, "sh", "-c", script]
        else:
            command = [python, "-I", "-S", "-B", str(folder / "program" / "start.py")]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder / "tmp",
            env=environment if inside else environment | {"TMPDIR": str(folder / "tmp")},
            start_new_session=True,
        )
        try:
            yield process, lambda: not inside or ready.exists()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with a PID namespace all that it holds ends with its first one
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                with suppress(OSError):
                    stream.close()  # type: ignore[union-attr]


def _places(python: str) -> list[str]:
    """Folders that Python needs, none inside another."""
    wanted = {"/usr", sys.base_prefix, str(Path(python).parent.parent)}
    wanted |= {place for place in ("/lib", "/lib64") if Path(place).is_dir() and not Path(place).is_symlink()}
    return sorted(
        place for place in wanted if not any(place != other and Path(place).is_relative_to(other) for other in wanted)
    )


def _communicate(process: subprocess.Popen[bytes], stdin: bytes, limits: Limits) -> Outcome:
    """Feed a process and read what it prints, until it ends or a limit is reached."""
    assert process.stdin and process.stdout and process.stderr
    deadline = time.monotonic() + limits.seconds
    printed = {process.stdout: bytearray(), process.stderr: bytearray()}
    within = True
    with selectors.DefaultSelector() as selector:
        for stream in printed:
            selector.register(stream, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        open_streams = 2
        while within and open_streams:
            for key, _ in selector.select(max(deadline - time.monotonic(), 0)):
                if key.fileobj is process.stdin:
                    try:
                        stdin = stdin[os.write(process.stdin.fileno(), stdin[:_READ]) :] if stdin else stdin
                    except BlockingIOError:
                        continue
                    except OSError:  # it reads no more
                        stdin = b""
                    if not stdin:
                        selector.unregister(process.stdin)
                        with suppress(OSError):
                            process.stdin.close()
                    continue
                data = os.read(key.fd, _READ)
                if not data:
                    selector.unregister(key.fileobj)
                    open_streams -= 1
                printed[key.fileobj] += data  # type: ignore[index]
            within = time.monotonic() < deadline and sum(map(len, printed.values())) <= limits.output
    status = None
    if within:
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(max(deadline - time.monotonic(), 0.0) + 0.1)
    output, errors = (bytes(part[: limits.output]).decode(errors="replace") for part in printed.values())
    return Outcome(status, output, errors[-2000:])

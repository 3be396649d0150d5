"""Starts the dashboard's server: in this process, or in one beside a run."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torchrl_grpo.host.children import start_python
from torchrl_grpo.host.processes import die_with_parent

_LOOPBACK = "127.0.0.1"
_STDERR_BYTES, _STDERR_EVERY_S = 16_384, 0.01


def listen() -> tuple[socket.socket, str, str]:
    """Return a socket on loopback, a token, and the dashboard's address."""
    listening = socket.create_server((_LOOPBACK, 0))
    token = secrets.token_urlsafe(32)
    return listening, token, f"http://{_LOOPBACK}:{listening.getsockname()[1]}/{token}/"


def serve(folders: Sequence[Path], listening: socket.socket, token: str) -> None:
    """Serves the page until the process is told to end.

    Args:
        folders: of the runs.
        listening: what ``listen`` gave, and the same for the token.
    """
    import uvicorn

    from torchrl_grpo.extras.view.connections import MOST_CONNECTIONS, LimitedConnection
    from torchrl_grpo.extras.view.server import make_app

    config = uvicorn.Config(
        make_app(folders, token),
        http=LimitedConnection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        backlog=MOST_CONNECTIONS,  # as many are accepted before the first of them is looked at
        log_level="error",  # a warning is what strangers write
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    sys.setswitchinterval(0.0005)  # a thread that reads a large file lets the others answer
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([listening])


@contextmanager
def page_beside(
    folder: Path, say: Callable[[str], object], warn: Callable[[str], object]
) -> Iterator[None]:
    """Serve the run dashboard from a separate process with the lowest priority, which ends with
    this one.

    Whatever goes wrong with it is a warning.

    Args:
        folder: of the run.
        say: is told the page's address, once.
        warn: is told what went wrong.
    """
    try:
        listening, token, address = listen()
        with listening:
            process = start_python(
                "torchrl_grpo.extras.view.start:serve_beside",
                listening.fileno(),
                str(folder),
                os.getpid(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
            )
    except OSError as error:
        warn(f"The run dashboard could not be started ({error}); the run continues without it.")
        yield
        return
    say(address)
    ending = threading.Event()
    watching = threading.Thread(target=_watch, args=(process, token, ending, warn), daemon=True)
    watching.start()
    try:
        yield
    finally:
        ending.set()
        process.kill()
        watching.join()


def _watch(
    process: subprocess.Popen[bytes],
    token: str,
    ending: threading.Event,
    warn: Callable[[str], object],
) -> None:
    """Give the process its token, which no command line shows, and report when it ends by itself.

    However much the process writes to stderr, this one keeps the end of it and reads it at a slow
    rate: the pipe is full then, and it is the page that waits.
    """
    assert process.stdin is not None and process.stderr is not None
    errors = b""
    with suppress(OSError), process.stdin:
        process.stdin.write(token.encode())
    with process.stderr:
        while said := process.stderr.read(_STDERR_BYTES):
            errors = (errors + said)[-_STDERR_BYTES:]
            ending.wait(_STDERR_EVERY_S)
    process.wait()
    if not ending.is_set():
        last = (
            errors.decode(errors="replace").strip().rpartition("\n")[2]
            or f"status {process.returncode}"
        )
        warn(f"The run dashboard ended ({last:.300}); the run continues without it.")


def serve_beside(descriptor: int, folder: str, parent: int) -> None:
    """Serve the run dashboard, in a process that gets its token on standard input, until the run's
    process ends.

    Args:
        descriptor: of the socket.
        folder: of the run.
        parent: process id of the run.
    """
    if sys.platform == "linux":
        die_with_parent(parent)
        os.sched_setscheduler(
            0, os.SCHED_IDLE, os.sched_param(0)
        )  # runs when nothing else wants to
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(
                "1000"
            )  # where memory runs out, it ends and not the run
    os.nice(19)
    serve([Path(folder)], socket.socket(fileno=descriptor), sys.stdin.read())

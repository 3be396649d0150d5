"""Starts the dashboard's server, in this process or in a separate one during a run."""

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
_STDERR_BYTES = 16_384
_STDERR_EVERY_S = 0.01


def listen() -> tuple[socket.socket, str, str]:
    """Return a socket on loopback, a token, and the dashboard's address."""
    listening = socket.create_server((_LOOPBACK, 0))
    token = secrets.token_urlsafe(32)
    return listening, token, f"http://{_LOOPBACK}:{listening.getsockname()[1]}/{token}/"


def serve(folders: Sequence[Path], listening: socket.socket, token: str) -> None:
    """Serve the page until the process is interrupted.

    Args:
        folders: of the runs.
        listening: socket from ``listen``. token: token from ``listen``.
    """
    import uvicorn

    from torchrl_grpo.extras.view.connections import MAX_CONNECTIONS, LimitedConnection
    from torchrl_grpo.extras.view.server import make_app

    config = uvicorn.Config(
        make_app(folders, token),
        http=LimitedConnection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        backlog=MAX_CONNECTIONS,  # all of these are accepted before the first one is handled
        log_level="error",  # strangers can cause warnings
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    sys.setswitchinterval(0.0005)  # so that a thread that reads a large file lets others answer
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([listening])


@contextmanager
def page_beside(
    folder: Path, say: Callable[[str], object], warn: Callable[[str], object]
) -> Iterator[None]:
    """Serve the run dashboard from a separate process with the lowest priority, which ends with
    this one.

    Failures of the dashboard are only warnings.

    Args:
        folder: of the run.
        say: called once with the page's address.
        warn: called with a message if the dashboard fails.
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
    """Send the process its token, so that no command line shows it, and report if it ends by
    itself.

    If the process writes a lot to stderr, this one keeps only the end and reads slowly, so that the
    pipe fills up and the page has to wait.
    """
    assert process.stdin is not None and process.stderr is not None
    errors = b""
    with suppress(OSError), process.stdin:
        process.stdin.write(token.encode())
    with process.stderr:
        while chunk := process.stderr.read(_STDERR_BYTES):
            errors = (errors + chunk)[-_STDERR_BYTES:]
            ending.wait(_STDERR_EVERY_S)
    process.wait()
    if not ending.is_set():
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
        reason = last_line or f"status {process.returncode}"
        warn(f"The run dashboard ended ({reason:.300}); the run continues without it.")


def serve_beside(descriptor: int, folder: str, parent: int) -> None:
    """Serve the run dashboard, in a process that gets its token on standard input, until the run's
    process ends.

    Args:
        descriptor: descriptor of the socket.
        folder: of the run.
        parent: process id of the run.
    """
    if sys.platform == "linux":
        die_with_parent(parent)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with suppress(OSError):  # if memory runs out, end this process and not the run
            Path("/proc/self/oom_score_adj").write_text("1000")
    os.nice(19)
    serve([Path(folder)], socket.socket(fileno=descriptor), sys.stdin.read())

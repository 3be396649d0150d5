"""Child interpreters that serve one function. They start faster than ``multiprocessing`` children,
which would import the script again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

_START_S = 600.0
"""Timeout for the start, on a busy machine or a slow file system."""


def start_python(
    target: str, fd: int, *arguments: object, **streams: Any
) -> subprocess.Popen[bytes]:
    """Start an interpreter that calls ``target(fd, *arguments)``.

    It gets a process group of its own, because the parent handles Ctrl-C in the terminal.

    Args:
        target: ``package.module:function``.
        fd: a file descriptor that the child inherits.
        arguments: values that ``repr`` writes as literals.
        streams: options of ``subprocess.Popen``.
    """
    module, _, function = target.partition(":")
    call = f"{function}({', '.join(map(repr, (fd, *arguments)))})"
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function}; {call}"
    return subprocess.Popen([sys.executable, "-c", code], pass_fds=[fd], process_group=0, **streams)


class PipedChild:
    """Child interpreter that serves one end of a pipe; see ``start_python``.

    Attributes:
        connection: our end of the pipe.
        process: the child.
    """

    def __init__(self, target: str, *arguments: object) -> None:
        self.connection, child_end = Pipe()
        with child_end:
            self.process = start_python(
                target, child_end.fileno(), *arguments, stdin=subprocess.DEVNULL
            )

    def receive_refusal(self) -> str:
        """Wait for the child's first message: empty, or the reason why it cannot serve.

        Raises:
            EOFError or OSError: the child has ended.
        """
        if not self.connection.poll(_START_S):
            return f"no answer within {_START_S:g} s"
        return self.connection.recv_bytes().decode()


def serve_connection(fd: int) -> Connection:
    """Return the child's end of the pipe, which its own children don't inherit."""
    connection = Connection(fd)
    os.set_inheritable(fd, False)
    return connection

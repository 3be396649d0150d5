"""``Session``: Python in a sandbox, one piece of code after another, with the variables of those before."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace

from torchrl_grpo.sandbox.runner import Limits, isolation, started

_CALLS = 64
"""Pieces of code that a process has CPU time for."""
_READ = 2**16
_LARGEST = 2**16
"""Bytes of what one piece of code may say."""
_SERVE = """\
import ast, contextlib, io, json, os, sys, traceback
said, names = os.fdopen(os.dup(1), "w"), {"__name__": "__main__"}
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
def run(code):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            tree = ast.parse(code)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<code>", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
                if value is not None:
                    print(repr(value))
        except SystemExit as end:
            print(f"SystemExit: {end.code}")
        except BaseException:
            kind, error, trace = sys.exc_info()
            print("".join(traceback.format_exception(kind, error, trace.tb_next)).rstrip())
    return printed.getvalue()
for line in sys.stdin:
    said.write(json.dumps(run(json.loads(line))[:%d]) + "\\n")
    said.flush()
"""


class Session:
    """A process that runs code when it is asked to, made when it is first needed.

    Args:
        limits: of the process; ``seconds`` are those of each piece of code.

    Example:
        >>> session = Session()
        >>> session.run("x = 20"), session.run("x + 1")
        ('', '21')
        >>> session.close()
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._resources = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, code: str) -> str:
        """Return what code prints, and after it the value of an expression at its end, or the error that it raised.

        Raises:
            TimeoutError: it took too long. The process is gone, and the next piece of code begins with no variables.
            RuntimeError: the process has ended, likewise.
        """
        if self._process is None:
            limits = replace(self._limits, seconds=self._limits.seconds * _CALLS)
            self._process, _ = self._resources.enter_context(started(_SERVE % _LARGEST, limits, isolation()))
        try:
            return self._ask(code).rstrip("\n")
        except (TimeoutError, RuntimeError):
            self.close()
            raise

    def _ask(self, code: str) -> str:
        assert self._process is not None and self._process.stdin and self._process.stdout
        lost = "what it had computed is lost"
        deadline, answer = time.monotonic() + self._limits.seconds, bytearray()
        try:
            self._process.stdin.write(json.dumps(code).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RuntimeError(f"Python has ended; {lost}.") from error
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"the code took longer than {self._limits.seconds:g} s; {lost}.")
                data = os.read(self._process.stdout.fileno(), _READ)
                answer += data
                if not data or len(answer) > 8 * _LARGEST:
                    raise RuntimeError(f"Python has ended; {lost}.")
        try:
            return str(json.loads(answer))
        except ValueError as error:  # the code wrote there itself
            raise RuntimeError(f"Python has ended; {lost}.") from error

    def close(self) -> None:
        """End the process. May be called again."""
        self._process = None
        self._resources.close()

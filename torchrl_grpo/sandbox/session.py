"""``Session``: Python in a sandbox, for several pieces of code that share their variables."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torchrl_grpo.sandbox.runner import EndedError, Limits, Process, isolation, started

_CALLS = 64
"""Pieces of code for which a process has CPU time."""


class Session:
    """Process that runs pieces of code, started when it is first needed.

    Args:
        limits: of the process; ``seconds`` apply to each piece of code.

    Example:
        >>> session = Session()
        >>> session.run("x = 20"), session.run("x + 1")
        ('', '21')
        >>> session.close()
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._resources = ExitStack()
        self._process: Process | None = None

    def run(self, code: str) -> str:
        """Run code; return its output, and after it the value of an expression at its end, or its
        error.

        Raises:
            TimeoutError: it took too long. The process is gone, and the next piece of code begins
                with no variables.
            RuntimeError: the process has ended, likewise.
            OSError: no process can be started, or no sandbox for it be made.
        """
        limits = self._limits
        lost = "what it had computed is lost"
        if self._process is None:
            serve = Path(__file__).with_name("serve.py").read_text(encoding="utf-8")
            process = started(serve, limits, isolation(), cpu_s=limits.seconds * _CALLS)
            self._process = self._resources.enter_context(process)
        try:
            return str(self._process.ask(code, limits.seconds)).rstrip("\n")
        except TimeoutError as error:
            self.close()
            raise TimeoutError(
                f"the code took longer than {limits.seconds:g} s; {lost}."
            ) from error
        except EndedError as error:
            self.close()
            raise RuntimeError(f"Python has ended; {lost}.") from error

    def close(self) -> None:
        """End the process. May be called again."""
        self._process = None
        self._resources.close()

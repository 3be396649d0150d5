"""``Session``: Python in a sandbox, one piece of code after another, with the variables of those
before.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torchrl_grpo.sandbox.runner import EndedError, Limits, Process, isolation, started

_CALLS = 64
"""Pieces of code that a process has CPU time for."""


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
        self._process: Process | None = None

    def run(self, code: str) -> str:
        """Return what code prints, and after it the value of an expression at its end, or the error
        that it raised.

        Raises:
            TimeoutError: it took too long. The process is gone, and the next piece of code begins
                with no variables.
            RuntimeError: the process has ended, likewise.
            OSError: no process can be started, or no sandbox for it be made.
        """
        limits, lost = self._limits, "what it had computed is lost"
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

"""``Session``: Python in a sandbox, for several pieces of code that share variables."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torchrl_grpo.integrations.sandbox.runner import (
    EndedError,
    Limits,
    Process,
    isolation,
    start_program,
)

_CALLS = 64
"""Number of pieces of code for which a process gets CPU time."""


class Session:
    """Process that runs pieces of code. It is started when needed.

    Args:
        limits: limits of the process; ``seconds`` apply to each piece of code.

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
        """Run code; return its output, followed by the value of a final expression, or its error.

        Raises:
            TimeoutError: it took too long. The process is killed, and the next piece of code starts
                without variables.
            RuntimeError: the process has died, with the same consequence.
            OSError: the process or its sandbox cannot be created.
        """
        limits = self._limits
        lost = "what it had computed is lost"
        if self._process is None:
            serve = Path(__file__).with_name("serve.py").read_text(encoding="utf-8")
            process = start_program(serve, limits, isolation(), cpu_s=limits.seconds * _CALLS)
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
        """End the process. Can be called more than once."""
        self._process = None
        self._resources.close()

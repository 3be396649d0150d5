"""``Python``: the built-in tool ``python``, which runs code in a sandbox and keeps a dialog's
variables.
"""

from __future__ import annotations

from typing import Any

from torchrl_grpo.integrations.sandbox import Limits, require_isolation
from torchrl_grpo.integrations.sandbox.session import Session

_SECONDS = 10.0


class Python:
    """Tool of one dialog: an environment whose method runs code.

    Args:
        sandbox: ``"strict"`` refuses to run code with only limits.

    Raises:
        RuntimeError: ``sandbox="strict"``, but this machine has no sandbox.

    >>> tool = Python()
    >>> tool.python("numbers = [3, 4]"), tool.python("sum(numbers)")
    ('', '7')
    >>> tool.close()
    """

    def __init__(self, sandbox: str = "strict") -> None:
        require_isolation(sandbox)
        self._session = Session(Limits(seconds=_SECONDS))

    def reset(self, **columns: Any) -> None:
        """Leave the prompt unchanged."""

    def python(self, code: str) -> str:
        """Runs Python code and returns what it prints, or the value of its last line. Variables
        stay for later calls.

        Args:
            code: the code, with the standard library.
        """
        return self._session.run(code)

    def close(self) -> None:
        """End the process."""
        self._session.close()

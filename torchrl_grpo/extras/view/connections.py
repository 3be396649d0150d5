"""Limits on connections to the dashboard's server, which anybody on the machine can open without
the token.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 64
"""A browser opens six. The server accepts at most this many, far below the usual limit of 1024
files.
"""
_REQUEST_S = 5.0
"""Seconds from a connection's start, or its latest answer, to the end of the next request's
headers.
"""


class LimitedConnection(H11Protocol):
    """A connection that must send a request soon, and gives way to new ones while it does not.

    Where there are too many, the one that has waited longest without a request is closed, and not
    the newest: so strangers who open connections and send nothing do not lock out the reader, whose
    requests come at once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waits_since = 0.0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first request, and close another connection if there are too
        many.
        """
        super().connection_made(transport)
        self._begin_to_wait()
        if len(self.connections) > MOST_CONNECTIONS:
            idle = [
                one
                for one in self.connections
                if isinstance(one, LimitedConnection) and not one._is_answered()
            ]
            min(idle, key=lambda one: one._waits_since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def on_response_complete(self) -> None:
        """Start the time limit of the next request."""
        self._begin_to_wait()
        super().on_response_complete()

    def _begin_to_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._waits_since = self.loop.time()
        self._deadline = self.loop.call_later(_REQUEST_S, self._hang_up)

    def _hang_up(self) -> None:
        if not self._is_answered():
            self.transport.abort()

    def _is_answered(self) -> bool:
        """Whether a request is being answered, which has no time limit."""
        return self.cycle is not None and not self.cycle.response_complete

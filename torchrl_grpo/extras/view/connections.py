"""Limits on connections to the dashboard's server, which any user of the machine can open without
the token.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 64
"""Maximum number of connections. A browser opens six, and the usual limit on open files is 1024."""
_REQUEST_S = 5.0
"""Seconds from a connection's start, or its latest answer, to the end of the next request's
headers.
"""


class LimitedConnection(H11Protocol):
    """A connection that must send a request soon, and may be closed for new ones until it does.

    If there are too many connections, the one that has been idle longest is closed, and not the
    newest, so that users who open connections and send nothing do not lock out the reader, whose
    requests come at once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle_since = 0.0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first request, and close another connection if there are too
        many.
        """
        super().connection_made(transport)
        self._start_waiting()
        if len(self.connections) > MAX_CONNECTIONS:
            idle = [
                connection
                for connection in self.connections
                if isinstance(connection, LimitedConnection) and not connection._is_answering()
            ]
            min(idle, key=lambda connection: connection._idle_since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def on_response_complete(self) -> None:
        """Start the time limit of the next request."""
        self._start_waiting()
        super().on_response_complete()

    def _start_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._idle_since = self.loop.time()
        self._deadline = self.loop.call_later(_REQUEST_S, self._hang_up)

    def _hang_up(self) -> None:
        if not self._is_answering():
            self.transport.abort()

    def _is_answering(self) -> bool:
        """Return whether a request is being answered, which has no time limit."""
        return self.cycle is not None and not self.cycle.response_complete

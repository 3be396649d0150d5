"""Rendezvous of trainer and engines: a store at rank 0 of the trainer for numbers, through which no
weights go.

It listens on one address alone and gives nothing to those who do not know the run's secret. Values
are short strings and counters, and are never unpickled.
"""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

TIMEOUT_S = 120.0
"""Longest wait for the store, each time."""


def open_store(host: str, timeout_s: float = TIMEOUT_S) -> TCPStore:
    """Open a store for processes that look for each other, on a free port of one address; torch's
    default is all addresses.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


@dataclass(frozen=True)
class Meeting:
    """Address and secret of a store.

    Attributes:
        host, port: of the store.
        secret: of the run.
    """

    host: str
    port: int
    secret: str = field(repr=False)

    def connect(self) -> Any:
        """Return a separate connection: a wait blocks all users of a connection."""
        store = TCPStore(
            self.host, self.port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S)
        )
        # The store tells its keys to whoever asks, so what keeps strangers out must not be the
        # secret itself.
        return PrefixStore(hashlib.sha256(self.secret.encode()).hexdigest(), store)


@lru_cache(maxsize=1)
def connected(meeting: Meeting) -> Any:
    """Return this process's connection to the store, which lasts from one update to the next."""
    return meeting.connect()

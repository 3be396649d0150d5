"""Where trainer and engines agree on numbers: a store of rank 0 of the trainer, which no weights go through.

It listens on one address alone and gives nothing to those who do not know the run's secret. Values are short strings
and counters, and are never unpickled.
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
    """A store for processes that look for each other, on a free port of one address; by itself torch takes all."""
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
    """The address of a store, for those who are told it.

    Attributes:
        host, port: of the store.
        secret: of the run.
    """

    host: str
    port: int
    secret: str = field(repr=False)

    def connect(self) -> Any:
        """Return a connection of its own; while one waits, other users of the same one would wait for it."""
        store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        # The store tells its keys to whoever asks, so what keeps strangers out must not be the secret itself.
        return PrefixStore(hashlib.sha256(self.secret.encode()).hexdigest(), store)


@lru_cache(maxsize=1)
def connected(meeting: Meeting) -> Any:
    """Return this process's connection to the store, which lasts from one update to the next."""
    return meeting.connect()

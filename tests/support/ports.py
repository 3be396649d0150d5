"""TCP ports that stay free until they are used."""

from __future__ import annotations

import os
import socket
from itertools import cycle

_SHARE = 200
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_FIRST = 20_000 + _SHARE * (8 * (os.getppid() % 7) + _WORKER % 8)
_ports = cycle(range(_FIRST, _FIRST + _SHARE))


def free_port() -> int:
    """Return a port that neither the kernel nor another process of this test run gives to anyone.

    One that was bound as 0 and closed again can be a stranger's before it is used. These are below
    the range that the kernel chooses from, and above the ports of Ray's workers.
    """
    while True:
        port = next(_ports)
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:  # somebody listens there
                continue
            return port

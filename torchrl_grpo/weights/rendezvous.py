"""Rendezvous of trainer and engines: a store at rank 0 of the trainer for numbers, never weights.

It listens on one address only, and a process that does not know the run's secret gets nothing from
it. Values are short strings and counters, and are never unpickled.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from torchrl_grpo.weights.handle import Part, Sender, WeightHandle, unpacked
from torchrl_grpo.weights.named import NamedTensors
from torchrl_grpo.weights.object_store import ObjectSender

TIMEOUT_S = 120.0
"""Timeout of each operation on the store."""


def open_store(host: str, timeout_s: float = TIMEOUT_S) -> TCPStore:
    """Open a store on a free port of one address; torch's default is all addresses."""
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
class Rendezvous:
    """Address and secret of a store.

    Attributes:
        host, port: address of the store.
        secret: secret of the run.
    """

    host: str
    port: int
    secret: str = field(repr=False)

    def connect(self) -> Any:
        """Open a separate connection: a wait blocks all users of a connection."""
        store = TCPStore(
            self.host, self.port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S)
        )
        # The store lists its keys to everybody, so the prefix must not be the secret itself.
        return PrefixStore(hashlib.sha256(self.secret.encode()).hexdigest(), store)


@lru_cache(maxsize=1)
def connected(rendezvous: Rendezvous) -> Any:
    """Return this process's connection to the store, which is reused by later updates."""
    return rendezvous.connect()


class RendezvousSender(Sender):
    """Sender whose readers connect to a rendezvous. It keeps the parts of each version until release.
    After a refusal, weights go through the object store.

    Args:
        dtype: dtype of the weights in transit, ideally the engine's; None keeps their own.
        host: address of this machine.
    """

    def __init__(self, dtype: torch.dtype | None, host: str) -> None:
        self.dtype = dtype
        self._store = open_store(host)
        self._rendezvous = Rendezvous(host, self._store.port, secrets.token_hex(32))
        self._parts: dict[int, list[tuple[Tensor, Part]]] = {}
        self._refused = False

    def pack(self, weights: NamedTensors, version: int) -> WeightHandle:
        if self._refused:
            return ObjectSender(self.dtype).pack(weights, version)
        return super().pack(weights, version)

    def resend(self, version: int, reason: str) -> WeightHandle:
        self._refused = True
        self.refuse(reason)
        kept = (named for flat, part in self._parts[version] for named in unpacked(flat, part))
        return ObjectSender(None).pack(kept, version)

    def refuse(self, reason: str) -> None:
        """Stop sending, because an engine refused a version."""

"""Weights that are sent over a process group: nccl on CUDA, gloo on a CPU.

Rank 0 of the trainer keeps each version in its CPU memory, packed into large parts. Readers ask for a version when they
want it, and a thread for each of them answers while training goes on, so a reader that is slow or dies holds up nobody.
Each engine has a process group of its own: rank 0 of the trainer, and the engine's processes after it. No default group
is used or made.

A reader asks over a connection that it keeps from one update to the next. When it dies, the connection breaks, and
rank 0 ends its thread and its process group. Rank 0 listens on the given host's address alone: on one port for requests
and on another for the ``TCPStore`` in which the processes of a group meet. Without the secret that is in the handle
nobody can ask for weights. The weights themselves travel unencrypted.

On a CPU this was run, on CUDA it was not.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore  # as mypy finds them

from torchrl_grpo.weights.handle import (
    ALONE,
    Named,
    Parts,
    PlainHandle,
    Reader,
    Sender,
    cut,
    describe,
    in_parts,
    numel,
)

TIMEOUT_S = 120.0
"""Longest wait of one side for the other, each time."""


@dataclass(frozen=True)
class Broadcast(PlainHandle):
    """Weights that rank 0 of the trainer sends to those who ask.

    Attributes:
        host: of rank 0.
        ports: of rank 0, for requests and of the store.
        secret: proves that a request comes from a reader of this run.
        version: of the weights.
        backend: ``nccl`` or ``gloo``.
        timeout_s: longest wait of a reader for rank 0, each time.
        parts: what is sent, one after the other.
    """

    host: str
    ports: tuple[int, int]
    secret: str = field(repr=False)
    version: int
    backend: str
    timeout_s: float
    parts: Parts

    def weights(self, reader: Reader = ALONE) -> Iterator[tuple[str, Tensor]]:
        key = (self.secret, reader)
        with self._waiting("to be reached"):
            link = _links.get(key) or _Link(self, reader)
        _links[key] = link
        try:
            with self._waiting(f"and the engine's {reader.size} processes to meet"):
                link.ask(self.version)
            device = torch.device("cpu" if self.backend == "gloo" else "cuda")
            for number, (dtype, layout) in enumerate(self.parts, start=1):
                flat = torch.empty(numel(layout), dtype=getattr(torch, dtype), device=device)
                with self._waiting(f"to send part {number} of {len(self.parts)}"):
                    link.group.broadcast(flat, 0).wait()
                yield from cut(flat, layout)
        except BaseException:
            _links.pop(key).close()  # what was under way cannot be taken up again
            raise

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise TimeoutError(
                f"the weights of version {self.version} did not come: waited {time.monotonic() - start:.1f} s (at most "
                f"{self.timeout_s:g}) for rank 0 of the trainer at {self.host}:{self.ports[0]} {what}, and got: "
                f"{str(error).strip().partition(chr(10))[0]}. If this goes on, use "
                "inference_model.weight_transfer=object_store."
            ) from error


class _Link:
    """A process's connection to rank 0, which lasts from one update to the next.

    Attributes:
        group: the process group with rank 0 and the reader's other processes, once ``ask`` was called.
    """

    def __init__(self, handle: Broadcast, reader: Reader) -> None:
        if handle.backend == "nccl":
            _let_waits_raise()
        self._handle, self._reader = handle, reader
        self.group: Any = None
        self._requests: socket.socket | None = None
        self._name = f"{reader.name}/{_made[reader]}"  # another one for each group that the reader's processes make
        _made[reader] += 1
        if reader.rank == 0:  # asks for all processes of the reader
            self._requests = socket.create_connection((handle.host, handle.ports[0]), timeout=handle.timeout_s)
            self._requests.sendall(f"{handle.secret}\n{json.dumps([self._name, reader.size])}\n".encode())

    def ask(self, version: int) -> None:
        """Asks for a version, and makes the group if there is none."""
        if self._requests is not None:
            self._requests.sendall(f"{version}\n".encode())
        if self.group is None:
            handle, reader = self._handle, self._reader
            store = (handle.host, handle.ports[1], _prefix(handle.secret, self._name))
            self.group = _join(handle.backend, *store, reader.rank + 1, reader.size + 1, handle.timeout_s)

    def close(self) -> None:
        """Lets rank 0 end its side."""
        if self._requests is not None:
            self._requests.close()


_links: dict[tuple[str, Reader], _Link] = {}
_made: Counter[Reader] = Counter()
"""The links of this process, and how many each reader has had."""


def _let_waits_raise() -> None:
    """Has nccl's waits raise in the thread that waits; otherwise a watchdog ends the trainer when an engine dies.

    It is set for good, where threads do not run yet: each new process group reads it.
    """
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")


def _prefix(secret: str, name: str) -> str:
    """Where the processes of a group meet in the store. It does not give the secret away: a store lists its keys."""
    return hashlib.sha256(f"{secret}/{name}".encode()).hexdigest()


def _join(backend: str, host: str, port: int, prefix: str, rank: int, size: int, timeout_s: float) -> Any:
    """The process group of rank 0 and one reader."""
    timeout = timedelta(seconds=timeout_s)
    # A client of its own: while one waits, others of the same client would have to wait for it.
    store = PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=timeout))
    if backend == "gloo":
        return ProcessGroupGloo(store, rank, size, timeout)
    from torch._C._distributed_c10d import ProcessGroupNCCL  # not there in builds without CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)


class BroadcastSender(Sender):
    """Sends ``Broadcast``s.

    Args:
        dtype: of the weights on their way, best the engine's; None keeps their own.
        backend: ``nccl`` or ``gloo``.
        host: name or address of this machine for the others.
        timeout_s: longest wait of one side for the other, each time.
    """

    def __init__(self, dtype: torch.dtype | None, backend: str, host: str, timeout_s: float = TIMEOUT_S) -> None:
        self._dtype, self._backend, self._host, self._timeout_s = dtype, backend, host, timeout_s
        self._secret = secrets.token_hex(32)
        self._kept: dict[int, list[Tensor]] = {}
        self._listener: socket.socket | None = None
        self._threads: dict[threading.Thread, socket.socket] = {}
        if backend == "nccl":
            _let_waits_raise()

    def pack(self, weights: Named, version: int) -> Broadcast:
        if self._listener is None:
            self._listen()
        parts = [(_on_host(flat), layout) for flat, layout in in_parts(weights, self._dtype)]
        self._kept[version] = [flat for flat, _ in parts]
        return Broadcast(
            self._host, self._ports, self._secret, version, self._backend, self._timeout_s, describe(parts)
        )

    def release(self, version: int) -> None:
        self._kept.pop(version, None)  # a thread that is sending it has it until it is done

    def close(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait for readers
            self._accepting.join()
            self._listener.close()
            for thread, connection in list(self._threads.items()):
                with suppress(OSError):  # it has just ended by itself
                    connection.shutdown(socket.SHUT_RDWR)
                thread.join()
            del self._store
        self._listener = None
        self._kept.clear()

    def _listen(self) -> None:
        self._listener, stores = (socket.create_server((self._host, 0)) for _ in range(2))
        self._ports = self._listener.getsockname()[1], stores.getsockname()[1]
        self._store = TCPStore(
            self._host, self._ports[1], is_master=True, wait_for_workers=False, master_listen_fd=stores.detach()
        )
        self._accepting = threading.Thread(target=self._accept, args=(self._listener,), name="weights", daemon=True)
        self._accepting.start()

    def _accept(self, listener: socket.socket) -> None:
        """Gives each connection a thread, until the listener is shut down."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="weights", daemon=True)
            self._threads[thread] = connection
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Answers the requests of one connection until it breaks or something goes wrong."""
        group: Any = None
        try:
            with connection, connection.makefile("rb") as requests:
                connection.settimeout(self._timeout_s)
                if not hmac.compare_digest(requests.readline(100).strip(), self._secret.encode()):
                    return
                name, size = json.loads(requests.readline())
                connection.settimeout(None)
                store = (self._host, self._ports[1], _prefix(self._secret, name))
                group = _join(self._backend, *store, 0, size + 1, self._timeout_s)
                for version in map(int, requests):
                    self._broadcast(group, version)
        except Exception as error:  # the reader hears of it by itself, and its replacement makes a new group
            from torchrl._utils import logger as torchrl_logger  # slow, and vLLM's workers import this module

            torchrl_logger.warning(f"weights were not sent to an engine: {str(error).partition(chr(10))[0]}")
        finally:
            if group is not None and self._backend == "nccl":
                group.abort()  # otherwise its communicator stays
            self._threads.pop(threading.current_thread(), None)

    def _broadcast(self, group: Any, version: int) -> None:
        if version not in self._kept:
            raise RuntimeError(f"version {version} is not kept any more.")
        stream = torch.cuda.Stream() if self._backend == "nccl" else None
        for flat in self._kept[version]:
            with torch.cuda.stream(stream):  # not behind what the trainer computes; None is no stream
                group.broadcast(flat if stream is None else flat.cuda(), 0).wait()


def _on_host(flat: Tensor) -> Tensor:
    """Where a version is kept: the accelerator's memory is the trainer's."""
    return torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat) if flat.is_cuda else flat

"""Weights that are sent over a process group: nccl on CUDA, gloo on a CPU.

Rank 0 of the trainer keeps each version in its CPU memory, packed into large parts. Readers ask for a version when they
want it, and a thread for each of them answers while training goes on, so a reader that is slow or dies holds up nobody.
Each engine has a process group of its own: rank 0 of the trainer, and the engine's processes after it. No default group
is used or made.

A reader asks over a connection that it keeps from one update to the next. When it dies, the connection breaks, and
rank 0 ends its thread and its process group. Rank 0 listens on the given host's address alone: on one port for requests
and on another for the ``TCPStore`` in which the processes of a group meet. gloo listens on the address by which a
process and rank 0 reach each other. Without the secret that is in the handle nobody can ask for weights. The weights
themselves travel unencrypted.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from torchrl_grpo.weights.handle import Named, Part, PlainHandle, Reader, Sender, in_parts

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
    parts: Sequence[Part]

    def flats(self, sizes: Sequence[tuple[int, torch.dtype]], reader: Reader) -> Iterator[Tensor]:
        key = (self.secret, reader)
        with self._waiting("to be reached"):
            requests, group = _links[key] = _links.get(key) or _connect(self, reader)
        try:
            if requests is not None:
                with self._waiting("to be asked"):
                    requests.sendall(f"{self.version}\n".encode())
            device = torch.device("cpu" if self.backend == "gloo" else "cuda")
            for number, (size, dtype) in enumerate(sizes, start=1):
                flat = torch.empty(size, dtype=dtype, device=device)
                with self._waiting(f"to send part {number} of {len(sizes)}"):
                    group.broadcast(flat, 0).wait()
                yield flat
        except BaseException:  # what was under way cannot be taken up again
            del _links[key]
            if requests is not None:
                requests.close()
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
                f"{str(error).strip().partition(chr(10))[0]}. If this persists, use "
                "inference_model.weight_transfer=object_store."
            ) from error


_links: dict[tuple[str, Reader], tuple[socket.socket | None, Any]] = {}
"""State of each reader in this process: the connection on which it asks, and the process group."""
_groups: Counter[Reader] = Counter()
"""How many groups each reader has made: their names differ."""


def _connect(handle: Broadcast, reader: Reader) -> tuple[socket.socket | None, Any]:
    """A process's link to rank 0, which lasts from one update to the next."""
    requests, name = None, f"{reader.name}/{_groups[reader]}"
    _groups[reader] += 1
    if reader.rank == 0:  # asks for all processes of the reader
        requests = socket.create_connection((handle.host, handle.ports[0]), timeout=handle.timeout_s)
        requests.sendall(f"{handle.secret}\n{json.dumps([name, reader.size])}\n".encode())
    _let_waits_raise(handle.backend)
    return requests, _join(handle, name, reader.rank + 1, reader.size + 1)


def _let_waits_raise(backend: str) -> None:
    """Make nccl's waits raise in the thread that waits; otherwise a watchdog ends the trainer when an engine dies.

    Each new process group reads this. It is never unset, because another thread may be making a group.
    """
    if backend == "nccl":
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")


def _join(handle: Broadcast, name: str, rank: int, size: int) -> Any:
    """The process group of rank 0 and one reader."""
    timeout = timedelta(seconds=handle.timeout_s)
    # The store tells its keys to whoever asks, so what keeps strangers out of a group must not be the secret itself.
    prefix = hashlib.sha256(f"{handle.secret}/{name}".encode()).hexdigest()
    # A client of its own: while one waits, others of the same client would have to wait for it.
    store = PrefixStore(prefix, TCPStore(handle.host, handle.ports[1], is_master=False, timeout=timeout))
    if handle.backend == "gloo":
        gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = timeout
        # By itself gloo takes what the machine's name stands for, which is often an address of the machine alone.
        gloo._devices = [ProcessGroupGloo.create_device(hostname=_own_address_towards(handle.host, handle.ports[1]))]
        return ProcessGroupGloo(store, rank, size, gloo)
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # not there in builds without CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)


def _own_address_towards(host: str, port: int) -> str:
    """The address from which this process reaches another one; nothing is sent."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


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


class BroadcastSender(Sender):
    """Sends ``Broadcast``s.

    Args:
        dtype: of the weights on their way, best the engine's; None keeps their own.
        backend: ``nccl`` or ``gloo``.
        host: name or address of this machine for the others.
        timeout_s: longest wait of one side for the other, each time.
    """

    def __init__(self, dtype: torch.dtype | None, backend: str, host: str, timeout_s: float = TIMEOUT_S) -> None:
        self._dtype = dtype
        self._handle = Broadcast(host, (0, 0), secrets.token_hex(32), 0, backend, timeout_s, [])
        self._kept: dict[int, list[Tensor]] = {}
        self._listener: socket.socket | None = None
        self._threads: dict[threading.Thread, socket.socket] = {}
        _let_waits_raise(backend)

    def pack(self, weights: Named, version: int) -> Broadcast:
        if self._listener is None:
            self._listen()
        parts = [(_on_host(flat), part) for flat, part in in_parts(weights, self._dtype)]
        self._kept[version] = [flat for flat, _ in parts]
        return replace(self._handle, version=version, parts=[part for _, part in parts])

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
        host = self._handle.host
        self._listener, self._store = socket.create_server((host, 0)), open_store(host)
        self._handle = replace(self._handle, ports=(self._listener.getsockname()[1], self._store.port))
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
        group, on_gpu = None, self._handle.backend == "nccl"
        try:
            with connection, connection.makefile("rb") as requests:
                connection.settimeout(self._handle.timeout_s)
                if not hmac.compare_digest(requests.readline(100).strip(), self._handle.secret.encode()):
                    return
                name, size = json.loads(requests.readline())
                connection.settimeout(None)
                group = _join(self._handle, name, 0, size + 1)
                stream = torch.cuda.Stream() if on_gpu else None
                for version in map(int, requests):
                    if version not in self._kept:
                        raise RuntimeError(f"version {version} was dropped.")
                    for flat in self._kept[version]:
                        with torch.cuda.stream(stream):  # not behind what the trainer computes; None is no stream
                            group.broadcast(flat.cuda() if on_gpu else flat, 0).wait()
        except Exception as error:  # the reader hears of it by itself, and its replacement makes a new group
            from torchrl import torchrl_logger  # slow, and vLLM's workers import this module

            torchrl_logger.warning(f"weights were not sent to an engine: {str(error).partition(chr(10))[0]}")
        finally:
            if group is not None and on_gpu:
                group.abort()  # otherwise its communicator stays
            self._threads.pop(threading.current_thread(), None)


def _on_host(flat: Tensor) -> Tensor:
    """Where a version is kept: the accelerator's memory is the trainer's."""
    return torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat) if flat.is_cuda else flat

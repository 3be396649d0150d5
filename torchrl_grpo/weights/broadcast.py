"""Weights that are sent over a process group: nccl on CUDA, gloo on a CPU.

Rank 0 of the trainer keeps each version in its CPU memory, packed into large parts. Readers ask for a version when they
want it, and a thread for each of them answers while training goes on, so that a reader that is slow or dies is nobody
else's concern. The two sides meet in a ``TCPStore`` of rank 0, and each engine has a process group of its own with it:
rank 0, and the engine's processes after it. No default group is used or made.

On a CPU this was run, on CUDA it was not.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore  # as mypy finds them

from torchrl_grpo.weights.handle import (
    ALONE,
    Layout,
    Named,
    PlainHandle,
    Reader,
    Sender,
    cut,
    dtype_name,
    in_parts,
)

TIMEOUT_S = 120.0
"""Longest wait of one side for the other, each time."""

_REQUESTS = "requests"


@dataclass(frozen=True)
class Broadcast(PlainHandle):
    """Weights that rank 0 of the trainer sends to those who ask.

    Attributes:
        host, port: of rank 0's store.
        version: of the weights.
        backend: ``nccl`` or ``gloo``.
        timeout_s: longest wait of a reader for rank 0, each time.
        dtype: of all weights, such as ``"float32"``.
        parts: how many weights each part has.
        layout: in the order in which the weights come.
    """

    host: str
    port: int
    version: int
    backend: str
    timeout_s: float
    dtype: str
    parts: list[int]
    layout: Layout

    def weights(self, reader: Reader = ALONE) -> Iterator[tuple[str, Tensor]]:
        key = (self.host, self.port, reader)
        with self._waiting("to be reached"):
            link = _links.get(key) or _Link(self, reader)
        _links[key] = link
        try:
            if reader.rank == 0:
                link.store.queue_push(_REQUESTS, json.dumps([link.name, reader.size, self.version]))
            with self._waiting(f"and the engine's {reader.size} processes to meet"):
                group = link.join()
            device = torch.device("cpu" if self.backend == "gloo" else "cuda")
            layouts = iter(self.layout)
            for number, count in enumerate(self.parts, start=1):
                layout = list(itertools.islice(layouts, count))
                size = sum(torch.Size(shape).numel() for _, shape in layout)
                flat = torch.empty(size, dtype=getattr(torch, self.dtype), device=device)
                with self._waiting(f"to send part {number} of {len(self.parts)}"):
                    group.broadcast(flat, 0).wait()
                yield from cut(flat, layout)
        except BaseException:
            _links.pop(key, None)  # what was under way cannot be taken up again
            raise

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"the weights of version {self.version} did not come: waited {time.monotonic() - start:.1f} s (at most "
                f"{self.timeout_s:g}) for rank 0 of the trainer at {self.host}:{self.port} {what}, and got: "
                f"{str(error).strip().partition(chr(10))[0]}. If this goes on, use "
                "inference_model.weight_transfer=object_store."
            ) from error


class _Link:
    """A process's connection to rank 0, which lasts from one update to the next.

    Attributes:
        name: of the group, another one each time that the reader's processes make one.
        store: of rank 0.
    """

    def __init__(self, handle: Broadcast, reader: Reader) -> None:
        self.name = f"{reader.name}/{_made[reader]}"
        _made[reader] += 1
        self.store = TCPStore(handle.host, handle.port, is_master=False, timeout=timedelta(seconds=handle.timeout_s))
        self._handle, self._reader = handle, reader
        self._group: Any = None

    def join(self) -> Any:
        """The process group with rank 0 and the reader's other processes."""
        if self._group is None:
            rank, size = self._reader.rank + 1, self._reader.size + 1
            self._group = _join(self._handle.backend, self.store, self.name, rank, size, self._handle.timeout_s)
        return self._group


_links: dict[tuple[str, int, Reader], _Link] = {}
_made: Counter[Reader] = Counter()
"""The links of this process, and how many each reader has had."""


def _join(backend: str, store: Store, name: str, rank: int, size: int, timeout_s: float) -> Any:
    prefixed, timeout = PrefixStore(name, store), timedelta(seconds=timeout_s)
    if backend == "gloo":
        return ProcessGroupGloo(prefixed, rank, size, timeout)
    from torch._C._distributed_c10d import ProcessGroupNCCL  # not there in builds without CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Waits then raise in the thread that waits. Otherwise a watchdog ends the whole process, the trainer, when an
    # engine dies.
    variable = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        return ProcessGroupNCCL(prefixed, rank, size, options)
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


class BroadcastSender(Sender):
    """Sends ``Broadcast``s.

    Args:
        dtype: in which the weights travel, best the engine's.
        backend: ``nccl`` or ``gloo``.
        host: name or address of this machine for the others.
        timeout_s: longest wait of one side for the other, each time.
    """

    def __init__(self, dtype: torch.dtype, backend: str, host: str, timeout_s: float = TIMEOUT_S) -> None:
        self._dtype, self._backend, self._host, self._timeout_s = dtype, backend, host, timeout_s
        self._store: TCPStore | None = None
        self._kept: dict[int, list[Tensor]] = {}
        self._threads: list[threading.Thread] = []

    def pack(self, weights: Named, version: int) -> Broadcast:
        if self._store is None:
            self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            self._start(self._accept)
        parts = [(_on_host(flat), layout) for flat, layout in in_parts(weights, self._dtype)]
        self._kept[version] = [flat for flat, _ in parts]
        return Broadcast(
            host=self._host,
            port=self._store.port,
            version=version,
            backend=self._backend,
            timeout_s=self._timeout_s,
            dtype=dtype_name(self._dtype),
            parts=[len(layout) for _, layout in parts],
            layout=[entry for _, layout in parts for entry in layout],
        )

    def release(self, version: int) -> None:
        self._kept.pop(version, None)  # a thread that is sending it has it until it is done

    def close(self) -> None:
        if self._store is not None:
            self._store.queue_push(_REQUESTS, "null")
            for thread in self._threads:
                thread.join()
        self._store = None
        self._kept.clear()

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name="weights", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _client(self, timeout_s: float) -> TCPStore:
        """A connection of one thread's own: while one waits, others would have to wait for it."""
        assert self._store is not None
        return TCPStore(self._host, self._store.port, is_master=False, timeout=timedelta(seconds=timeout_s))

    def _accept(self) -> None:
        """Hands each request to the thread of its group."""
        store = self._client(timeout_s=10.0**9)
        wanted: dict[str, queue.SimpleQueue[int | None]] = {}
        while (request := json.loads(store.queue_pop(_REQUESTS))) is not None:
            name, size, version = request
            if name not in wanted:
                wanted[name] = queue.SimpleQueue()
                self._start(self._serve, name, size, wanted[name])
            wanted[name].put(version)
        for versions in wanted.values():
            versions.put(None)

    def _serve(self, name: str, size: int, wanted: queue.SimpleQueue[int | None]) -> None:
        """Answers the requests of one group until something goes wrong in it."""
        try:
            group = _join(self._backend, self._client(self._timeout_s), name, 0, size + 1, self._timeout_s)
            stream = torch.cuda.Stream() if self._backend == "nccl" else None
            while (version := wanted.get()) is not None:
                if version not in self._kept:
                    raise RuntimeError(f"version {version} is not kept any more.")
                for flat in self._kept[version]:
                    with torch.cuda.stream(stream):  # not behind what the trainer computes; None is no stream
                        group.broadcast(flat if stream is None else flat.cuda(), 0).wait()
        except Exception as error:  # the reader hears of it by itself, and its replacement makes a new group
            from torchrl._utils import logger as torchrl_logger  # slow, and vLLM's workers import this module

            torchrl_logger.warning(f"weights were not sent to an engine: {str(error).partition(chr(10))[0]}")


def _on_host(flat: Tensor) -> Tensor:
    """Where a version is kept: the accelerator's memory is the trainer's."""
    return torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat) if flat.is_cuda else flat

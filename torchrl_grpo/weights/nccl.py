"""Weights from GPU to GPU, over the engine ``nccl`` of vLLM's weight transfer.

Rank 0 of the trainer and all workers of all engines form one group, so a version is sent only once
to any number of engines. Rank 0 keeps each version in host memory. A thread sends it when the
engines ask for it, while training continues. The driver makes all engines ask for the same version
at the same time.

A group cannot be joined again. An engine that starts later, or that failed, is refused, and the
driver asks the sender for another handle (``Sender.resend``).

vLLM's own rendezvous unpickles values from a store. Here the handle carries the group's id.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.errors import TransferRefusedError
from torchrl_grpo.weights.handle import (
    PART_BYTES,
    Part,
    Shapes,
    TransferHandle,
    Updates,
    in_parts,
    staged,
    unpacked,
)
from torchrl_grpo.weights.named import NamedTensors, TensorStream
from torchrl_grpo.weights.rendezvous import Rendezvous, RendezvousSender, connected

_BUFFERS = {"packed": True, "packed_buffer_size_bytes": PART_BYTES, "packed_num_buffers": 2}
"""vLLM's settings for packing weights; its default is a buffer of 1 GiB on each GPU."""
_CLIENT_CALLS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
_TICK = timedelta(seconds=1)


@dataclass(frozen=True)
class NcclWeights(TransferHandle):
    """Weights that rank 0 of the trainer sends to all engines together.

    Attributes:
        rendezvous: where the engines ask for a version.
        group_id: ncclUniqueId in base64.
        world_size: size of the group: rank 0 of the trainer and each worker.
        version: version of the weights.
        parts: layouts of the parts.
    """

    backend = "nccl"

    rendezvous: Rendezvous
    group_id: str = field(repr=False)
    world_size: int
    version: int
    parts: Sequence[Part]

    @property
    def layout(self) -> Shapes:
        return [entry for _, layout in self.parts for entry in layout]

    def init_info(self, workers: int) -> dict[str, Any] | None:
        store = connected(self.rendezvous)
        if store.check(["closed"]):
            raise TransferRefusedError(store.get("closed").decode())
        init = None
        number = _rounds.get(self.rendezvous, 0)
        if number == 0:
            last = store.add("workers", workers)
            if last >= self.world_size:
                raise TransferRefusedError(
                    "an engine was replaced, and a new one cannot join the group of the others"
                )
            init = {
                "nccl_unique_id_b64": self.group_id,
                "rank_offset": last - workers + 1,
                "world_size": self.world_size,
                **_BUFFERS,
            }
        requested = store.compare_set(f"round/{number}", "", str(self.version)).decode()
        if requested != str(self.version):
            raise TransferRefusedError(
                f"another engine asked for version {requested}, and this one for {self.version}"
            )
        _rounds[self.rendezvous] = number + 1
        return init

    def updates(self) -> Updates:
        entries = [
            (name, dtype, list(shape)) for dtype, layout in self.parts for name, shape in layout
        ]
        names, dtypes, shapes = (list(values) for values in zip(*entries, strict=True))
        yield {"names": names, "dtype_names": dtypes, "shapes": shapes}


_rounds: dict[Rendezvous, int] = {}
"""Number of updates that this process's engine has joined, by rendezvous."""


class NcclSender(RendezvousSender):
    """Sender of ``NcclWeights``.

    Args:
        dtype, host: see ``RendezvousSender``.
        workers: number of processes of all engines together.
    """

    def __init__(self, dtype: torch.dtype | None, host: str, workers: int) -> None:
        super().__init__(dtype, host)
        self._world_size = workers + 1
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._group_id = b""

    def _pack(self, weights: NamedTensors, version: int) -> NcclWeights:
        # In host memory, to leave the GPU's memory to training.
        parts = [(staged(flat), part) for flat, part in in_parts(weights, self.dtype)]
        self._parts[version] = parts
        if self._thread is None:
            self._group_id = _new_group_id()
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            self._thread = threading.Thread(
                target=self._serve, args=(device,), name="weights", daemon=True
            )
            self._thread.start()
        return NcclWeights(
            self._rendezvous,
            base64.b64encode(self._group_id).decode(),
            self._world_size,
            version,
            [part for _, part in parts],
        )

    def release(self, version: int) -> None:
        self._parts.pop(version, None)  # a thread that is sending it still has it

    def refuse(self, reason: str) -> None:
        """Stop sending, and release engines that are waiting."""
        connected(self._rendezvous).set("closed", reason)
        self._closing.set()

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=10)  # it may be waiting for an engine that never joins
        self._parts.clear()

    def _serve(self, device: int | None) -> None:
        """Send the version of each round to all engines."""
        if device is not None:
            torch.cuda.set_device(device)
        store, group = self._rendezvous.connect(), None
        try:
            for number in count():
                version = self._wait_for_request(store, f"round/{number}")
                if version is None:
                    return
                if version not in self._parts:
                    raise RuntimeError(f"version {version} was dropped")
                group = group or _join(self._group_id, self._world_size, device)
                _send(group, self._parts[version])
        except Exception as error:
            store.set("closed", f"nccl failed at the trainer: {str(error).partition(chr(10))[0]}")
        finally:
            if group is not None:
                group.destroy()  # aborts pending transfers

    def _wait_for_request(self, store: Any, key: str) -> int | None:
        """Wait for the version that the engines ask for; return None once this sender closes."""
        while not self._closing.is_set():
            try:
                store.wait([key], _TICK)
            except RuntimeError:  # no engine has asked yet
                continue
            return int(store.get(key))
        return None


class _Kept:
    """The weights of a version in the form of vLLM's ``WeightSource``."""

    def __init__(self, parts: Sequence[tuple[Tensor, Part]]) -> None:
        self._parts = parts

    def metadata(self) -> list[Any]:
        meta = import_module("vllm.distributed.weight_transfer").ParamMeta
        layouts = ((getattr(torch, dtype), layout) for _, (dtype, layout) in self._parts)
        return [meta(name, dtype, shape) for dtype, layout in layouts for name, shape in layout]

    def __iter__(self) -> TensorStream:
        for flat, part in self._parts:
            yield from (_copied if torch.cuda.is_available() else unpacked)(flat, part)


def _copied(flat: Tensor, part: Part) -> TensorStream:
    """Copy a part to the GPU and yield its weights to a reader that alternates between streams:
    each weight is ready on the stream that is current when the weight is requested.
    """
    copy = flat.cuda(non_blocking=True)
    done = torch.cuda.current_stream().record_event()
    for weight in unpacked(copy, part):
        stream = torch.cuda.current_stream()
        stream.wait_event(done)
        copy.record_stream(stream)  # its memory is not reused before this stream has read it
        yield weight


def _new_group_id() -> bytes:
    library = import_module("vllm.distributed.device_communicators.pynccl_wrapper").NCCLLibrary()
    return bytes(library.ncclGetUniqueId().internal)


def _join(group_id: bytes, world_size: int, device: int | None) -> Any:
    """Join the group as rank 0."""
    common = import_module("vllm.distributed.weight_transfer.nccl_common")
    return common.uid_init_process_group(group_id, 0, world_size, device)


def _send(group: Any, parts: Sequence[tuple[Tensor, Part]]) -> None:
    """Send weights with vLLM's trainer side, in buffers with the workers' settings."""
    module = import_module("vllm.distributed.weight_transfer.nccl_engine")
    engine_class = module.NCCLTrainerWeightTransferEngine
    # vLLM's trainer controls its engines through a client. Here they follow their handle.
    client = SimpleNamespace(**dict.fromkeys(_CLIENT_CALLS, lambda *_, **__: None))
    engine = engine_class(client=client, source=_Kept(parts), is_sender=True, **_BUFFERS)
    engine.model_update_group = group
    engine.send_weights()

"""Extension that runs in vLLM's worker processes.

vLLM itself adds the extension to its workers; other processes import this module without vLLM.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from torchrl_grpo.host.processes import die_with_parent, show_stack_when_asked
from torchrl_grpo.weights.ipc import opened

OBJECT_STORE = "object_store"
"""Name of our engine in vLLM's factory."""
_CHUNK = 2**20
_NUMPY_STATE = struct.Struct("2496sqqd")
"""The state of NumPy's generator: its 624 words, the place among them, and a Gaussian that is left
over.
"""


class WeightSyncExtension:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), called by name through
    ``collective_rpc``.

    ``self`` is the vLLM worker, and each tensor-parallel rank reads for itself. vLLM copies what is
    read to where the model is, so the same code serves every device.
    """

    def receive(
        self,
        backend: str,
        init: dict[str, Any] | None,
        update: dict[str, Any],
        first: bool,
        last: bool,
        deadline_s: float | None,
    ) -> str:
        """Receive a part of new weights through vLLM's weight transfer: init (if given), start,
        update, finish.

        Args:
            backend: name of the engine that receives, as in ``TransferHandle``.
            init: for the engine, before its first update.
            update: info of this part.
            first: whether this part starts the update.
            last: whether it finishes it.
            deadline_s: None raises what goes wrong. Else it is returned, and so is that nothing
                came in these seconds; the model is then of no use until another update has come.

        Returns:
            why the weights did not come, or nothing.
        """
        worker: Any = self
        engine = _transfer_engine(worker, backend)
        take = partial(
            _take, worker, engine, init, opened(update) if backend == "ipc" else update, first, last
        )
        if deadline_s is None:
            take()
            return ""
        wrong = _within(take, deadline_s)
        if wrong:
            worker.weight_transfer_engine = None
            engine.shutdown()  # aborts what is under way
        return wrong

    unfinished: Any = None
    """The engine of an update that was begun and not ended."""

    def base_layout(self) -> list[tuple[str, list[int]]]:
        """Return name and shape of each weight in the checkpoint that the engine was started from."""
        return [
            (name, list(weight.shape))
            for name, weight in _transfer_engine(self, OBJECT_STORE).base()
        ]

    def digest(self) -> str:
        """Return a checksum of this worker's parameters that depends on the place of each byte."""
        worker: Any = self
        named = worker.model_runner.get_model().named_parameters()
        return hashlib.sha256(
            repr([(name, checksum(parameter.data)) for name, parameter in named]).encode()
        ).hexdigest()

    def zero_received_weights(self) -> None:
        """Zero the parameters that the latest update through the object store replaced, so that an
        incomplete update is noticed.
        """
        worker: Any = self
        loaded = worker.weight_transfer_engine.loaded
        for name, parameter in worker.model_runner.get_model().named_parameters():
            if name in loaded:
                parameter.data.zero_()

    # Sampling draws from torch's generator of the device; on CUDA vLLM also draws each request's
    # seed from NumPy's.

    def seed_sampler(self, seed: int) -> None:
        """Seeds the generators that sampling draws from."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)

    def sampler_state(self) -> list[bytes]:
        """The states of torch's and of NumPy's generator."""
        device = self.device  # type: ignore[attr-defined]
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        numpy_state: Any = np.random.get_state(legacy=True)
        _, words, *rest = numpy_state
        return [state.numpy().tobytes(), _NUMPY_STATE.pack(words.tobytes(), *rest)]

    def set_sampler_state(self, state: bytes, numpy_state: bytes) -> None:
        """Restores what ``sampler_state`` gave."""
        device = self.device  # type: ignore[attr-defined]
        tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.set_rng_state(tensor, device)
        else:
            torch.set_rng_state(tensor)
        words, *rest = _NUMPY_STATE.unpack(numpy_state)
        np.random.set_state(("MT19937", np.frombuffer(words, np.uint32), *rest))

    def die_with_parent(self) -> int:
        """Makes the worker end with the process that started it; returns the worker's process id."""
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            die_with_parent(parent.pid)
        return os.getpid()

    def finish_setup(self) -> None:
        """Makes the worker one of the run's processes, once all of them have met."""
        show_stack_when_asked()
        unname_queues()


def _transfer_engine(worker: Any, backend: str) -> Any:
    """Return the worker's engine of vLLM's weight transfer, which is made when it is first asked
    for.
    """
    factory = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    with suppress(ValueError):  # it is registered already
        factory.register_engine(
            OBJECT_STORE, "torchrl_grpo.weights.transfer_engine", "ObjectStoreEngine"
        )
    engine = worker.weight_transfer_engine
    if engine is None or engine.config.backend != backend:
        if engine is not None:
            engine.shutdown()
        config = import_module("vllm.config").WeightTransferConfig(backend=backend)
        model = worker.model_runner.get_model()
        engine = factory.create_engine(config, worker.vllm_config, worker.device, model)
        worker.weight_transfer_engine = engine
    return engine


def _take(
    worker: Any,
    engine: Any,
    init: dict[str, Any] | None,
    update: dict[str, Any],
    first: bool,
    last: bool,
) -> None:
    """See ``WeightSyncExtension.receive``."""
    with import_module("vllm.config").set_current_vllm_config(worker.vllm_config), torch.no_grad():
        if first and worker.unfinished is not None:
            worker.unfinished.finish_weight_update()  # or what it left of the layers would be taken for new weights
        if init is not None:
            engine.init_transfer_engine(engine.parse_init_info(init))
        if first:
            worker.unfinished = engine
            engine.start_weight_update()
        engine.update_weights(update)
        if last:
            engine.finish_weight_update()
            worker.unfinished = None
            _repair(worker)


def _within(take: Callable[[], None], seconds: float) -> str:
    """Return why a function did not end well within a time limit, or nothing. It continues in an
    abandoned thread.
    """
    wrong: list[str] = []

    def run() -> None:
        try:
            take()
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")

    thread = threading.Thread(target=run, name="weights", daemon=True)
    thread.start()
    thread.join(seconds)
    return f"nothing came in {seconds:g} s" if thread.is_alive() else "".join(wrong)


def checksum(tensor: torch.Tensor) -> list[int]:
    """Return a number for each 2**20 elements of a tensor: the sum of its bits times its place,
    modulo 2**64.
    """
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    chunks = tensor.contiguous().reshape(-1).view(bits).split(_CHUNK)
    place = torch.arange(1, _CHUNK + 1, device=tensor.device)
    return (
        torch.stack([(chunk * place[: len(chunk)]).sum() for chunk in chunks]).tolist()
        if len(chunks[0])
        else []
    )


def _repair(worker: Any) -> None:
    """Rebuild what a reload leaves stale on a CPU, where vLLM computes with packed weights: a tied
    head, which is not sent, keeps the packed copy of the old embedding, and experts are not packed.
    """
    for module in worker.model_runner.get_model().modules():
        if type(module).__name__ == "ParallelLMHead" and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
        elif worker.device.type == "cpu" and type(module).__name__ == "RoutedExperts":
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def unname_queues() -> None:
    """Remove the files of the message queues that vLLM made in this process, once their other ends
    have opened them.

    Who has a queue open keeps it, and its memory (``/dev/shm/psm_*``, 160 and 240 MiB) is gone with
    the last of these processes, however they end. Python's resource tracker would remove it too,
    but Ray kills it with the actor.
    """
    frozen = gc.get_freeze_count()  # by vLLM; what is frozen is not found
    gc.unfreeze()
    for one in gc.get_objects():
        if type(one).__name__ == "ShmRingBuffer" and one.is_creator:
            one.shared_memory.unlink()
            one.is_creator = False  # or it does so at its end
    if frozen:
        gc.freeze()

"""Extension that runs in vLLM's worker processes.

vLLM itself adds the extension to its workers; other processes import this module without vLLM.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np
import torch

from torchrl_grpo.host.processes import die_with_parent, enable_stack_dump
from torchrl_grpo.weights.ipc import opened
from torchrl_grpo.weights.receipts import Digests, Receipt, receipt_of
from torchrl_grpo.weights.shared import SharedBlock
from torchrl_grpo.weights.slots import attach, slot_tensors

OBJECT_STORE = "object_store"
"""Name of our engine in vLLM's factory."""
_NUMPY_STATE = struct.Struct("2496sqqd")
"""State of NumPy's generator: 624 words, the position in them, and a leftover Gaussian."""


class WeightSyncExtension:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), called by name through
    ``collective_rpc``.

    ``self`` is the vLLM worker, and each tensor-parallel rank reads for itself. vLLM copies the
    weights to the model's device, so the same code serves every device.
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
        """Receive a part of new weights by vLLM's weight transfer: init, start, update, finish.

        Args:
            backend: name of the receiving engine, as in ``TransferHandle``.
            init: init info for the engine before its first update.
            update: update info of this part.
            first: whether this part starts the update.
            last: whether this part finishes it.
            deadline_s: None raises errors. Otherwise an error is returned, as is a timeout after
                these seconds; the model is then unusable until another update.

        Returns:
            the reason why no weights arrived, or an empty string.
        """
        worker: Any = self
        engine = _transfer_engine(worker, backend)
        if backend == "ipc":
            update = opened(update)
        receive_part = partial(_receive_part, worker, engine, init, update, first, last)
        if deadline_s is None:
            receive_part()
            return ""
        failure = _run_within(receive_part, deadline_s)
        if failure:
            worker.weight_transfer_engine = None
            engine.shutdown()  # aborts pending transfers
        return failure

    unfinished: Any = None
    """Engine of an update that was started and not finished."""

    def attach_adapters(
        self,
        block: dict[str, Any],
        layers: list[tuple[str, float]],
        number: int,
        keep: list[int],
    ) -> tuple[Receipt, list[str], float]:
        """Load the adapters in the ``SharedBlock`` with these fields; see ``slots.attach``. Return
        the same as ``receipt``.
        """
        digests = Digests()
        attach(self, digests.of(SharedBlock(**block).weights()), layers, number, keep)
        start = time.perf_counter()
        received, slots = digests.receipt(), receipt_of(slot_tensors(self))
        before, own = self._latest
        is_stale = received != before and own.items() >= slots.items()
        self._latest = received, {**(own or self.own()), **slots}
        return received, [*slots] * is_stale, digests.seconds + time.perf_counter() - start

    loaded: Digests
    """Digests of the tensors that the model's loader received in the latest update."""
    _latest: tuple[Receipt, Receipt] = ({}, {})
    """Receipts of the loader and of the model's own parameters after the latest update."""

    def receipt(self) -> tuple[Receipt, list[str], float]:
        """Return the receipt of the latest update, the names of the model's parameters that do not
        match it, and the seconds that this took.
        """
        start = time.perf_counter()
        worker: Any = self
        packed = getattr(worker.model_runner.get_model(), "packed_modules_mapping", {})
        loaded, own = self.loaded.receipt(), self.own()
        before, own_before = self._latest
        changed: dict[str, bool] = {}
        for name in loaded.keys() & before.keys():
            whole = _packed(name, packed)
            changed[whole] = changed.get(whole, False) or loaded[name] != before[name]
        stale = [
            name
            for name, value in own.items()
            if name in changed and changed[name] != (value != own_before[name])
        ]
        if worker.model_config.quantization is not None:  # which may round changes away
            stale = []
        if not stale:
            self._latest = loaded, own
        return loaded, stale, self.loaded.seconds + time.perf_counter() - start

    def own(self) -> Receipt:
        """Return the receipt of the model's own parameters and of its slots for adapters. On a CPU
        vLLM packs the weights of linear layers so that they cannot be read back.
        """
        model: Any = self.model_runner.get_model()  # type: ignore[attr-defined]
        parameters = ((name, p.data) for name, p in model.named_parameters() if p.numel())
        return receipt_of(chain(parameters, slot_tensors(self)))

    def damaged(self) -> list[str]:
        """Return the names of the parameters that have changed since the latest update."""
        own = self.own()
        return [name for name, value in self._latest[1].items() if own.get(name) != value]

    # Sampling uses torch's generator of the device; on CUDA vLLM also draws each request's seed
    # from NumPy's.

    def seed_sampler(self, seed: int) -> None:
        """Seed the generators that sampling uses."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)

    def sampler_state(self) -> list[bytes]:
        """Return the states of torch's and of NumPy's generator."""
        device = self.device  # type: ignore[attr-defined]
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        numpy_state: Any = np.random.get_state(legacy=True)
        _, words, *rest = numpy_state
        return [state.numpy().tobytes(), _NUMPY_STATE.pack(words.tobytes(), *rest)]

    def set_sampler_state(self, state: bytes, numpy_state: bytes) -> None:
        """Restore the state from ``sampler_state``."""
        device = self.device  # type: ignore[attr-defined]
        tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.set_rng_state(tensor, device)
        else:
            torch.set_rng_state(tensor)
        words, *rest = _NUMPY_STATE.unpack(numpy_state)
        np.random.set_state(("MT19937", np.frombuffer(words, np.uint32), *rest))

    def die_with_parent(self) -> int:
        """Make the worker end with the process that started it; return the worker's process id."""
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            die_with_parent(parent.pid)
        return os.getpid()

    def finish_setup(self) -> None:
        """Finish the worker's setup, after all workers have connected."""
        enable_stack_dump()
        unname_queues()


def _transfer_engine(worker: Any, backend: str) -> Any:
    """Return the worker's engine of vLLM's weight transfer; make it on first use."""
    factory = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    with suppress(ValueError):  # already registered
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


def _receive_part(
    worker: Any,
    engine: Any,
    init: dict[str, Any] | None,
    update: dict[str, Any],
    first: bool,
    last: bool,
) -> None:
    """See ``WeightSyncExtension.receive``."""
    on_cuda = worker.device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(worker.device)  # a new thread begins on the first device
    with import_module("vllm.config").set_current_vllm_config(worker.vllm_config), torch.no_grad():
        if first and worker.unfinished is not None:
            # Otherwise its leftovers in the layers would be mistaken for new weights.
            worker.unfinished.finish_weight_update()
        if init is not None:
            engine.init_transfer_engine(engine.parse_init_info(init))
        if first:
            worker.unfinished = engine
            worker.loaded = Digests()
            engine.start_weight_update()
        model, load = engine.model, engine.model.load_weights
        model.load_weights = lambda weights: load(worker.loaded.of(weights))
        try:
            engine.update_weights(update)
        finally:
            model.load_weights = load
        if last:
            engine.finish_weight_update()
            worker.unfinished = None
            worker.model_runner.reset_lora_state()  # as vLLM's own ``finish_weight_update`` does
            _repair(worker)
    if on_cuda:
        torch.cuda.synchronize()  # the model runs on another thread's stream


def _run_within(function: Callable[[], None], seconds: float) -> str:
    """Run a function in a thread, which is abandoned after a timeout. Return its error, or that it
    timed out, or an empty string.
    """
    failures: list[str] = []

    def run() -> None:
        try:
            function()
        except Exception as error:
            message = str(error).strip().partition("\n")[0]
            failures.append(f"{type(error).__name__}: {message}")

    thread = threading.Thread(target=run, name="weights", daemon=True)
    thread.start()
    thread.join(seconds)
    return f"nothing arrived in {seconds:g} s" if thread.is_alive() else "".join(failures)


def _packed(name: str, packed: Mapping[str, Sequence[str]]) -> str:
    """Return the name of the parameter that contains a weight of the checkpoint."""
    layer, _, last = name.rpartition(".")
    start, _, part = layer.rpartition(".")
    whole = next((whole for whole, parts in packed.items() if part in parts), part)
    return f"{start}.{whole}.{last}".lstrip(".")


def _repair(worker: Any) -> None:
    """Repack weights that a reload leaves stale on the CPU, where vLLM uses packed weights.

    A tied head, which is not sent, still has the old packed embedding, and experts are not packed.
    """
    for module in worker.model_runner.get_model().modules():
        if type(module).__name__ == "ParallelLMHead" and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
        elif worker.device.type == "cpu" and type(module).__name__ == "RoutedExperts":
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def unname_queues() -> None:
    """Remove the files of the message queues that vLLM made in this process, once their other ends
    have opened them.

    Open queues stay valid, and their memory (``/dev/shm/psm_*``, 160 and 240 MiB) is freed with the
    last of these processes, however it ends. Python's resource tracker would remove the files too,
    but Ray kills it with the actor.
    """
    frozen = gc.get_freeze_count()  # vLLM freezes objects, and get_objects does not list these
    gc.unfreeze()
    for queue in gc.get_objects():
        if type(queue).__name__ == "ShmRingBuffer" and queue.is_creator:
            queue.shared_memory.unlink()
            queue.is_creator = False  # otherwise its destructor unlinks again
    if frozen:
        gc.freeze()

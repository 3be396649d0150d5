"""What runs in vLLM's own processes. Nothing here imports vLLM: the extension is given its worker by vLLM itself."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch

from torchrl_grpo.processes import die_with_parent
from torchrl_grpo.weights.broadcast import Broadcast
from torchrl_grpo.weights.cuda_ipc import CudaBuffers
from torchrl_grpo.weights.handle import PlainHandle, Reader, SharedBlock, WeightFile

_KINDS: dict[str, type[PlainHandle]] = {
    kind.__name__: kind for kind in (SharedBlock, WeightFile, Broadcast, CudaBuffers)
}


class WeightSyncExtension:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), called by name through ``collective_rpc``.

    ``self`` is the vLLM worker, and each tensor-parallel rank reads for itself. vLLM copies what is read to where the
    model is, so the same path serves every device (on CUDA it has not been run yet).
    """

    @torch.no_grad()
    def load_handle(self, kind: str, fields: list[Any], reader: str) -> None:
        """Loads the weights of a handle.

        Args:
            kind, fields: as ``PlainHandle.plain`` gives them.
            reader: name of the engine that this worker belongs to.
        """
        worker: Any = self
        handle = _KINDS[kind](*fields)
        weights = handle.weights(Reader(reader, worker.rank, worker.parallel_config.world_size))
        worker.reload_weights(weights_iterator=weights)
        # On a CPU vLLM keeps a packed copy of each linear weight. The reload remakes it for the layers that were sent,
        # but a tied head is not sent: it would go on with the copy of the old embedding.
        for module in worker.model_runner.get_model().modules():
            if type(module).__name__ == "ParallelLMHead" and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)

    def seed_sampler(self, seed: int) -> None:
        """Seeds the generator that sampling draws from."""
        torch.manual_seed(seed)

    def sampler_state(self) -> bytes:
        """The state of that generator."""
        device = self.device  # type: ignore[attr-defined]
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return state.numpy().tobytes()

    def set_sampler_state(self, state: bytes) -> None:
        """Restores what ``sampler_state`` gave."""
        device = self.device  # type: ignore[attr-defined]
        tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.set_rng_state(tensor, device)
        else:
            torch.set_rng_state(tensor)

    def die_with_parent(self) -> int:
        """Makes the worker end with the process that started it; returns the worker's process id."""
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            die_with_parent(parent.pid)
        return os.getpid()

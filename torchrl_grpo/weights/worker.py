"""Extension that runs in vLLM's worker processes, and how an engine gives them weights.

Nothing here imports vLLM: vLLM itself adds the extension to its workers.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import struct
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_grpo.host.processes import die_with_parent, show_stack_when_asked
from torchrl_grpo.weights.broadcast import Broadcast
from torchrl_grpo.weights.cuda_ipc import CudaBuffers
from torchrl_grpo.weights.handle import Named, Part, PlainHandle, Reader, dtype_name, tensor_bytes


@dataclass(frozen=True)
class SharedBlock(PlainHandle):
    """Weights in shared memory of this machine.

    Attributes:
        path: the block, as every process of this machine and user can open it.
        name: what must be found there, so that nothing else is taken for the block once its maker has dropped it.
        parts: a single one.
    """

    path: str
    name: str
    parts: Sequence[Part]

    def flats(self, sizes: Sequence[tuple[int, torch.dtype]], reader: Reader) -> Iterator[Tensor]:
        if not os.path.exists(self.path) or self.name not in os.readlink(self.path):
            raise RuntimeError(f"the shared weights at {self.path} are gone: the process that made them dropped them.")
        [(size, dtype)] = sizes
        yield torch.from_file(self.path, shared=True, size=size, dtype=dtype)


class SharedWeights:
    """Weights in a block of shared memory that the workers of an engine read through ``block``.

    The block has no name in any file system (it is a ``memfd``, Linux only): it can be opened as long as this object is
    open, and its memory is gone with the last process that uses it, however these processes end.

    Attributes:
        block: what the readers need.

    Args:
        weights: they may come one at a time.
        dtype: of the weights in the block, best the engine's.

    Raises:
        OSError: there is not enough memory.

    Examples:
        >>> shared = SharedWeights([("norm", torch.ones(3))], torch.float32)
        >>> list(shared.block.weights())
        [('norm', tensor([1., 1., 1.]))]
        >>> shared.close()
    """

    def __init__(self, weights: Named, dtype: torch.dtype) -> None:
        name, layout = f"torchrl_grpo_weights_{uuid.uuid4().hex}", []
        self._file = open(os.memfd_create(name), "wb")  # noqa: SIM115  closed by close
        try:
            # Written and not mapped: a lack of memory is an error here, and not a SIGBUS later.
            for weight_name, weight in weights:
                value = weight.detach().to("cpu", dtype).contiguous()
                self._file.write(tensor_bytes(value).data)
                layout.append((weight_name, tuple(value.shape)))
            self._file.flush()
        except BaseException:
            self.close()
            raise
        self.block = SharedBlock(f"/proc/{os.getpid()}/fd/{self._file.fileno()}", name, [(dtype_name(dtype), layout)])

    def close(self) -> None:
        """Lets nobody open the block any more; who has it open keeps it. May be called again."""
        self._file.close()


_KINDS: dict[str, type[PlainHandle]] = {kind.__name__: kind for kind in (SharedBlock, Broadcast, CudaBuffers)}
_NUMPY_STATE = struct.Struct("2496sqqd")
"""The state of NumPy's generator: its 624 words, the place among them, and a Gaussian that is left over."""


class WeightSyncExtension:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), called by name through ``collective_rpc``.

    ``self`` is the vLLM worker, and each tensor-parallel rank reads for itself. vLLM copies what is read to where the
    model is, so the same code serves every device (on CUDA it has not been run yet).
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
        # On a CPU vLLM computes with packed weights, and the reload leaves two kinds of them wrong: a tied head, which
        # is not sent, keeps the packed copy of the old embedding, and experts are not packed.
        for module in worker.model_runner.get_model().modules():
            if type(module).__name__ == "ParallelLMHead" and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
            elif worker.device.type == "cpu" and type(module).__name__ == "RoutedExperts":
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)

    # Sampling draws from torch's generator of the device; on CUDA vLLM also draws each request's seed from NumPy's.

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

    def settle(self) -> None:
        """Makes the worker one of the run's processes, once all of them have met."""
        show_stack_when_asked()
        unname_queues()


def unname_queues() -> None:
    """Removes the files of the message queues that vLLM made in this process, once their other sides have opened them.

    Who has a queue open keeps it, and its memory (``/dev/shm/psm_*``, 160 and 240 MiB) is gone with the last of these
    processes, however they end. Python's resource tracker would remove it too, but Ray kills it with the actor.
    """
    frozen = gc.get_freeze_count()  # by vLLM; what is frozen is not found
    gc.unfreeze()
    for one in gc.get_objects():
        if type(one).__name__ == "ShmRingBuffer" and one.is_creator:
            one.shared_memory.unlink()
            one.is_creator = False  # or it does so at its end
    if frozen:
        gc.freeze()

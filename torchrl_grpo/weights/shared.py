"""Weights in the host's shared memory: the last step from the object store, or from the trainer's
process, to vLLM's workers.
"""

from __future__ import annotations

import math
import os
import uuid
from dataclasses import asdict, dataclass

import torch

from torchrl_grpo.weights.handle import (
    Part,
    Shapes,
    TransferHandle,
    Updates,
    dtype_name,
    staged,
    tensor_bytes,
    unpacked,
)
from torchrl_grpo.weights.named import NamedTensors, TensorStream
from torchrl_grpo.weights.receipts import Digests


@dataclass(frozen=True)
class SharedBlock(TransferHandle):
    """Weights in shared memory of this machine.

    Attributes:
        path: path of the block, which every process of this machine and user can open.
        name: name that the path must resolve to, so that another file is not mistaken for the
            block.
        part: layout of the block.
    """

    backend = "object_store"

    path: str
    name: str
    part: Part

    @property
    def layout(self) -> Shapes:
        return self.part[1]

    def updates(self) -> Updates:
        yield asdict(self)

    def weights(self) -> TensorStream:
        if not os.path.exists(self.path) or self.name not in os.readlink(self.path):
            raise RuntimeError(
                f"the shared weights at {self.path} are gone: their process has freed them."
            )
        dtype, layout = self.part
        size = sum(math.prod(shape) for _, shape in layout)
        return unpacked(
            torch.from_file(self.path, shared=True, size=size, dtype=getattr(torch, dtype)),
            self.part,
        )


class SharedWeights:
    """Weights in a block of shared memory, which an engine's workers read through ``block``.

    The block has no name in any file system (it is a ``memfd``, Linux only). It can be opened until
    this object is closed, and its memory is freed with the last process that uses it, however that
    process ends.

    Attributes:
        block: handle for the readers, with a receipt.

    Args:
        weights: may come one at a time.
        dtype: dtype of the weights in the block, ideally the engine's.

    Raises:
        OSError: there is not enough memory.

    Examples:
        >>> shared = SharedWeights([("norm", torch.ones(3))], torch.float32)
        >>> list(shared.block.weights())
        [('norm', tensor([1., 1., 1.]))]
        >>> shared.close()
    """

    def __init__(self, weights: NamedTensors, dtype: torch.dtype) -> None:
        name = f"torchrl_grpo_weights_{uuid.uuid4().hex}"
        layout = []
        known = getattr(weights, "receipt", None) or {}
        digests = Digests()
        self._file = open(os.memfd_create(name), "wb")  # noqa: SIM115  closed by close
        try:
            # Written, not mapped: a lack of memory is an OSError here instead of a SIGBUS later.
            for weight_name, weight in weights:
                value = weight.detach().to(dtype)  # on its device
                if weight_name not in known or weight.dtype != dtype:
                    digests.add(weight_name, value)
                value = staged(value)
                self._file.write(tensor_bytes(value).data)
                layout.append((weight_name, tuple(value.shape)))
            self._file.flush()
        except BaseException:
            self.close()
            raise
        self.block = SharedBlock(
            f"/proc/{os.getpid()}/fd/{self._file.fileno()}", name, (dtype_name(dtype), layout)
        )
        receipt = {**known, **digests.receipt()}
        self.block.note(
            receipt={name: receipt[name] for name, _ in layout}, receipt_s=digests.seconds
        )

    def close(self) -> None:
        """Prevent further opening of the block; open ones stay valid. May be called again."""
        self._file.close()

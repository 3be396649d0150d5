"""How the trainer's weights reach the engines.

- ``named``: the weights by name, LoRA merged, gathered one at a time.
- ``handles``: the interface (``Sender``, ``WeightHandle``), and what goes through Ray's object store, shared memory, a file.
- ``adapters``: LoRA adapters alone.
- ``broadcast``, ``cuda_ipc``: what goes over a process group, and what stays on a GPU.
- ``worker``: what vLLM's worker processes do.
- ``gap``: whether an engine has the trainer's weights.
"""

from torchrl_grpo.weights.adapters import Adapters, AdapterSender
from torchrl_grpo.weights.broadcast import BroadcastSender
from torchrl_grpo.weights.cuda_ipc import CudaIpcSender
from torchrl_grpo.weights.handle import (
    FileSender,
    ObjectSender,
    PackedWeights,
    PlainHandle,
    Sender,
    SharedBlock,
    SharedSender,
    SharedWeights,
    WeightHandle,
    check_layout,
)
from torchrl_grpo.weights.mismatch import log_prob_mismatch, sample_probe, sync_mismatch
from torchrl_grpo.weights.named import LoraDelta, named_adapters, named_weights
from torchrl_grpo.weights.worker import WeightSyncExtension

__all__ = [
    "AdapterSender",
    "Adapters",
    "BroadcastSender",
    "CudaIpcSender",
    "FileSender",
    "LoraDelta",
    "ObjectSender",
    "PackedWeights",
    "PlainHandle",
    "Sender",
    "SharedBlock",
    "SharedSender",
    "SharedWeights",
    "WeightHandle",
    "WeightSyncExtension",
    "check_layout",
    "log_prob_mismatch",
    "named_adapters",
    "named_weights",
    "sample_probe",
    "sync_mismatch",
]

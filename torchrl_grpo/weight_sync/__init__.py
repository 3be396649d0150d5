"""How the trainer's weights reach the engines.

- ``named``: the weights by name, LoRA merged, gathered one at a time.
- ``parcels``: the interface (``Sender``, ``Parcel``), and what goes through Ray's object store, shared memory, a file.
- ``adapters``: LoRA adapters alone.
- ``broadcast``, ``cuda_ipc``: what goes over a process group, and what stays on a GPU.
- ``worker``: what vLLM's worker processes do.
- ``gap``: whether an engine has the trainer's weights.
"""

from torchrl_grpo.weight_sync.adapters import Adapters, AdapterSender
from torchrl_grpo.weight_sync.broadcast import BroadcastSender
from torchrl_grpo.weight_sync.cuda_ipc import CudaIpcSender
from torchrl_grpo.weight_sync.gap import log_prob_gap, sample_probe, sync_gap
from torchrl_grpo.weight_sync.named import LoraDelta, named_adapters, named_weights
from torchrl_grpo.weight_sync.parcels import (
    FileSender,
    ObjectSender,
    PackedWeights,
    Parcel,
    PlainParcel,
    Sender,
    SharedBlock,
    SharedSender,
    SharedWeights,
    check_layout,
)
from torchrl_grpo.weight_sync.worker import WeightSyncExtension

__all__ = [
    "AdapterSender",
    "Adapters",
    "BroadcastSender",
    "CudaIpcSender",
    "FileSender",
    "LoraDelta",
    "ObjectSender",
    "PackedWeights",
    "Parcel",
    "PlainParcel",
    "Sender",
    "SharedBlock",
    "SharedSender",
    "SharedWeights",
    "WeightSyncExtension",
    "check_layout",
    "log_prob_gap",
    "named_adapters",
    "named_weights",
    "sample_probe",
    "sync_gap",
]

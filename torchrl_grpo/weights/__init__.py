"""How the trainer's weights reach the engines.

- ``handle``: the interface (``Sender``, ``WeightHandle``), and an engine in the trainer's process.
- ``object_store``, ``broadcast``, ``cuda_ipc``: the kinds of transfer to an engine in another process.
- ``adapters``: LoRA adapters in place of whole weights, by any kind of transfer.
- ``kinds``: which kind a run takes, and its sender.
- ``named``: the weights of a model by name, LoRA merged, gathered one at a time; ``check``: whether they fit a model.
- ``worker``: what vLLM's worker processes do.
- ``mismatch``: whether an engine has the trainer's weights.
"""

from torchrl_grpo.weights.adapters import AdapterHandle, AdapterSender, BaseModel
from torchrl_grpo.weights.broadcast import BroadcastSender
from torchrl_grpo.weights.check import check_weights, load_weights
from torchrl_grpo.weights.cuda_ipc import CudaIpcSender
from torchrl_grpo.weights.handle import DirectSender, PlainHandle, Sender, Source, WeightHandle
from torchrl_grpo.weights.kinds import make_sender, transfer_kind
from torchrl_grpo.weights.mismatch import log_prob_mismatch, sample_probe
from torchrl_grpo.weights.named import LoraDelta, expected_weights, named_adapters, named_weights
from torchrl_grpo.weights.object_store import ObjectSender, PackedWeights

__all__ = [
    "AdapterHandle",
    "AdapterSender",
    "BaseModel",
    "BroadcastSender",
    "CudaIpcSender",
    "DirectSender",
    "LoraDelta",
    "ObjectSender",
    "PackedWeights",
    "PlainHandle",
    "Sender",
    "Source",
    "WeightHandle",
    "check_weights",
    "expected_weights",
    "load_weights",
    "log_prob_mismatch",
    "make_sender",
    "named_adapters",
    "named_weights",
    "sample_probe",
    "transfer_kind",
]

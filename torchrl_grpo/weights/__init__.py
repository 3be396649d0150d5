"""Weight transfer from the trainer to the engines.

- ``handle``: the interface (``Sender``, ``WeightHandle``), and an engine in the trainer's process.
- ``object_store``, ``nccl``, ``ipc``: the kinds of transfer to an engine in another process.
- ``adapters``: LoRA adapters instead of whole weights, over any kind of transfer.
- ``kinds``: the choice of a run's kind, and its sender.
- ``named``: a model's weights by name (LoRA merged, gathered one at a time), and the check that
  weights fit a model.
- ``receipts``: digests of the tensors that are sent, received and used.
- ``worker``: methods of vLLM's worker processes; ``slots``: adapters in them.
- ``transfer_engine``, ``shared``: our engine of vLLM's weight transfer.
- ``rendezvous``: the store through which trainer and engines agree.
"""

from torchrl_grpo.weights.handle import (
    DirectHandle,
    DirectSender,
    Sender,
    TransferHandle,
    WeightHandle,
)
from torchrl_grpo.weights.kinds import Transfer, make_sender, transfer_kind
from torchrl_grpo.weights.named import (
    LoraDelta,
    check_weights,
    expected_weights,
    load_weights,
    named_adapter_weights,
    named_adapters,
    named_weights,
    weights_of,
)
from torchrl_grpo.weights.object_store import ObjectSender

__all__ = [
    "DirectHandle",
    "DirectSender",
    "LoraDelta",
    "ObjectSender",
    "Sender",
    "Transfer",
    "TransferHandle",
    "WeightHandle",
    "check_weights",
    "expected_weights",
    "load_weights",
    "make_sender",
    "named_adapter_weights",
    "named_adapters",
    "named_weights",
    "transfer_kind",
    "weights_of",
]

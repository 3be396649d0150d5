"""The object store as an engine of vLLM's weight transfer. Only vLLM's factory imports this module,
in its workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from torchrl_grpo.weights.handle import Part
from torchrl_grpo.weights.named import NamedTensors, TensorStream
from torchrl_grpo.weights.shared import SharedBlock

_base: Any = import_module("vllm.distributed.weight_transfer.base")
_host: Any = import_module("vllm.v1.kv_offload.cpu.host_register")
_mtp: Any = import_module("vllm.model_executor.model_loader.mtp_validation")
_reload: Any = import_module("vllm.model_executor.model_loader.reload")


@dataclass
class InitInfo(_base.WeightTransferInitInfo):
    """Empty initialization info."""


@dataclass
class UpdateInfo(_base.WeightTransferUpdateInfo):
    """All weights of an update.

    Attributes:
        path, name, part: see ``SharedBlock``.
    """

    path: str
    name: str
    part: Part

    def weights(self) -> TensorStream:
        """Return the weights in the block, by name."""
        return SharedBlock(self.path, self.name, self.part).weights()


class ObjectStoreEngine(_base.WeightTransferEngine):
    """Engine that loads weights from the host's shared memory. vLLM copies them to the model's
    device.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """See vLLM's ``WeightTransferEngine``, here and below."""

    def start_weight_update(self) -> None:
        _reload.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        _reload.finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for an accelerator.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        # The trained model has no layers for speculative decoding.
        block = _pinned(update_info.weights(), self.device)
        with block as weights, _mtp.disable_mtp_completeness_check():
            self.model.load_weights(weights)

    def shutdown(self) -> None:
        pass


@contextmanager
def _pinned(weights: TensorStream, device: torch.device) -> Iterator[NamedTensors]:
    """Context with the weights of a block by name, while its memory is pinned for a CUDA device."""
    named = list(weights)
    blocks = [named[0][1].untyped_storage()] if named and device.type == "cuda" else []
    places = [
        block.data_ptr()
        for block in blocks
        if _host.host_register(block.data_ptr(), block.nbytes())
    ]
    try:
        yield named
    finally:
        for place in places:
            torch.cuda.synchronize(device)  # copies may still read the block
            _host.host_unregister(place)

"""The object store as an engine of vLLM's weight transfer. vLLM's factory imports this module, in its workers alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from torchrl_grpo.weights.handle import Part
from torchrl_grpo.weights.shared import SharedBlock

_base: Any = import_module("vllm.distributed.weight_transfer.base")
_reload: Any = import_module("vllm.model_executor.model_loader.reload")


@dataclass
class InitInfo(_base.WeightTransferInitInfo):
    """There is nothing to agree on."""


@dataclass
class UpdateInfo(_base.WeightTransferUpdateInfo):
    """All weights of an update.

    Attributes:
        path, name, part: of a ``SharedBlock``.
    """

    path: str
    name: str
    part: Part

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by name."""
        return SharedBlock(self.path, self.name, self.part).weights()


class ObjectStoreEngine(_base.WeightTransferEngine):
    """Loads weights from shared memory of the host. vLLM copies them to where the model is: it serves every device.

    Attributes:
        loaded: names of the model's parameters that the latest update replaced.
    """

    loaded: Collection[str] = ()

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """See vLLM's ``WeightTransferEngine``, here and below."""

    def start_weight_update(self) -> None:
        _reload.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        _reload.finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not vLLM's own, which waits for an accelerator.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.loaded = self.model.load_weights(update_info.weights()) or set()

    def shutdown(self) -> None:
        pass

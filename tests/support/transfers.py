"""A weight transfer that needs no GPU: vLLM's, with an engine that reads the weights from a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.weights.handle import DirectHandle, TransferHandle
from torchrl_grpo.weights.receipts import receipt_of
from torchrl_grpo.weights.transfer_engine import ObjectStoreEngine
from torchrl_grpo.weights.worker import WeightSyncExtension

EXTENSION = "tests.support.transfers.Extension"
ENGINE = "from_file"


@dataclass
class FileInfo(import_module("vllm.distributed.weight_transfer.base").WeightTransferUpdateInfo):  # type: ignore[misc]
    """A part of the weights, and its fault: ``raise``, ``hang``, ``corrupt``, ``nothing`` or an
    empty string.
    """

    path: str
    wrong: str
    layers: tuple[()] = ()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.wrong == "raise":
            raise RuntimeError("no such link")
        if self.wrong == "hang":
            threading.Event().wait()
        if self.wrong == "nothing":
            return
        for name, weight in torch.load(self.path).items():
            yield (
                name,
                weight
                + (weight.abs().max() * 2**-7 if self.wrong == "corrupt" and "norm" in name else 0),
            )


class FileEngine(ObjectStoreEngine):
    """Loads the contents of a file."""

    update_info_cls = FileInfo


class Extension(WeightSyncExtension):
    """vLLM's worker extension with that engine, and with faults of a model's parameters."""

    kept: tuple[Tensor, Tensor] | None = None

    def _parameter(self, name: str) -> Tensor:
        worker: Any = self
        return worker.model_runner.get_model().get_parameter(name).data

    def lose(self, name: str) -> None:
        """Drop what a parameter has, as sleep does."""
        self._parameter(name).zero_()

    def keep(self, name: str) -> None:
        """Leave a parameter as it is in the next update."""
        self.kept = self._parameter(name), self._parameter(name).clone()

    def receipt(self) -> Any:
        if self.kept is not None:
            self.kept[0].copy_(self.kept[1])
            self.kept = None
        return super().receipt()

    factory = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    with suppress(ValueError):
        factory.register_engine(ENGINE, FileEngine)

    def lose_adapters(self, lost: bool) -> None:
        """Leave the slots as they are from here on, or fill them again."""
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        if lost:
            manager.activate_adapter = manager.get_adapter
        else:
            del manager.activate_adapter


@dataclass(frozen=True)
class FileWeights(DirectHandle, TransferHandle):
    """Weights in files, split into two parts.

    Attributes:
        folder: folder of the files.
        wrong: fault of the second part, see ``FileInfo``.
    """

    backend = ENGINE

    folder: Path
    wrong: str = ""

    def updates(self) -> Iterator[dict[str, Any]]:
        weights = [(name, weight.clone()) for name, weight in self.read()]
        self.note(receipt=receipt_of(weights))
        for number, part in enumerate((weights[:5], weights[5:])):
            path = self.folder / f"{number}.pt"
            torch.save(dict(part), path)
            yield {"path": str(path), "wrong": self.wrong if number else ""}

"""LoRA adapters beside the weights of a PyTorch model (arXiv 2106.09685), for sampling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.weights.adapters import AdapterHandle
from torchrl_grpo.weights.receipts import Digests, compare


@torch.no_grad()
def hold(model: nn.Module, handle: AdapterHandle) -> Digests:
    """Replace a model's adapters, which its linear layers add to their output. The model's weights
    stay as they are.

    Args:
        model: as it was loaded.
        handle: of the adapters.

    Returns:
        digests of the adapters that arrived.

    Raises:
        ReceiptError: they are not those that were sent.
    """
    digests = Digests()
    matrices = digests.of(handle.weights())
    for (name, scaling), (_, a), (_, b) in zip(handle.layers, matrices, matrices, strict=True):
        layer: Any = model.get_submodule(name.removesuffix(".weight"))
        if not hasattr(layer, "adapter"):
            layer.register_forward_hook(_add)
        layer.adapter = a.to(layer.weight, copy=True), (b * scaling).to(layer.weight)
    compare(handle.receipt or {}, digests.receipt(), type(model).__name__)
    return digests


def drop(model: nn.Module) -> None:
    """Remove a model's adapters."""
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "adapter"):
            layer.adapter = None


def joined(layers: tuple[nn.Linear, ...]) -> tuple[Tensor, Tensor] | None:
    """Return A [R, in] and B [out, R] of one layer for several, scaled; None without adapters."""
    adapters = [getattr(layer, "adapter", None) for layer in layers]
    if not any(adapters):
        return None
    each = [
        adapter or (layer.weight[:0], layer.weight[:, :0])
        for layer, adapter in zip(layers, adapters, strict=True)
    ]
    return torch.cat([a for a, _ in each]), torch.block_diag(*(b for _, b in each))


def _add(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Forward hook of a layer with an adapter."""
    if layer.adapter is None:
        return output
    a, b = layer.adapter
    return output + inputs[0] @ a.T @ b.T

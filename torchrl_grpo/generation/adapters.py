"""LoRA adapters (arXiv 2106.09685) for sampling, separate from a PyTorch model's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.weights.adapters import AdapterHandle
from torchrl_grpo.weights.receipts import Digests, compare


@torch.no_grad()
def set_adapters(model: nn.Module, handle: AdapterHandle) -> Digests:
    """Replace the adapters that a model's linear layers add to their outputs. The model's weights do
    not change.

    Args:
        model: the base model.
        handle: handle for the adapters.

    Returns:
        digests of the adapters that arrived.

    Raises:
        ReceiptError: the adapters that arrived differ from those that were sent.
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


def remove_adapters(model: nn.Module) -> None:
    """Remove a model's adapters."""
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "adapter"):
            layer.adapter = None


def join_adapters(layers: tuple[nn.Linear, ...]) -> tuple[Tensor, Tensor] | None:
    """Return the scaled matrices A [R, in] and B [out, R] of layers that are fused into one; None if no
    layer has adapters."""
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

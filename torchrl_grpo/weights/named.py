"""The weights of a model under the names of its Hugging Face checkpoint: all of them, or what LoRA adapters add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class LoraDelta:
    """What one adapter adds to one weight: ``scaling * b @ a`` (arXiv 2106.09685).

    Attributes:
        a: [r, in].
        b: [out, r].
        scaling: factor of the product.
    """

    a: Tensor
    b: Tensor
    scaling: float

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """[out, in], computed in float32 at least and then rounded."""
        wide = torch.promote_types(self.a.dtype, torch.float32)
        return (self.b.to(wide) @ self.a.to(wide) * self.scaling).to(dtype)


@torch.no_grad()
def merged(weight: Tensor, deltas: Sequence[LoraDelta]) -> Tensor:
    """A weight with what adapters add to it, in the weight's dtype; without any, the weight itself."""
    total = None
    for delta in deltas:
        added = delta.tensor(weight.dtype)
        total = added if total is None else total + added
    return weight if total is None else weight + total


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a causal language model under the names of its Hugging Face checkpoint.

    A LoRA model gives its base model's weights with the active adapters merged in; the model itself is left unchanged
    and the merged tensors are made one at a time. So are those of a sharded model: each is gathered when it is asked
    for, which all of its ranks must do.

    Args:
        model: a Hugging Face model, or a peft model around one; sharded or not.

    Yields:
        (name, tensor); a parameter that several modules share comes once. The tensors are detached, and are the
        model's own memory where nothing had to be merged or gathered.

    Raises:
        ValueError: an adapter is not plain LoRA (DoRA, for example), so that it cannot be added to the base weight.
    """
    for name, weight in _merged_weights(model):
        yield name, _whole(weight)


def named_adapters(model: nn.Module) -> Iterator[tuple[str, LoraDelta]]:
    """What the active adapters of a LoRA model add to its base model's weights.

    Args:
        model: a peft model; sharded or not. A sharded matrix is gathered when it is asked for, which all ranks must do.

    Yields:
        (name of the weight in the base model's checkpoint, what is added), one for each adapter of each layer.

    Raises:
        ValueError: an adapter is not plain LoRA, or is merged into the base weight.
    """
    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    for name, layer in _lora_layers(base).items():
        if layer.merged:
            raise ValueError(f"{name}: its adapters are merged into the weight and cannot be sent apart: unmerge them.")
        for delta in _deltas(name, layer):
            yield f"{name}.weight", LoraDelta(_whole(delta.a), _whole(delta.b), delta.scaling)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As ``named_weights``, with sharded weights merged part by part and not yet gathered."""
    if not hasattr(model, "peft_config"):
        for name, weight in model.named_parameters():
            yield name, weight.detach()
        return
    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    layers = _lora_layers(base)
    for name, weight in base.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = path.removesuffix(".base_layer")
        if owner != path and owner in layers:
            layer = layers[owner]
            deltas = _deltas(owner, layer) if leaf == "weight" and not layer.merged else []
            yield f"{owner}.{leaf}", merged(weight.detach(), deltas)
        elif not any(path.startswith(f"{layer}.") for layer in layers):
            yield name, weight.detach()


def _lora_layers(base: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}


def _deltas(name: str, layer: Any) -> list[LoraDelta]:
    """What each active adapter adds to a layer's base weight."""
    deltas = []
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            module = layer.lora_A[adapter]
            a, b = module.weight, layer.lora_B[adapter].weight
            transposed, plain = layer.fan_in_fan_out, isinstance(module, nn.Linear)
        elif adapter in layer.lora_embedding_A:
            a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
            transposed, plain = True, True
        else:
            continue
        if adapter in layer.lora_variant or not plain:
            kind = layer.lora_variant.get(adapter, layer)
            raise ValueError(
                f"{name}: only plain LoRA can be sent to an engine, adapter {adapter!r} is a {type(kind).__name__}: "
                "train without it."
            )
        a, b = a.detach(), b.detach()
        if transposed:  # contiguous: a reader, who gets them so, is to find the same sums
            a, b = b.T.contiguous(), a.T.contiguous()
        deltas.append(LoraDelta(a, b, layer.scaling[adapter]))
    return deltas

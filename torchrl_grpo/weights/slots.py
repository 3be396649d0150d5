"""Adapters in the slots of a vLLM worker, separate from the base weights.

Only ``worker`` calls this module, in vLLM's worker processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

import torch

from torchrl_grpo.compat.vllm import adapter_manager
from torchrl_grpo.weights.named import NamedTensors, TensorStream


@torch.no_grad()
def attach(
    worker: Any,
    matrices: NamedTensors,
    layers: Sequence[tuple[str, float]],
    number: int,
    keep: Collection[int],
) -> None:
    """Load adapters into a slot, for requests with this number.

    Args:
        worker: vLLM's worker, which takes its part of each matrix.
        matrices: A [r, in] and B [out, r] of each adapter.
        layers: parameter name and scaling of each adapter, in the same order.
        number: number of the adapters, at least 1; a slot with the same number is overwritten.
        keep: numbers of other adapters that requests still use; all others are removed.

    Raises:
        RuntimeError: a layer has no slot; nothing was changed.
    """
    weights = import_module("vllm.lora.lora_weights").LoRALayerWeights
    parsed = import_module("vllm.lora.utils").parse_fine_tuned_lora_name
    manager = adapter_manager(worker)
    dtype, slots = manager.lora_config.lora_dtype, {*manager.modules}
    slots.update(*manager.packed_modules.values())
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = mapper and mapper.get_rename_mapper()
    loras = {}
    pairs = iter(matrices)
    for (name, scaling), (_, a), (_, b) in zip(layers, pairs, pairs, strict=True):
        target = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
        module, _ = parsed(target, mapper)
        # Scaled before it is rounded; copies, which vLLM keeps.
        b = (b * scaling).to(dtype)
        loras[module] = weights(module, len(a), 1, a.to(dtype, copy=True), b, scaling=1)
        if module not in slots:
            raise RuntimeError(
                f"train_model.lora.target_modules: vLLM does not support adapters for {name}: leave it out, "
                "or use inference_model.backend=transformers."
            )
    for other in set(manager.list_adapters()) - set(keep):
        manager.remove_adapter(other)
    manager.add_adapter(import_module("vllm.lora.lora_model").LoRAModel(number, 0, loras))
    manager.activate_adapter(number)


def slot_tensors(worker: Any) -> TensorStream:
    """Yield the tensors that hold all slots of each module, named after vLLM's module."""
    if worker.vllm_config.lora_config is not None:
        for name, module in adapter_manager(worker).modules.items():
            stacks = enumerate((*module.lora_a_stacked, *module.lora_b_stacked))
            yield from ((f"{name}.slots.{part}", stack) for part, stack in stacks)

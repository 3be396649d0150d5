"""What a training step keeps in memory, and what would make it less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchrl_grpo.models.loading import base_model_of

_LORA_SHARE = 0.02
"""Of a model's weights that adapters of rank 16 add, about."""


@dataclass(frozen=True)
class StepMemory:
    """What one rank holds in a training step, in bytes.

    Attributes:
        weights: of the model.
        gradients: of what is trained.
        optimizer: AdamW's two moments.
        activations: that the backward pass needs, of a micro-batch.
        checkpointed: the same with gradient checkpointing.
        layer: of one layer, which is what a pass without a backward one needs.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    checkpointed: int
    layer: int


def step_memory(
    model: nn.Module,
    trained: Sequence[Any],
    tokens: int,
    bytes_per_number: int,
    ranks: int = 1,
    *,
    small_states: bool = False,
) -> StepMemory:
    """Counts what a step keeps: weights exactly, activations of a decoder with gated layers to about a quarter.

    Args:
        model: with a Hugging Face config; sharded over the ranks, or not.
        trained: its trained parameters.
        tokens: in a micro-batch.
        bytes_per_number: of the activations.
        ranks: that the model is sharded over.
        small_states: whether the optimizer keeps 8 bits a moment.
    """
    config: Any = base_model_of(model).config.get_text_config()
    wide, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    keys_and_values = 2 * wide * (getattr(config, "num_key_value_heads", None) or heads) // heads
    inner = getattr(config, "intermediate_size", None) or 4 * wide
    # Kept for the backward pass: inputs of norms and projections, queries, keys, values, attention's output; of a gated
    # layer its two halves, the activation and the product.
    layer = (8 * wide + keys_and_values + 4 * inner) * bytes_per_number * tokens
    trained_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained) // ranks
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) // ranks
    inputs = layers * wide * bytes_per_number * tokens
    states = trained_bytes // 2 if small_states else 2 * trained_bytes
    return StepMemory(weights, trained_bytes, states, layers * layer, inputs + layer, layer)


def savings(
    memory: StepMemory,
    tokens: int,
    *,
    checkpoints: bool,
    lora: bool,
    full_precision: bool,
    small_states: bool,
    ranks: int,
) -> dict[str, int]:
    """What each knob that is not turned yet would save of a rank's memory, in bytes.

    Args:
        memory: as ``step_memory`` counts it.
        tokens: ``train.micro_batch_tokens``.
        checkpoints: whether gradient checkpointing is on.
        lora: whether adapters alone are trained.
        small_states: whether the optimizer keeps 8 bits a moment.
        full_precision: whether activations are in float32.
        ranks: that the model is sharded over.
    """
    activations = memory.checkpointed if checkpoints else memory.activations
    states = memory.gradients + memory.optimizer
    found = {f"train.micro_batch_tokens={tokens // 2}": activations // 2} if tokens > 1 else {}
    if not checkpoints:
        found["train_model.gradient_checkpointing=true"] = memory.activations - memory.checkpointed
    if full_precision:
        found["train.mixed_precision=bf16"] = activations // 2
    if not lora:
        found["train_model.lora.enabled=true"] = int((1 - 3 * _LORA_SHARE) * states)
    found[f"train_model.num_devices={2 * ranks}"] = (memory.weights + states) // 2
    if ranks == 1 and not small_states:
        found["optimizer.name=adamw_8bit"] = memory.optimizer * 3 // 4
    if ranks > 1:
        found["train_model.cpu_offload=true"] = memory.weights + states
    return found

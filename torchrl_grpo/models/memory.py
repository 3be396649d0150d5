"""Peak memory of a training step, and what would reduce it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchrl_grpo.models.loading import base_model_of

_LORA_RANK = 16
"""Of adapters where ``train_model.lora.r`` is not set."""


@dataclass(frozen=True)
class StepSetup:
    """How a step is made, as far as a rank's memory depends on it.

    Attributes:
        tokens: in the largest pass.
        sequences: in that pass.
        passes: in a step.
        number: bytes of an activation.
        checkpoints: whether gradient checkpointing is on.
        lora: whether adapters alone are trained.
        small_states: whether the optimizer keeps 8 bits a moment.
        ranks: that the model is sharded over.
        offloads: whether weights, gradients and moments rest on the CPU.
    """

    tokens: int
    sequences: int
    passes: int
    number: int
    checkpoints: bool = False
    lora: bool = False
    small_states: bool = False
    ranks: int = 1
    offloads: bool = False


@dataclass(frozen=True)
class StepMemory:
    """Memory of a rank in a training step, in bytes.

    Attributes:
        weights: of the model, with their copies in the 16 bits that it computes in.
        states: gradients of what is trained, and AdamW's two moments.
        activations: of the largest pass, with the gradients that its backward pass holds of them.
        peak: the most at a time: less than the sum where a step is one pass, whose gradients come as activations go.
    """

    weights: int
    states: int
    activations: int
    peak: int


def step_memory(model: nn.Module, setup: StepSetup) -> StepMemory:
    """Counts what a step keeps: weights exactly, activations as a decoder with gated layers has them.

    Args:
        model: with a Hugging Face config; sharded over the ranks, or not.
        setup: of the step; it may train adapters that the model does not have.
    """
    base = base_model_of(model)
    config, head = base.config.get_text_config(), base.get_output_embeddings().weight
    autocast = setup.number < head.element_size()
    weights = sum(_bytes(parameter) for parameter in model.parameters())
    trained = sum(_bytes(parameter) for parameter in model.parameters() if parameter.requires_grad)
    if setup.lora and not hasattr(model, "peft_config"):
        linear = [module for module in base.modules() if isinstance(module, nn.Linear) and module.weight is not head]
        trained = sum(sum(module.weight.shape) for module in linear) * _LORA_RANK * head.element_size()
        weights += trained
    weights, trained = weights // setup.ranks, trained // setup.ranks
    moments = trained // 2 if setup.small_states else 2 * trained
    if setup.offloads:
        weights = trained = moments = 0
    if setup.ranks > 1:  # gathered for the whole pass: what belongs to no layer
        weights += head.numel() * setup.number
    elif autocast and not setup.checkpoints:  # its copies, for the backward pass
        weights += weights * setup.number // head.element_size()

    depth, wide = config.num_hidden_layers, config.hidden_size
    layer = setup.tokens * _layer_bytes(config, setup.number, setup.lora)
    kept = depth * setup.tokens * wide * head.element_size() + layer if setup.checkpoints else depth * layer
    # Where the backward pass begins there are gradients of two tensors as wide as a layer's gates, and of its input and
    # output, or logits; in 16 bits they are in float32 too, or beside copies that are.
    activations = kept + setup.tokens * 4 * 2 * (_inner(config) + wide)
    # It begins with all activations and the head's gradient, and ends with one layer's and all gradients, or with the
    # embedding's beside those (and the head's, which waited for it where they are tied). Those of earlier passes are
    # there all the time.
    of_head, several = 0 if setup.lora else _bytes(head), setup.passes > 1
    tied = bool(getattr(config, "tie_word_embeddings", False))
    first = activations + of_head + several * trained
    last = max(activations - kept + layer, (several + tied) * of_head) + trained
    return StepMemory(weights, trained + moments, activations, weights + moments + max(first, last))


def forward_memory(model: nn.Module, tokens: int, number: int) -> int:
    """Activations of a pass without a backward one, in bytes: three as wide as a layer's gates, its input and output.

    Args:
        model: with a Hugging Face config.
        tokens: in the pass.
        number: bytes of an activation.
    """
    config: Any = base_model_of(model).config.get_text_config()
    return tokens * number * (3 * _inner(config) + 2 * int(config.hidden_size))


def savings(model: nn.Module, setup: StepSetup) -> dict[str, int]:
    """Bytes that each knob that is not turned yet would save of a rank's peak; below 0 where it would cost some.

    Args:
        model: as in ``step_memory``.
        setup: of the step as it is.
    """
    half, single = setup.tokens // 2, setup.passes == 1
    knobs: dict[str, StepSetup] = {}
    if setup.sequences > 1:
        knobs[f"train.micro_batch_tokens={half}"] = replace(setup, tokens=half, passes=2 * setup.passes)
    if not setup.checkpoints:
        knobs["train_model.gradient_checkpointing=true"] = replace(setup, checkpoints=True)
    if setup.number == 4:
        knobs["train.mixed_precision=bf16"] = replace(setup, number=2)
    if not setup.lora:
        knobs["train_model.lora.enabled=true"] = replace(setup, lora=True)
    share = replace(setup, tokens=half if single and setup.sequences > 1 else setup.tokens, ranks=2 * setup.ranks)
    knobs[f"train_model.num_devices={share.ranks}"] = share
    if setup.ranks == 1 and not setup.small_states:
        knobs["optimizer.name=adamw_8bit"] = replace(setup, small_states=True)
    if setup.ranks > 1 and not setup.offloads:
        knobs["train_model.cpu_offload=true"] = replace(setup, offloads=True)
    now = step_memory(model, setup).peak
    return {name: now - step_memory(model, other).peak for name, other in knobs.items()}


def _layer_bytes(config: Any, number: int, lora: bool) -> int:
    """Bytes that a layer keeps of a token for the backward pass.

    The two norms compute in float32, and keep what they read and, where their weight is trained, what they made
    of it before. In ``number`` bytes there are queries, keys, values, attention's output, the two inputs of
    projections, and of the gated part its two halves, the activation and the product. Autocast copies an input for each
    of five projections.
    """
    wide, heads = config.hidden_size, config.num_attention_heads
    keys_and_values = 2 * wide * (getattr(config, "num_key_value_heads", None) or heads) // heads
    inputs = 2 if number == 4 else 5
    of_norms = 2 * 4 * wide * (1 if lora else 2)
    return int(of_norms + number * ((2 + inputs) * wide + keys_and_values + 4 * _inner(config)))


def _inner(config: Any) -> int:
    return int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)


def _bytes(parameter: Any) -> int:
    return int(parameter.numel() * parameter.element_size())

"""Memory of a run by role: of a training step and what would reduce it, of an engine, and of a
reference model.

The device plan, ``torchrl_grpo.plan``, the dry run and the out-of-memory messages all count with
it. Nothing heavy is imported here; ``loading.shape_of`` reads the ``Shape`` of a PyTorch model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the dtypes of the config."""
MEMORY_SHARE = 0.9
"""Share of an accelerator's memory that a role may fill."""
_ADAPTER_NUMBER = 4
"""Bytes of a number of adapters: peft keeps them in float32, whatever the model is in."""
_LORA_RANK = 16
"""Rank of adapters if ``train_model.lora.r`` is not set."""


@dataclass(frozen=True)
class Shape:
    """A decoder's size, in numbers.

    Attributes:
        parameters: all of them, tied ones once.
        active: those that a token meets: of the experts, those that it is sent to.
        layers: how many.
        hidden: width.
        query_width: numbers of a token's queries in a layer.
        kv_width: numbers that a token leaves in the key cache of a layer, and again in the value
            cache.
        inner: width of a layer's gated part, over all experts that a token is sent to.
        head: parameters of the LM head.
        tied: whether the embedding is the head.
        adapted: parameters of adapters of rank 1.
    """

    parameters: float
    active: float
    layers: int
    hidden: int
    query_width: int
    kv_width: int
    inner: int
    head: int
    tied: bool
    adapted: int


def shape_of_config(config: Any) -> Shape:
    """Return the shape of a decoder with gated layers, with or without experts.

    Args:
        config: its Hugging Face config for text, or an object with the entries of its
            ``config.json``.

    Raises:
        AttributeError: the config lacks a size.
    """

    def size(name: str, default: int) -> int:
        return int(getattr(config, name, None) or default)

    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    heads = size("num_attention_heads", 1)
    width = size("head_dim", hidden // heads)
    query_width = width * heads
    kv_width = width * size("num_key_value_heads", heads)
    experts = size("num_experts", 1)
    inner = size("intermediate_size", 4 * hidden)
    if experts > 1:
        inner = size("moe_intermediate_size", inner)
    used = size("num_experts_per_tok", 1)
    head = int(config.vocab_size) * hidden
    tied = bool(getattr(config, "tie_word_embeddings", False))
    outside_of_projections = {
        "qwen2": query_width + 2 * kv_width,
        "qwen3": 2 * width,
        "qwen3_moe": 2 * width,
    }
    small = outside_of_projections.get(getattr(config, "model_type", ""), 0)
    attention = 2 * hidden * (query_width + kv_width)
    routing = experts * hidden if experts > 1 else 0
    layer = attention + small + routing + 3 * experts * hidden * inner + 2 * hidden
    parameters = head * (1 if tied else 2) + layers * layer + hidden
    linear = 2 * (query_width + hidden) + 2 * (hidden + kv_width)
    return Shape(
        parameters=parameters,
        active=parameters - layers * 3 * (experts - used) * hidden * inner
        if experts > 1
        else parameters,
        layers=layers,
        hidden=hidden,
        query_width=query_width,
        kv_width=kv_width,
        inner=inner * used,
        head=head,
        tied=tied,
        adapted=layers * (linear + (3 * (hidden + inner) if experts == 1 else 0)),
    )


@dataclass(frozen=True)
class StepSetup:
    """Parameters of a training step that a rank's memory depends on.

    Attributes:
        tokens: in the largest pass.
        sequences: in that pass.
        passes: in a step.
        number: bytes of an activation.
        master: bytes of a weight of the model; where it is trained, of its gradient and each of its
            moments too.
        checkpoints: whether gradient checkpointing is on.
        adapters: rank of the adapters that alone are trained; 0 trains all weights.
        small_states: whether the optimizer keeps 8 bits a moment.
        ranks: that share a batch.
        replicas: copies of the model, each sharded over as many of the ranks.
        offloads: whether weights, gradients and moments rest on the CPU.
    """

    tokens: int
    sequences: int
    passes: int
    number: int
    master: int = 4
    checkpoints: bool = False
    adapters: int = 0
    small_states: bool = False
    ranks: int = 1
    replicas: int = 1
    offloads: bool = False

    def of_batch(self, tokens: float, longest: float) -> StepSetup:
        """Return the setup of steps of so many tokens, in passes of as many as this one's; no
        sequence is divided.

        Args:
            tokens: of an optimizer step, over all ranks.
            longest: tokens of a sequence.
        """
        own = max(tokens / self.ranks, longest)
        largest = min(own, max(self.tokens, longest))
        return replace(self, tokens=math.ceil(largest), passes=math.ceil(own / largest))


@dataclass(frozen=True)
class StepMemory:
    """Memory of a rank in a training step, in bytes.

    Attributes:
        parameters: the model's own.
        copies: their copies in the 16 bits that the step computes in, or the ones that are gathered
            from other ranks.
        gradients: of what is trained.
        moments: AdamW's two.
        activations: of the largest pass, with the gradients that its backward pass holds of them.
        peak: the most at a time: less than the sum where a step is one pass, whose gradients come
            as activations go.
    """

    parameters: int
    copies: int
    gradients: int
    moments: int
    activations: int
    peak: int

    @property
    def weights(self) -> int:
        """The parameters with their copies."""
        return self.parameters + self.copies

    @property
    def states(self) -> int:
        """Gradients and moments."""
        return self.gradients + self.moments

    @property
    def resting(self) -> int:
        """Bytes held between two steps: parameters and moments."""
        return self.parameters + self.moments

    def parts(self) -> dict[str, int]:
        """The same by what it is for, as messages and tables name it."""
        return {
            "weights": self.weights,
            "gradients and optimizer state": self.states,
            "activations": self.activations,
        }


def step_memory(shape: Shape, setup: StepSetup) -> StepMemory:
    """Compute the memory of a step: weights exactly, activations for a decoder with gated layers.

    Args:
        shape: of the model, without adapters.
        setup: of the step.
    """
    number, master = setup.number, setup.master
    adapters = shape.adapted * setup.adapters * _ADAPTER_NUMBER
    shards = setup.ranks // setup.replicas
    weights = int(shape.parameters * master + adapters) // shards
    trained = int(adapters or shape.parameters * master) // shards
    moments = (
        2 * trained // (_ADAPTER_NUMBER if adapters else master)
        if setup.small_states
        else 2 * trained
    )
    if setup.offloads:
        weights = trained = moments = 0
    copies, outside = 0, shape.head * (1 if shape.tied else 2)
    sharded = setup.ranks > 1 or setup.offloads
    if sharded:  # gathered: for the whole pass what belongs to no layer, and a layer
        copies = int((outside + (shape.parameters - outside) / shape.layers) * number)
    elif number < master and not setup.checkpoints:  # for the backward pass
        copies = weights * number // master

    layer = setup.tokens * _layer_bytes(shape, setup)
    inputs = shape.layers * setup.tokens * shape.hidden * master
    kept = inputs + layer if setup.checkpoints else shape.layers * layer
    # Where the backward pass begins there are gradients of two tensors as wide as a layer's gates,
    # and of its input and output, or logits; in 16 bits they are in float32 too, or beside copies
    # that are.
    activations = kept + setup.tokens * 4 * 2 * (shape.inner + shape.hidden)
    # It begins with all activations and the head's gradient, and ends with one layer's and all
    # gradients, or with the embedding's beside those (and the head's, which waited for it where
    # they are tied). Those of earlier passes are there all the time.
    of_head, several = 0 if setup.adapters else shape.head * master, setup.passes > 1
    first = activations + of_head + several * trained
    dense = shape.tied and sharded  # else it is rows of the head's (``models.embedding``)
    last = max(activations - kept + layer, (several + dense) * of_head) + trained
    peak = weights + copies + moments + max(first, last)
    return StepMemory(weights, copies, trained, moments, activations, peak)


def host_memory(shape: Shape, setup: StepSetup) -> tuple[int, int]:
    """Bytes of host memory that a rank's offloaded weights, gradients and moments take, and the
    most that they take before torch 2.14, which rounds pinned weights and gradients up to powers of
    two.
    """
    memory = step_memory(shape, replace(setup, offloads=False))
    pinned = memory.parameters + memory.gradients
    return pinned + memory.moments, 2 * pinned + memory.moments


def weight_bytes(shape: Shape, number: int, devices: int = 1) -> int:
    """Bytes of a model's weights on each of the devices that share them, ``number`` bytes each."""
    return int(shape.parameters * number / devices)


def token_cache_bytes(shape: Shape, number: int) -> int:
    """Bytes of one token in an engine's KV cache."""
    return 2 * shape.layers * shape.kv_width * number


def group_cache_bytes(shape: Shape, number: int, prompt: float, size: int, longest: int) -> float:
    """Bytes of the KV cache of a group with responses of maximum length; its prompt is stored once."""
    return (prompt + size * longest) * token_cache_bytes(shape, number)


@dataclass(frozen=True)
class ModelMemory:
    """Memory of one device of a model that is not trained, in bytes.

    Attributes:
        weights: of the model.
        cache: keys and values of the groups that an engine samples at a time.
    """

    weights: int
    cache: int = 0

    @property
    def peak(self) -> int:
        """The most at a time."""
        return self.weights + self.cache

    def parts(self) -> dict[str, int]:
        """The same by what it is for, as messages and tables name it."""
        return {"weights": self.weights} | ({"KV cache": self.cache} if self.cache else {})


def forward_memory(shape: Shape, tokens: int, number: int) -> int:
    """Bytes of activations of a pass without a backward one: three times a layer's gates, its input
    and output.

    Args:
        shape: of the model.
        tokens: in the pass.
        number: bytes of an activation.
    """
    return tokens * number * (3 * shape.inner + 2 * shape.hidden)


def savings(shape: Shape, setup: StepSetup) -> dict[str, int]:
    """Bytes that each unused setting would save of a rank's peak; negative if it would cost memory.

    Args:
        shape: as in ``step_memory``.
        setup: of the step as it is.
    """
    half, single = setup.tokens // 2, setup.passes == 1
    knobs: dict[str, StepSetup] = {}
    if setup.sequences > 1:
        knobs[f"train.micro_batch_tokens={half}"] = replace(
            setup, tokens=half, passes=2 * setup.passes
        )
    if not setup.checkpoints:
        knobs["train_model.gradient_checkpointing=true"] = replace(setup, checkpoints=True)
    if setup.number == 4:
        knobs["train.mixed_precision=bf16"] = replace(setup, number=2)
    if not setup.adapters:
        knobs["train_model.lora.enabled=true"] = replace(setup, adapters=_LORA_RANK)
    share = replace(
        setup,
        tokens=half if single and setup.sequences > 1 else setup.tokens,
        ranks=2 * setup.ranks,
    )
    knobs[f"train_model.num_devices={share.ranks}"] = share
    if setup.replicas > 1:
        knobs["train_model.replicas=1"] = replace(setup, replicas=1)
    if not (setup.small_states or setup.offloads):  # which exclude each other
        knobs["optimizer.name=adamw_8bit"] = replace(setup, small_states=True)
        knobs["train_model.cpu_offload=true"] = replace(setup, offloads=True)
    now = step_memory(shape, setup).peak
    return {name: now - step_memory(shape, other).peak for name, other in knobs.items()}


def _layer_bytes(shape: Shape, setup: StepSetup) -> int:
    """Bytes that a layer keeps of a token for the backward pass.

    The two norms compute in float32, and keep what they read and, where their weight is trained,
    what they made of it before. In ``number`` bytes there are queries, keys, values, attention's
    output, the two inputs of projections, and of the gated part its two halves, the activation and
    the product. Autocast copies an input for each of five projections.
    """
    inputs = 2 if setup.number == 4 else 5
    of_norms = 2 * 4 * shape.hidden * (1 if setup.adapters else 2)
    attention = 2 * shape.query_width + inputs * shape.hidden + 2 * shape.kv_width
    return of_norms + setup.number * (attention + 4 * shape.inner)

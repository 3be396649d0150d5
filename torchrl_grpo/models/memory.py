"""Memory of a run by role: a training step and the settings that would reduce it, an engine, and a
reference model.

The device plan, ``torchrl_grpo plan``, the dry run and the out-of-memory messages all use these
estimates. Nothing heavy is imported here; ``loading.shape_of`` reads the ``Shape`` of a PyTorch
model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number, by the config's dtype."""
MEMORY_SHARE = 0.9
"""Fraction of an accelerator's memory that a role may fill."""
NF4_NUMBER = 0.5 + 1 / 64 + 4 / 64 / 256
"""Bytes per number in NF4: 4 bits, and of each 64 numbers a scale of 8 bits, and of each 256 scales
one in float32."""
_ADAPTER_NUMBER = 4
"""Bytes per number of adapters: peft keeps them in float32, whatever the model's dtype."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder or of an image encoder, in counts of numbers.

    Attributes:
        parameters: number of all parameters; tied ones count once.
        active: number of parameters that a token uses, including its experts.
        layers: number of layers.
        hidden: hidden size.
        query_width: size of a token's queries in a layer.
        kv_width: size of a token's entry in the key cache of a layer, and again in the value cache.
        inner: width of a layer's gated part, over all experts of a token.
        head: number of parameters of the LM head.
        tied: whether the embedding is the head.
        adapted: number of parameters of adapters of rank 1.
        linear: number of parameters that can be quantized (``loading.inner_linears``, no biases).
        vision: shape of the image encoder, whose parameters include its projector's and are part of
            ``parameters``; None for a text-only model.
        patches: number of the encoder's patches in a token of an image.
        features: size of an image token's features.
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
    linear: int = 0
    vision: Shape | None = None
    patches: int = 1
    features: int = 0

    def with_vision(self, vision: Shape | None, patches: int = 4, levels: int = 0) -> Shape:
        """Return the shape of this decoder with an image encoder.

        Args:
            vision: shape of the encoder.
            patches: number of patches in a token of an image.
            levels: number of layers whose features are added to the decoder's first layers.
        """
        if vision is None:
            return self
        return replace(
            self,
            parameters=self.parameters + vision.parameters,
            vision=vision,
            patches=patches,
            features=self.hidden * (1 + levels),
        )


def vision_shape(
    parameters: float, layers: int, hidden: int, inner: int, *, is_gated: bool = False
) -> Shape:
    """Return the shape of an image encoder.

    Args:
        parameters: number of parameters, with the projector's.
        layers: number of layers.
        hidden: hidden size.
        inner: size between the two or three projections of a layer.
        is_gated: whether there are three.
    """
    half = inner if is_gated else inner // 2
    return Shape(parameters, parameters, layers, hidden, hidden, hidden, half, 0, False, 0)


def shape_of_config(config: Any) -> Shape:
    """Return the shape of a decoder with gated layers, with or without experts.

    Args:
        config: the decoder's Hugging Face text config, or an object with the entries of its
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
    gated = 0 if experts > 1 else 3
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
        adapted=layers * (linear + gated * (hidden + inner)),
        linear=layers * (attention + gated * hidden * inner),
    )


@dataclass(frozen=True)
class StepSetup:
    """Parameters of a training step that determine a rank's memory.

    Attributes:
        tokens: number of tokens in the largest pass.
        sequences: number of sequences in that pass.
        passes: number of passes in a step.
        number: bytes per activation.
        master: bytes per weight of the model and, if it is trained, per gradient and per moment.
        checkpoints: whether gradient checkpointing is on.
        adapters: rank of the adapters, if only they are trained; 0 trains all weights.
        quantized: whether the linear layers that they adapt are in NF4.
        small_states: whether the optimizer stores each moment in 8 bits.
        ranks: number of ranks that share a batch.
        replicas: number of copies of the model, each sharded over an equal part of the ranks.
        offloads: whether weights, gradients and moments are kept on the CPU.
        averages: number of averages of the trained weights, which count as moments.
        images: share of the tokens that are features of images.
        trains_vision: whether the image encoder is trained. Otherwise each rank holds it whole,
            without gradients and moments, and computes an image at a time.
        critic: whether the loss reads a critic's values.
    """

    tokens: int
    sequences: int
    passes: int
    number: int
    master: int = 4
    checkpoints: bool = False
    adapters: int = 0
    quantized: bool = False
    small_states: bool = False
    ranks: int = 1
    replicas: int = 1
    offloads: bool = False
    averages: int = 0
    images: float = 0.0
    trains_vision: bool = False
    critic: bool = False

    def of_batch(self, tokens: float, longest: float) -> StepSetup:
        """Return the setup of steps with this many tokens, in passes of the same size as this
        setup's. Sequences are not split.

        Args:
            tokens: number of tokens in an optimizer step, over all ranks.
            longest: number of tokens in the longest sequence.
        """
        own = max(tokens / self.ranks, longest)
        largest = min(own, max(self.tokens, longest))
        return replace(self, tokens=math.ceil(largest), passes=math.ceil(own / largest))


@dataclass(frozen=True)
class StepMemory:
    """Memory of a rank in a training step, in bytes.

    Attributes:
        parameters: the model's parameters.
        copies: copies of them in the 16 bits that the step computes in, or copies gathered from
            other ranks.
        gradients: gradients of the trained parameters.
        moments: the two moments of AdamW.
        activations: activations of the largest pass, with their gradients in its backward pass.
        peak: the maximum, which is less than the sum if a step is a single pass, because gradients
            appear as activations are freed.
    """

    parameters: int
    copies: int
    gradients: int
    moments: int
    activations: int
    peak: int

    @property
    def weights(self) -> int:
        """Parameters and their copies."""
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
        """Return the memory by purpose, as named in messages and tables."""
        return {
            "weights": self.weights,
            "gradients and optimizer state": self.states,
            "activations": self.activations,
        }


def step_memory(shape: Shape, setup: StepSetup) -> StepMemory:
    """Compute the memory of a step: weights exactly, activations for a decoder with gated layers.

    Args:
        shape: shape of the model, without adapters.
        setup: setup of the step.
    """
    number, master = setup.number, setup.master
    adapters = shape.adapted * setup.adapters * _ADAPTER_NUMBER
    shards = setup.ranks // setup.replicas
    frozen = frozen_parameters(shape, setup)
    packed = shape.linear * setup.quantized
    parameters = shape.parameters - frozen - packed
    whole = int(frozen * master + packed * NF4_NUMBER)
    weights = int(parameters * master + adapters) // shards + whole
    trained = int(adapters or parameters * master) // shards
    moments = (
        2 * trained // (_ADAPTER_NUMBER if adapters else master)
        if setup.small_states
        else 2 * trained
    )
    moments += setup.averages * trained
    if setup.offloads:
        weights = trained = moments = 0
    copies, outside = 0, shape.head * (1 if shape.tied else 2)
    sharded = setup.ranks > 1 or setup.offloads
    if sharded:  # gathered: weights outside of layers during the whole pass, and one layer
        copies = int((outside + (parameters - outside) / shape.layers) * number)
    elif number < master and not setup.checkpoints:  # for the backward pass
        copies = (weights - whole) * number // master
    if packed:  # one layer is dequantized at a time
        copies += shape.hidden * shape.inner * number

    layer = setup.tokens * _layer_bytes(shape, setup)
    kept = _kept_bytes(shape, setup, setup.tokens)
    # In float32, the states that the critic reads and their product with its weight.
    kept += 8 * setup.critic * setup.tokens * shape.hidden
    vision = 0
    if shape.vision is not None and setup.trains_vision:
        patches = math.ceil(setup.tokens * setup.images) * shape.patches
        vision = _kept_bytes(shape.vision, setup, patches)
    # When the backward pass begins, there are gradients of two tensors as wide as a layer's gates
    # and of its input and output, or logits. In 16 bits they are in float32 too, or next to copies
    # in float32.
    activations = kept + vision + setup.tokens * 4 * 2 * (shape.inner + shape.hidden)
    # It begins with all activations and the head's gradient. It ends with one layer's activations,
    # or the image encoder's, and all gradients, or with those and the embedding's (and the head's,
    # kept until then if they are tied). Gradients of earlier passes are there all the time.
    of_head, several = 0 if setup.adapters else shape.head * master, setup.passes > 1
    first = activations + of_head + several * trained
    dense = shape.tied and sharded  # otherwise it is added to rows of the head's (``models.head``)
    last = max(activations - kept + layer, (several + dense) * of_head) + trained
    peak = weights + copies + moments + max(first, last)
    return StepMemory(weights, copies, trained, moments, activations, peak)


def weight_bytes(shape: Shape, number: int, devices: int = 1, *, quantized: bool = False) -> int:
    """Return the bytes of a model's weights, of ``number`` bytes each, on each of its devices;
    ``quantized`` as in ``StepSetup``.
    """
    saved = shape.linear * quantized * (number - NF4_NUMBER)
    return int((shape.parameters * number - saved) / devices)


def shard_bytes(shape: Shape, number: int, ranks: int) -> int:
    """Return the bytes of a model that is not trained on each of the ranks that share it, which
    hold an image encoder whole.
    """
    whole = 0 if shape.vision is None else shape.vision.parameters
    return int(((shape.parameters - whole) / ranks + whole) * number)


def token_cache_bytes(shape: Shape, number: int) -> int:
    """Return the bytes of one token in an engine's KV cache."""
    return 2 * shape.layers * shape.kv_width * number


def group_cache_bytes(shape: Shape, number: int, prompt: float, size: int, longest: int) -> float:
    """Return the bytes of a group's KV cache, with one prompt and responses of maximum length."""
    return (prompt + size * longest) * token_cache_bytes(shape, number)


@dataclass(frozen=True)
class ModelMemory:
    """Memory of a model that is not trained, on one device, in bytes.

    Attributes:
        weights: weights of the model.
        cache: keys and values of the groups that an engine samples at once.
        features: features of images that vLLM keeps.
    """

    weights: int
    cache: int = 0
    features: int = 0

    @property
    def peak(self) -> int:
        """Maximum memory at a time."""
        return self.weights + self.cache + self.features

    def parts(self) -> dict[str, int]:
        """Return the memory by purpose, as named in messages and tables."""
        caches = {"KV cache": self.cache, "features of images": self.features}
        return {"weights": self.weights} | {name: size for name, size in caches.items() if size}


def feature_bytes(shape: Shape, number: int, tokens: float) -> int:
    """Return the bytes of the features of images with a number of tokens."""
    return int(tokens * shape.features * number)


def frozen_parameters(shape: Shape, setup: StepSetup) -> float:
    """Return the number of parameters of an image encoder that is not trained."""
    return 0 if shape.vision is None or setup.trains_vision else shape.vision.parameters


def _kept_bytes(shape: Shape, setup: StepSetup, tokens: int) -> int:
    """Return the bytes that the layers keep for the backward pass."""
    layer = tokens * _layer_bytes(shape, setup)
    if setup.checkpoints:
        return shape.layers * tokens * shape.hidden * setup.master + layer
    return shape.layers * layer


def _layer_bytes(shape: Shape, setup: StepSetup) -> int:
    """Return the bytes that a layer keeps per token for the backward pass.

    The two norms compute in float32, and keep their inputs and, if their weights are trained, the
    normalized values too. In ``number`` bytes there are queries, keys, values, the output of
    attention, the two inputs of projections and, in the gated part, its two halves, the activation
    and the product. Autocast copies an input for each of five projections.
    """
    inputs = 2 if setup.number == 4 else 5
    of_norms = 2 * 4 * shape.hidden * (1 if setup.adapters else 2)
    attention = 2 * shape.query_width + inputs * shape.hidden + 2 * shape.kv_width
    return of_norms + setup.number * (attention + 4 * shape.inner)

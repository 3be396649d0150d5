"""Time of a run's stages on an accelerator, and memory that each role holds: from published figures.

Decoding reads the weights and the KV cache of all rows for each token, so it takes bytes over bandwidth; training and
scoring take operations over the matrix rate. docs/performance.md says where each figure comes from, and which ones are
assumed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.generation.engines import ENGINES


@dataclass(frozen=True)
class Gpu:
    """An accelerator's datasheet; a second counts for one direction.

    Attributes:
        half, single: operations a second in bfloat16 or float16, dense, and in float32.
        bandwidth: bytes a second from its memory.
        memory: bytes.
        nvlink, network, pcie: bytes a second to an accelerator of the same machine, of another one, and to the host.
    """

    half: float
    single: float
    bandwidth: float
    memory: float
    nvlink: float
    network: float
    pcie: float

    def rate(self, dtype: str) -> float:
        """Operations a second in a type of the config's."""
        return self.single if dtype == "float32" else self.half


GPUS: Mapping[str, Gpu] = {
    "a100": Gpu(312e12, 19.5e12, 2.039e12, 80e9, 300e9, 25e9, 32e9),
    "h100": Gpu(989e12, 67e12, 3.35e12, 80e9, 450e9, 50e9, 64e9),
    "h200": Gpu(989e12, 67e12, 4.8e12, 141e9, 450e9, 50e9, 64e9),
}
"""SXM modules, with a network port each as in a DGX."""
PER_MACHINE = 8
COMPUTE_SHARE = 0.4
"""Of the matrix rate, in training and scoring: the middle of the 38 to 43% of Llama 3 405B (arXiv 2407.21783)."""
BANDWIDTH_SHARE = 0.6
"""Of the memory's bandwidth, in decoding: assumed."""
STORE_RATE = 5e9
"""Bytes a second into Ray's object store, and out of it: measured here (benchmarks/bench_weight_sync.py)."""
HOP_S = 0.005
"""Seconds from one actor to the next: assumed."""
MEMORY_SHARE = 0.9
"""Of an accelerator's memory that a role may fill."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """A dense transformer's size.

    Attributes:
        parameters: how many.
        layers: how many.
        hidden: width.
        kv_width: numbers that a token leaves in the key cache of a layer, and again in the value cache.
    """

    parameters: float
    layers: int
    hidden: int
    kv_width: int


SHAPES: Mapping[str, Shape] = {
    "qwen2.5-0.5b": Shape(494e6, 24, 896, 128),
    "qwen2.5-1.5b": Shape(1.54e9, 28, 1536, 256),
    "qwen2.5-3b": Shape(3.09e9, 36, 2048, 256),
    "qwen2.5-7b": Shape(7.62e9, 28, 3584, 512),
    "qwen2.5-14b": Shape(14.8e9, 48, 5120, 1024),
    "qwen2.5-32b": Shape(32.8e9, 64, 5120, 1024),
    "qwen2.5-72b": Shape(72.7e9, 80, 8192, 1024),
    "qwen3-0.6b": Shape(596e6, 28, 1024, 1024),
    "qwen3-1.7b": Shape(1.72e9, 28, 2048, 1024),
    "qwen3-4b": Shape(4.02e9, 36, 2560, 1024),
    "qwen3-8b": Shape(8.19e9, 36, 4096, 1024),
    "qwen3-14b": Shape(14.8e9, 40, 5120, 1024),
    "qwen3-32b": Shape(32.8e9, 64, 5120, 1024),
    "llama-2-7b": Shape(6.74e9, 32, 4096, 4096),
    "llama-2-13b": Shape(13.0e9, 40, 5120, 5120),
    "llama-3-8b": Shape(8.03e9, 32, 4096, 1024),
    "llama-3.1-8b": Shape(8.03e9, 32, 4096, 1024),
    "llama-3.1-70b": Shape(70.6e9, 80, 8192, 1024),
    "llama-3.2-1b": Shape(1.24e9, 16, 2048, 512),
    "llama-3.2-3b": Shape(3.21e9, 28, 3072, 1024),
    "mistral-7b": Shape(7.24e9, 32, 4096, 1024),
}
"""From the models' own config.json on the Hugging Face hub, by the start of their names."""


def model_shape(name: str, folder: Path, parameters: float | None = None) -> Shape:
    """The shape of a model.

    Args:
        name: ``model.name``.
        folder: where its config.json may be.
        parameters: how many, for a model that is not known; the rest is then that of the known model of nearest size.

    Raises:
        ConfigError: nothing is known of the model.
    """
    if parameters is not None:
        near = min(SHAPES.values(), key=lambda shape: abs(math.log(shape.parameters / parameters)))
        return Shape(parameters, near.layers, near.hidden, near.kv_width)
    if (folder / "config.json").is_file():
        return _read(json.loads((folder / "config.json").read_text(encoding="utf-8")), name)
    plain = name.rpartition("/")[2].lower().removeprefix("meta-").replace("-math", "").replace("-coder", "")
    found = [known for known in SHAPES if plain == known or plain.startswith(f"{known}-")]
    if not found:
        raise ConfigError(
            f"model.name={name} must be a folder with a config.json, or begin like {', '.join(SHAPES)}: use one of "
            "these, or say how many parameters it has (for example, --params=7e9)."
        )
    return SHAPES[found[0]]


def _read(config: Mapping[str, Any], name: str) -> Shape:
    """Shape of a dense decoder, from its config.json."""
    try:
        hidden, layers, heads = (config[f] for f in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        width = config.get("head_dim") or hidden // heads
        kv_width = width * config.get("num_key_value_heads", heads)
        embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
        attention = 2 * hidden * width * heads + 2 * hidden * kv_width
        biases = width * heads + 2 * kv_width if config["model_type"] == "qwen2" else 0
        layer = attention + biases + 3 * hidden * config["intermediate_size"] + 2 * hidden
    except KeyError as error:
        raise ConfigError(
            f"model.name={name} must be a dense decoder whose config.json has {error}: say how many parameters it has "
            "(for example, --params=7e9)."
        ) from error
    return Shape(embeddings + layers * layer + hidden, layers, hidden, kv_width)


@dataclass(frozen=True)
class Workload:
    """Work that a run computes, whichever device does it.

    Attributes:
        shape: of the model.
        group_size: responses to a prompt.
        prompt, response: mean tokens.
        longest: most tokens of a response.
        groups: in a batch.
        passes: over each batch.
        optim_steps: in each batch, all passes together.
        micro_batch_tokens: see the config.
        train_dtype: of the operations of training.
        master_dtype, engine_dtype, reference_dtype: of weights.
        backend: of the engine.
        checkpointing, offload, lora, recomputes: whether layers are computed again, the state rests on the host,
            adapters alone are trained, and proximal log-probs are computed by a pass of their own.
        scores: whether there are reference log-probs.
        broadcast: whether weights travel from accelerator to accelerator, not through Ray's object store.
        reward_s: seconds for the rewards of a task.
    """

    shape: Shape
    group_size: int
    prompt: float
    response: float
    longest: int
    groups: int
    passes: int
    optim_steps: int
    micro_batch_tokens: int
    train_dtype: str
    master_dtype: str
    engine_dtype: str
    reference_dtype: str
    backend: str
    checkpointing: bool
    offload: bool
    lora: bool
    recomputes: bool
    scores: bool
    broadcast: bool
    reward_s: float

    @property
    def group_tokens(self) -> float:
        """Tokens that training and scoring compute of a group: its prompt is there once."""
        return self.prompt + self.group_size * self.response

    def operations(self, passes: float) -> float:
        """For one token, where a forward pass counts 2 for each parameter; attention included."""
        shape = self.shape
        attention = shape.layers * shape.hidden * (self.prompt + self.response / 2)
        return passes * 2 * (shape.parameters + attention)

    def train_s(self, gpu: Gpu, ranks: int) -> float:
        """Seconds of training one batch on so many devices."""
        backward = 1 if self.lora else 2  # adapters alone: no gradient of the other weights
        passes = (1 + backward + self.checkpointing) * self.passes + self.recomputes
        passes += self.scores and self.lora  # with LoRA the learner gives the reference log-probs
        sequences = self.groups * self.group_size
        share = max(1 / ranks, 1 / sequences)  # a sequence is not divided
        tokens = self.groups * self.group_tokens * share
        compute = tokens * self.operations(passes) / (gpu.rate(self.train_dtype) * COMPUTE_SHARE)
        weights = self.shape.parameters * BYTES[self.train_dtype]
        micro_batches = max(self.optim_steps, math.ceil(tokens * self.passes / self.micro_batch_tokens))
        link = gpu.nvlink if ranks <= PER_MACHINE else gpu.network
        gathers = (2 + (not self.lora)) * micro_batches * weights * (1 - 1 / ranks) / link
        state = 7 * 4 * self._trained / ranks  # Adam reads four numbers of each parameter and writes three
        update = self.optim_steps * state / (gpu.pcie if self.offload else gpu.bandwidth)
        return max(compute, gathers) + update

    @property
    def _trained(self) -> float:
        """Parameters with gradient and optimizer state; adapters are about a hundredth of a model."""
        return self.shape.parameters * (0.01 if self.lora else 1)

    def score_s(self, gpu: Gpu, groups: int) -> float:
        """Seconds of scoring so many groups on one device; 0 without a reference model."""
        if not self.scores or self.lora:
            return 0.0
        return groups * self.group_tokens * self.operations(1) / (gpu.rate(self.reference_dtype) * COMPUTE_SHARE)

    def step_s(self, gpu: Gpu, groups: int, size: int) -> float:
        """Seconds of one token of all rows of so many groups, in an engine of so many devices."""
        rows = groups * self.group_size * self.response / self.longest_of_group  # some have ended
        read = self.weight_bytes + groups * self.prompt * self.kv_bytes + rows * self.response / 2 * self.kv_bytes
        compute = (rows + groups * self.prompt / self.longest_of_group) * self.operations(1)
        seconds = max(read / (gpu.bandwidth * BANDWIDTH_SHARE), compute / (gpu.rate(self.engine_dtype) * COMPUTE_SHARE))
        return seconds / size + ENGINES[self.backend].step_overhead_s

    @property
    def longest_of_group(self) -> float:
        """Expected tokens of the longest response of a group, if lengths are uniform from 0 to twice their mean."""
        return min(self.longest, 2 * self.response * self.group_size / (self.group_size + 1))

    @property
    def weight_bytes(self) -> float:
        """Of the weights that an engine holds."""
        return self.shape.parameters * BYTES[self.engine_dtype]

    @property
    def kv_bytes(self) -> float:
        """Of one token in the KV cache."""
        return 2 * self.shape.layers * self.shape.kv_width * BYTES[self.engine_dtype]

    def sync_s(self, gpu: Gpu) -> float:
        """Seconds of a publish, and again of an update."""
        travels = self.weight_bytes * (0.01 if self.lora else 1)
        return travels / (min(gpu.network, gpu.pcie) if self.broadcast else STORE_RATE)

    def train_memory(self, ranks: int) -> float:
        """Bytes on each of so many training devices: weights, gradients, Adam's moments, activations."""
        shape, half = self.shape, BYTES[self.train_dtype]
        state = (shape.parameters + 3 * self._trained) * BYTES[self.master_dtype] / ranks
        tokens = min(self.micro_batch_tokens, self.groups * self.group_tokens)
        # A layer keeps 34 bytes for each number of its input in 16 bits, without attention's own (arXiv 2205.05198).
        kept = half * shape.layers + 17 * half if self.checkpointing else 17 * half * shape.layers
        gathered = shape.parameters / shape.layers * half if ranks > 1 else 0.0
        return (0.0 if self.offload else state) + tokens * shape.hidden * kept + gathered

    def reference_memory(self) -> float:
        """Bytes of a reference model."""
        return self.shape.parameters * BYTES[self.reference_dtype]

    def group_memory(self) -> float:
        """Bytes of the KV cache of a group whose responses are all as long as they may be."""
        return (self.prompt + self.group_size * self.longest) * self.kv_bytes

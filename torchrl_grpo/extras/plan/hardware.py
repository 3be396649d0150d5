"""Times of a run's stages on an accelerator, and memory of each role, from published figures.

Decoding reads the weights and the KV cache of all rows for each token, so its time is bytes over
bandwidth; the time of training and scoring is operations over the matrix rate. docs/performance.md
has the source of each figure, and which ones are assumed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchrl_grpo.engines import ENGINES
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.memory import (
    MEMORY_SHARE,
    Shape,
    StepMemory,
    StepSetup,
    frozen_parameters,
    group_cache_bytes,
    shape_of_config,
    shard_bytes,
    step_memory,
    token_cache_bytes,
    vision_shape,
    weight_bytes,
)


@dataclass(frozen=True)
class Gpu:
    """An accelerator's datasheet; rates are per second and direction.

    Attributes:
        half, single: dense operations per second in bfloat16 or float16, and in float32.
        bandwidth: bytes per second from its memory.
        memory: size of its memory in bytes. nvlink, network, pcie: bytes per second to an
            accelerator of the same machine, of another machine, and to the host.
    """

    half: float
    single: float
    bandwidth: float
    memory: float
    nvlink: float
    network: float
    pcie: float

    def rate(self, number: int) -> float:
        """Return the operations per second with numbers of a size in bytes."""
        return self.single if number == 4 else self.half


GPUS: Mapping[str, Gpu] = {
    "a100": Gpu(312e12, 19.5e12, 2.039e12, 80e9, 300e9, 25e9, 32e9),
    "h100": Gpu(989e12, 67e12, 3.35e12, 80e9, 450e9, 50e9, 64e9),
    "h200": Gpu(989e12, 67e12, 4.8e12, 141e9, 450e9, 50e9, 64e9),
}
"""SXM modules, each with a network port, as in a DGX."""
PER_MACHINE = 8
COMPUTE_SHARE = 0.4
"""Achieved share of the matrix rate in training and scoring: the middle of the 38 to 43% of Llama 3
405B (arXiv 2407.21783)."""
BANDWIDTH_SHARE = 0.6
"""Achieved share of the memory bandwidth in decoding: assumed."""
STORE_RATE = 5e9
"""Bytes per second into and out of Ray's object store: measured (benchmarks/bench_weight_sync.py).
"""
HOP_S = 0.005
"""Seconds from one actor to the next: assumed."""
UNPINNED_RATE = 3e9
"""Bytes per second of gradients that are copied to unpinned host memory and added there: assumed.
"""


def _config(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    inner: int,
    vocabulary: int,
    family: str = "llama",
    **more: Any,
) -> dict[str, Any]:
    """Return the part of a config.json from which a model's shape is read."""
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }
    return {
        **sizes,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "model_type": family,
        **more,
    }


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_EXPERTS: dict[str, Any] = {
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": _config(24, 896, 14, 2, 4864, 151936, "qwen2", **_TIED),
    "qwen2.5-1.5b": _config(28, 1536, 12, 2, 8960, 151936, "qwen2", **_TIED),
    "qwen2.5-3b": _config(36, 2048, 16, 2, 11008, 151936, "qwen2", **_TIED),
    "qwen2.5-7b": _config(28, 3584, 28, 4, 18944, 152064, "qwen2"),
    "qwen2.5-14b": _config(48, 5120, 40, 8, 13824, 152064, "qwen2"),
    "qwen2.5-32b": _config(64, 5120, 40, 8, 27648, 152064, "qwen2"),
    "qwen2.5-72b": _config(80, 8192, 64, 8, 29568, 152064, "qwen2"),
    "qwen3-0.6b": _config(28, 1024, 16, 8, 3072, 151936, "qwen3", head_dim=128, **_TIED),
    "qwen3-1.7b": _config(28, 2048, 16, 8, 6144, 151936, "qwen3", head_dim=128, **_TIED),
    "qwen3-4b": _config(36, 2560, 32, 8, 9728, 151936, "qwen3", head_dim=128, **_TIED),
    "qwen3-8b": _config(36, 4096, 32, 8, 12288, 151936, "qwen3", head_dim=128),
    "qwen3-14b": _config(40, 5120, 40, 8, 17408, 151936, "qwen3", head_dim=128),
    "qwen3-32b": _config(64, 5120, 64, 8, 25600, 151936, "qwen3", head_dim=128),
    "qwen3-30b-a3b": _config(48, 2048, 32, 4, 6144, 151936, "qwen3_moe", **_EXPERTS),
    "llama-2-7b": _config(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": _config(40, 5120, 40, 40, 13824, 32000),
    "llama-3-8b": _config(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-8b": _config(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-70b": _config(80, 8192, 64, 8, 28672, 128256),
    "llama-3.2-1b": _config(16, 2048, 32, 8, 8192, 128256, **_TIED),
    "llama-3.2-3b": _config(28, 3072, 24, 8, 8192, 128256, **_TIED),
    "mistral-7b": _config(32, 4096, 32, 8, 14336, 32000),
}
_QWEN2_5_VL = (32, 1280, 3420)
_QWEN3_VL = (24, 1024, 4096)
_VISION: Mapping[str, tuple[str, int, tuple[int, int, int]]] = {
    "qwen2.5-vl-3b": ("qwen2.5-3b", 668_684_288, _QWEN2_5_VL),
    "qwen2.5-vl-7b": ("qwen2.5-7b", 676_550_144, _QWEN2_5_VL),
    "qwen3-vl-2b": ("qwen3-1.7b", 406_957_056, _QWEN3_VL),
    "qwen3-vl-4b": ("qwen3-4b", 415_347_712, _QWEN3_VL),
    "qwen3-vl-8b": ("qwen3-8b", 576_388_336, (27, 1152, 4304)),
}
"""Decoder of a vision-language model, number of parameters of its image encoder and projector, and
the encoder's layers, hidden size and inner size."""


def _with_vision(name: str) -> Shape:
    decoder, parameters, sizes = _VISION[name]
    is_old = decoder.startswith("qwen2.5")
    vision = vision_shape(parameters, *sizes, is_gated=is_old)
    return _DECODERS[decoder].with_vision(vision, levels=0 if is_old else 3)


_DECODERS = {name: shape_of_config(SimpleNamespace(**config)) for name, config in _CONFIGS.items()}
SHAPES: Mapping[str, Shape] = _DECODERS | {name: _with_vision(name) for name in _VISION}
"""Shapes from the models' own config.json on the Hugging Face hub, by the start of their names."""


def model_shape(name: str, folder: Path, parameters: float | None = None) -> Shape:
    """Return the shape of a model.

    Args:
        name: ``model.name``.
        folder: where its config.json may be.
        parameters: how many, for a model that is not known; the rest is then taken from the known
            model of nearest size.

    Raises:
        ConfigError: nothing is known of the model.
    """
    if parameters is not None:
        dense = (shape for shape in SHAPES.values() if shape.active == shape.parameters)
        near = min(dense, key=lambda shape: abs(math.log(shape.parameters / parameters)))
        return replace(near, parameters=parameters, active=parameters)
    if (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "vision_config" in config:
            from torchrl_grpo.models import loading  # slow to import

            return loading.config_shape(loading.load_config(str(folder)))
        try:
            return shape_of_config(SimpleNamespace(**config))
        except AttributeError as error:
            raise ConfigError(
                f"model.name={name} must be a decoder whose config.json has {error.name}: pass its "
                "number of parameters (for example, --params=7e9)."
            ) from error
    plain = (
        name.rpartition("/")[2]
        .lower()
        .removeprefix("meta-")
        .replace("-math", "")
        .replace("-coder", "")
    )
    matches = [known for known in SHAPES if plain == known or plain.startswith(f"{known}-")]
    if not matches:
        raise ConfigError(
            f"model.name={name} must be a folder with a config.json, or begin like "
            f"{', '.join(SHAPES)}: use one of these, or pass its number of parameters (for "
            "example, --params=7e9)."
        )
    return SHAPES[matches[0]]


@dataclass(frozen=True)
class Workload:
    """Work of a run, independent of the devices.

    Attributes:
        shape: shape of the model.
        group_size: responses to a prompt.
        prompt, response: mean tokens.
        longest: maximum tokens of a response.
        groups: groups in a batch.
        passes: passes over each batch.
        optim_steps: optimizer steps per batch, over all passes.
        step: setup of a training step on one device, in passes of maximum size. engine_number,
        reference_number: bytes of a weight.
        backend: backend of the engine.
        recomputes: whether a separate pass computes proximal log-probs, or a critic's values.
        scores: whether there are reference log-probs.
        shards_reference: whether the reference model is sharded over the learner's devices.
        broadcast: whether weights go from accelerator to accelerator, not through Ray's object
            store.
        reward_s: seconds for the rewards of a task.
        images: mean tokens of a prompt that are features of images.
        encoder_cache: bytes of the features of images that an engine keeps.
    """

    shape: Shape
    group_size: int
    prompt: float
    response: float
    longest: int
    groups: int
    passes: int
    optim_steps: int
    step: StepSetup
    engine_number: int
    reference_number: int
    backend: str
    recomputes: bool
    scores: bool
    shards_reference: bool
    broadcast: bool
    reward_s: float
    images: float = 0.0
    encoder_cache: int = 0

    @property
    def group_tokens(self) -> float:
        """Return the tokens of a group in training and scoring, which compute its prompt once."""
        return self.prompt + self.group_size * self.response

    def operations(self, passes: float) -> float:
        """Return the operations per token: 2 per parameter in a forward pass, plus attention."""
        shape = self.shape
        attention = shape.layers * shape.hidden * (self.prompt + self.response / 2)
        return passes * 2 * (shape.active + attention)

    @property
    def encoder_operations(self) -> float:
        """Return the operations of encoding the images of a prompt."""
        vision = self.shape.vision
        return 0.0 if vision is None else 2 * vision.active * self.images * self.shape.patches

    def train_s(self, gpu: Gpu, ranks: int) -> float:
        """Return the seconds of training one batch on a number of devices."""
        backward = 1 if self.lora else 2  # only adapters: no gradients of other weights
        passes = (1 + backward + self.step.checkpoints) * self.passes + self.recomputes
        passes += self.learner_scores
        sequences = self.groups * self.group_size
        share = max(1 / ranks, 1 / sequences)  # a sequence is not divided
        tokens = self.groups * self.group_tokens * share
        # Features of an encoder that is not trained are computed once.
        encodings = passes if self.step.trains_vision else 1
        operations = tokens * self.operations(passes)
        operations += self.groups * share * encodings * self.encoder_operations
        compute = operations / (gpu.rate(self.step.number) * COMPUTE_SHARE)
        sharded = self.shape.parameters - frozen_parameters(self.shape, self.step)
        weights = sharded * self.step.number
        micro_batches = max(self.optim_steps, math.ceil(tokens * self.passes / self.step.tokens))
        link = gpu.nvlink if ranks <= PER_MACHINE else gpu.network
        gathers = (2 + (not self.lora)) * micro_batches * weights * (1 - 1 / ranks) / link
        # Adam reads four numbers of each parameter and writes three.
        state = 7 * 4 * self.trained / ranks
        update = self.optim_steps * state / (gpu.pcie if self.step.offloads else gpu.bandwidth)
        on_device = self.train_memory(ranks).peak + 4 * self.trained <= MEMORY_SHARE * gpu.memory
        if self.step.offloads and not on_device:  # see ``PolicyTrainer``
            update += (micro_batches - self.optim_steps) * 4 * self.trained / ranks / UNPINNED_RATE
        return max(compute, gathers) + update

    @property
    def lora(self) -> bool:
        """Return whether only adapters are trained."""
        return self.step.adapters > 0

    @property
    def learner_scores(self) -> bool:
        """Return whether the learner computes the reference log-probs."""
        return self.scores and (self.lora or self.shards_reference)

    @property
    def trained(self) -> float:
        """Return the number of parameters with gradients and optimizer state."""
        if self.lora:
            return self.shape.adapted * self.step.adapters
        return self.shape.parameters - frozen_parameters(self.shape, self.step)

    def score_s(self, gpu: Gpu, groups: int) -> float:
        """Return the seconds of scoring groups on one device; 0 without a reference model on its
        own devices.
        """
        if not self.scores or self.learner_scores:
            return 0.0
        operations = self.group_tokens * self.operations(1) + self.encoder_operations
        return groups * operations / (gpu.rate(self.reference_number) * COMPUTE_SHARE)

    def step_s(self, gpu: Gpu, groups: int, size: int) -> float:
        """Return the seconds of one token of all rows of a number of groups, in an engine of
        ``size`` devices.
        """
        rows = (
            groups * self.group_size * self.response / self.longest_of_group
        )  # the rest have ended
        cached_tokens = groups * self.prompt + rows * self.response / 2
        num_bytes = self.weight_bytes + cached_tokens * self.kv_bytes
        operations = (rows + groups * self.prompt / self.longest_of_group) * self.operations(1)
        operations += groups / self.longest_of_group * self.encoder_operations
        compute_s = operations / (gpu.rate(self.engine_number) * COMPUTE_SHARE)
        seconds = max(num_bytes / (gpu.bandwidth * BANDWIDTH_SHARE), compute_s)
        return seconds / size + ENGINES[self.backend].step_overhead_s

    @property
    def longest_of_group(self) -> float:
        """Return the expected tokens of a group's longest response, if lengths are uniform from 0
        to twice their mean.
        """
        return min(self.longest, 2 * self.response * self.group_size / (self.group_size + 1))

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of an engine's weights."""
        return weight_bytes(self.shape, self.engine_number)

    @property
    def engine_bytes(self) -> int:
        """Return the bytes of an engine without its KV cache."""
        return self.weight_bytes + self.encoder_cache

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of one token in the KV cache."""
        return token_cache_bytes(self.shape, self.engine_number)

    def sync_s(self, gpu: Gpu) -> float:
        """Return the seconds of a publish, which an update takes too."""
        num_bytes = (self.trained if self.lora else self.shape.parameters) * self.engine_number
        return num_bytes / (min(gpu.network, gpu.pcie) if self.broadcast else STORE_RATE)

    def train_memory(self, ranks: int) -> StepMemory:
        """Return the memory of a training step on each of a number of devices."""
        tokens = self.groups * self.group_tokens * self.passes / self.optim_steps
        setup = replace(self.step, ranks=ranks).of_batch(tokens, self.prompt + self.response)
        setup = replace(setup, images=self.images / self.group_tokens)
        return step_memory(self.shape, setup)

    def host_memory(self, ranks: int) -> tuple[int, int]:
        """Return the bytes of host memory of a rank's offloaded weights, gradients and moments, and
        the maximum before torch 2.14, which rounds pinned weights and gradients up to powers of two.
        """
        memory = step_memory(self.shape, replace(self.step, ranks=ranks, offloads=False))
        pinned = memory.parameters + memory.gradients
        return pinned + memory.moments, 2 * pinned + memory.moments

    def reference_memory(self, ranks: int) -> int:
        """Return the bytes of a separate reference model on one device, if the learner has a number
        of devices; 0 without one.
        """
        in_learner = self.shards_reference and (self.step.offloads or self.step.averages)
        if not self.scores or self.lora or in_learner:
            return 0
        return shard_bytes(self.shape, self.reference_number, ranks if self.shards_reference else 1)

    def group_memory(self) -> float:
        """Return the bytes of the KV cache of a group whose responses all have maximum length."""
        return group_cache_bytes(
            self.shape, self.engine_number, self.prompt, self.group_size, self.longest
        )

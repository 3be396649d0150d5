"""Memory that the roles of a run take, as far as the config determines it.

Imports no torch, because the plan uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.engines import ENGINES
from torchrl_grpo.images.cache import MOST_BYTES
from torchrl_grpo.models.memory import BYTES, Shape, StepSetup, feature_bytes

_ENCODER_CACHE = 16_384
"""Default of vLLM's max_num_batched_tokens on large accelerators. Of images with so many tokens it
keeps the features."""


@dataclass(frozen=True)
class Images:
    """Images of a run.

    Attributes:
        tokens: tokens of a prompt that are features of images.
        pixels: bytes of a prompt's pixels, as the model reads them.
        problems: number of problems.
    """

    tokens: float = 0.0
    pixels: float = 0.0
    problems: int = 0


def encoder_cache_bytes(config: GRPOConfig, shape: Shape, image_tokens: float) -> int:
    """Return the bytes of the features that vLLM keeps on each device of an engine, if a prompt has
    this many tokens of images; 0 with another engine.
    """
    engine = config.inference_model
    # An engine that samples with a PyTorch model keeps them on the host (``image_memory``).
    if ENGINES[engine.backend].exact or not image_tokens:
        return 0
    batch = (engine.engine_kwargs or {}).get("max_num_batched_tokens") or _ENCODER_CACHE
    return feature_bytes(shape, BYTES[engine.dtype], max(batch, image_tokens))


def image_memory(
    config: GRPOConfig, shape: Shape, images: Images, ranks: int, samplers: int
) -> dict[str, int]:
    """Return the bytes on the hosts of the pixels that the environments keep, and of the features
    that trainer, reference model and the ``transformers`` engine keep.
    """
    dtypes = [config.train_model.dtype] * ranks
    if config.has_own_reference:
        dtypes += [config.ref_model.dtype] * (ranks if config.ref_model.sharded else 1)
    elif config.needs_reference:
        dtypes *= 2
    if ENGINES[config.inference_model.backend].exact:
        dtypes += [config.inference_model.dtype] * samplers
    tokens = images.problems * images.tokens
    features = [min(MOST_BYTES, feature_bytes(shape, BYTES[dtype], tokens)) for dtype in dtypes]
    pixels = min(MOST_BYTES, int(images.problems * images.pixels))
    return {"pixels": pixels, "features": sum(features)}


def step_setup(config: GRPOConfig) -> StepSetup:
    """Return the setup of a config's training step on one device, in passes of maximum size."""
    train, model = config.train, config.train_model
    master = BYTES[model.dtype]
    return StepSetup(
        tokens=config.pass_tokens,
        sequences=config.optim_batch_size,
        passes=1,
        number=master if train.mixed_precision == "full" else 2,
        master=master,
        checkpoints=model.gradient_checkpointing,
        adapters=model.lora.options.get("r", 0),
        quantized=model.quantization is not None,
        small_states=config.optimizer.name == "adamw_8bit",
        replicas=model.replicas,
        offloads=model.cpu_offload,
        averages=len(config.averages),
        trains_vision=model.train_vision,
        critic=config.policy.value_coef > 0,
    )

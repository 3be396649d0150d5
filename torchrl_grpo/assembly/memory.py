"""``run_memory``: the memory of each role of a config on one of its devices.

Imports no torch, because the plan uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.generation.engines import ENGINES
from torchrl_grpo.images.cache import MOST_BYTES
from torchrl_grpo.models.memory import (
    BYTES,
    ModelMemory,
    Shape,
    StepMemory,
    StepSetup,
    feature_bytes,
    group_cache_bytes,
    shard_bytes,
    step_memory,
    weight_bytes,
)

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


@dataclass(frozen=True)
class RunMemory:
    """Memory on one device of each role, in bytes.

    Attributes:
        train: memory of a rank of the learner.
        engine: memory of one of an engine's devices.
        reference: memory of a separate reference model, which may be on the learner's devices; None
            without one.
        teacher: memory of the teacher; None without one.
        images: memory of the hosts for images, by purpose; empty without images.
    """

    train: StepMemory
    engine: ModelMemory
    reference: ModelMemory | None
    teacher: ModelMemory | None = None
    images: Mapping[str, int] = field(default_factory=dict)

    def roles(self) -> dict[str, StepMemory | ModelMemory]:
        """Return the memory by role, for the roles that exist."""
        roles: dict[str, StepMemory | ModelMemory] = {"train": self.train, "inference": self.engine}
        others = {"reference": self.reference, "teacher": self.teacher}
        return roles | {role: memory for role, memory in others.items() if memory is not None}


def run_memory(
    config: GRPOConfig,
    shape: Shape,
    *,
    prompt: float,
    response: float,
    ranks: int = 1,
    samplers: int = 1,
    on_cpu: bool = False,
    teacher: Shape | None = None,
    images: Images | None = None,
) -> RunMemory:
    """Return the memory of each role.

    Args:
        config: validated.
        shape: shape of the model.
        prompt: tokens of a prompt, with those of its images.
        response: tokens of a response in the training step; the engine has room for the longest
            response.
        ranks: devices of the learner.
        samplers: engines, each on ``inference_model.tensor_parallel_size`` devices.
        on_cpu: whether the learner is on a CPU, so that it cannot offload.
        teacher: shape of the teacher; None without one.
        images: images of the run; None without images.
    """
    env, engine = config.env, config.inference_model
    number = BYTES[engine.dtype]
    groups = max(1, env.num_envs // env.repeats // samplers)
    cache = groups * group_cache_bytes(
        shape, number, prompt, env.repeats, config.max_response_tokens
    )
    size = engine.tensor_parallel_size
    sequences = config.optim_batch_size
    prompts = -(-sequences // env.repeats)
    tokens = prompts * prompt + sequences * response
    setup = replace(step_setup(config), ranks=ranks).of_batch(tokens, prompt + response)
    of_images, features = {}, 0
    if images is not None:
        setup = replace(setup, images=prompts * images.tokens / tokens)
        of_images = image_memory(config, shape, images, ranks, samplers)
        features = encoder_cache_bytes(config, shape, images.tokens)
    if on_cpu:
        setup = replace(setup, offloads=False)
    shards = ranks // config.train_model.replicas
    reference = shard_bytes(
        shape, BYTES[config.ref_model.dtype], shards if config.ref_model.sharded else 1
    )
    if config.ref_model.sharded and setup.offloads:
        reference = 0
    return RunMemory(
        train=step_memory(shape, setup),
        engine=ModelMemory(weight_bytes(shape, number, size), int(cache / size), features),
        reference=ModelMemory(reference) if config.has_own_reference else None,
        teacher=None
        if teacher is None
        else ModelMemory(weight_bytes(teacher, BYTES[config.of_teacher(0).teacher.dtype])),
        images=of_images,
    )


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
    that trainer, reference model and the ``transformers`` engine keep; see ``run_memory``.
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
        tokens=1 if config.inference_model.exact else train.micro_batch_tokens,
        sequences=config.optim_batch_size,
        passes=1,
        number=master if train.mixed_precision == "full" else 2,
        master=master,
        checkpoints=model.gradient_checkpointing,
        adapters=model.lora.r if model.lora.enabled else 0,
        small_states=config.optimizer.name == "adamw_8bit",
        replicas=model.replicas,
        offloads=model.cpu_offload,
        averages=len(config.averages),
        trains_vision=model.train_vision,
    )

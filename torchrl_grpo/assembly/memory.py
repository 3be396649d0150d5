"""``run_memory``: the memory of each role of a config on one of its devices.

Imports no torch, because the plan uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.models.memory import (
    BYTES,
    ModelMemory,
    Shape,
    StepMemory,
    StepSetup,
    group_cache_bytes,
    step_memory,
    weight_bytes,
)


@dataclass(frozen=True)
class RunMemory:
    """Memory on one device of each role, in bytes.

    Attributes:
        train: memory of a rank of the learner.
        engine: memory of one of an engine's devices.
        reference: memory of a separate reference model, which may be on the learner's devices; None
            without one.
        teacher: memory of the teacher; None without one.
    """

    train: StepMemory
    engine: ModelMemory
    reference: ModelMemory | None
    teacher: ModelMemory | None = None

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
) -> RunMemory:
    """Return the memory of each role.

    Args:
        config: validated.
        shape: shape of the model.
        prompt: tokens of a prompt.
        response: tokens of a response in the training step; the engine has room for the longest
            response.
        ranks: devices of the learner.
        samplers: engines, each on ``inference_model.tensor_parallel_size`` devices.
        on_cpu: whether the learner is on a CPU, so that it cannot offload.
        teacher: shape of the teacher; None without one.
    """
    env, engine = config.env, config.inference_model
    number = BYTES[engine.dtype]
    groups = max(1, env.num_envs // env.repeats // samplers)
    cache = groups * group_cache_bytes(
        shape, number, prompt, env.repeats, config.max_response_tokens
    )
    size = engine.tensor_parallel_size
    sequences = config.optim_batch_size
    tokens = -(-sequences // env.repeats) * prompt + sequences * response
    setup = replace(step_setup(config), ranks=ranks).of_batch(tokens, prompt + response)
    if on_cpu:
        setup = replace(setup, offloads=False)
    shards = ranks // config.train_model.replicas
    reference = weight_bytes(
        shape, BYTES[config.ref_model.dtype], shards if config.ref_model.sharded else 1
    )
    if config.ref_model.sharded and setup.offloads:
        reference = 0
    return RunMemory(
        train=step_memory(shape, setup),
        engine=ModelMemory(weight_bytes(shape, number, size), int(cache / size)),
        reference=ModelMemory(reference) if config.has_own_reference else None,
        teacher=None
        if teacher is None
        else ModelMemory(weight_bytes(teacher, BYTES[config.of_teacher(0).teacher.dtype])),
    )


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
    )

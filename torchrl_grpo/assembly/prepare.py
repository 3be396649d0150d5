"""``prepare``: check everything about a run that needs no weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tensordict.nn import TensorDictModule
from torchrl import torchrl_logger
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from torchrl_grpo import keys
from torchrl_grpo.assembly.algorithm import batch_transforms, make_loss
from torchrl_grpo.assembly.components import make_files_absolute
from torchrl_grpo.assembly.context import Context
from torchrl_grpo.assembly.errors import as_config_errors, naming_teacher
from torchrl_grpo.assembly.shares import requests
from torchrl_grpo.assembly.tasks import dataset_names
from torchrl_grpo.checks import check_heads, check_optimizer, exact_context
from torchrl_grpo.collectors.demonstrations import Demonstrations
from torchrl_grpo.collectors.teacher_prompts import TeacherPrompts
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.generation.base import engine_class
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.objects import check_objects
from torchrl_grpo.images.encoder import ImageEncoder
from torchrl_grpo.learner.resume import Resume, check_length, refusing
from torchrl_grpo.models import loading
from torchrl_grpo.models.memory import Shape
from torchrl_grpo.reporting.trackers import check_logging
from torchrl_grpo.runtime.placement import (
    DevicePlan,
    available_accelerators,
    num_unused,
    plan_devices,
)
from torchrl_grpo.tasks.base import Task


def prepare(
    config: GRPOConfig,
    accelerators: Sequence[torch.device] | None = None,
    resume: Resume | None = None,
    task: Task | None = None,
    *,
    folder: Path | None = None,
    max_staleness: int = 0,
    distributed: bool = False,
) -> Context:
    """Check everything about a run that needs no weights, and return what is known then.

    Args:
        config: validated.
        accelerators: accelerators of the cluster at ``ray.address``; None for this machine's.
        resume: the checkpoint to resume.
        task: the config's task; by default it is made here.
        folder: the run's folder.
        max_staleness: bound on the staleness.
        distributed: whether each role has its own process even if the plan needs only one.

    Raises:
        ConfigError: a rule is broken; the message names field, rule, value and fix.
    """
    with as_config_errors():
        plan = _make_plan(
            config, available_accelerators() if accelerators is None else accelerators
        )
        make_files_absolute(config)
        _check_algorithm(config)
        check_loggers(config)
        # Roles on shared devices take turns in one process; in several processes on several GPUs
        # if nothing is sampled while the learner trains; and never in several processes on one GPU.
        in_turns = max_staleness == 0 if plan.distributed else not distributed
        context = Context(
            config,
            plan,
            resume,
            folder,
            max_staleness,
            distributed=distributed or plan.distributed,
            turns=in_turns and plan.colocated,
        )
        if task is not None:
            context.task = task
        if context.distributed:
            check_objects()
        context.make("task", "model")
        model = context.model
        if exact_context(model.config) is not None:
            torchrl_logger.info(
                f"The model's context is {model.context} tokens: beyond that, log-probs would "
                "depend on the other sequences of a pass."
            )
        if not config.learner_teaches:
            context.teacher_shape = _check_teachers(config, model.tokenizer)
        check_optimizer(config.optimizer.name)
        _check_sharding(config, len(plan.train), model.config.get_text_config())
        if not config.only_evaluates:
            _check_quantization(config, len(plan.train), model.config)
        context.make("params", "prompt_tokens", "has_images")
        engine_class(config.inference_model.backend).check(context.engine_request)
        longest = context.max_sequence_tokens
        if not config.only_evaluates:
            sequence_tokens = context.prompt_tokens[1] + context.params.max_new_tokens
            _check_teachers_context(
                config, sequence_tokens if config.teacher.prompt is None else longest
            )
        if context.image_encoder is not None:
            _check_teachers_images(config, context.image_encoder)
        context.make("reward_pool", "train_env")
        train_env = context.train_env
        if config.needs_demonstrations:
            Demonstrations.check(train_env, model.stop_token_ids)
        if config.teacher.prompt is not None:
            context.teacher_prompts = TeacherPrompts(train_env, config.teacher.prompt, longest)
        context.config = _with_length(config, train_env.num_problems)
        if resume is not None:
            check_length(resume, context.config)
            with refusing(resume.path):
                train_env.load_state_dict(resume.source["drawing"])
        # The constructors of the transforms check their settings.
        context.transformed(train_env.with_rows(config.env.num_envs)).close()
        context.make("tests", "shape", "geometry")
        return context


def _check_algorithm(config: GRPOConfig) -> None:
    """Make the loss and the batch's transforms once, because their constructors check their
    settings.
    """
    network = TensorDictModule(torch.nn.Identity(), [keys.FULL], [("cur_log_probs", "full")])
    make_loss(config, network)
    batch_transforms(config)


def check_loggers(config: GRPOConfig) -> None:
    """Check that the packages for ``logging`` are installed and usable.

    Raises:
        ValueError: a package is missing or cannot be used.
    """
    logging = config.logging
    check_logging(logging.services, page=logging.page)


def _make_plan(config: GRPOConfig, accelerators: Sequence[torch.device]) -> DevicePlan:
    if "VLLM_USE_V1" in os.environ:
        torchrl_logger.info("VLLM_USE_V1 has no effect: vLLM no longer has a V0 engine.")
    engine_class(config.inference_model.backend).require(on_cpu=not accelerators)
    plan = plan_devices(requests(config), accelerators, cluster=config.ray.address)
    plan = plan.with_teachers(config.num_teachers)
    if unused := num_unused(plan, accelerators):
        torchrl_logger.warning(
            f"{unused} of the {len(accelerators)} accelerators stay unused: "
            "inference_model.num_devices=all, for example, gives a role all devices that the "
            "others leave."
        )
    return plan


def _check_teachers(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> Shape | None:
    """Return the shape of the largest teacher, after checking all of them; None without teachers.

    Raises:
        ValueError: see ``check_teacher``, or a teacher names an unknown data set.
    """
    names = dataset_names(config.env.datasets or (), "env.datasets")
    for index, entry in enumerate(config.teachers or ()):
        if unknown := sorted(set(entry.datasets) - set(names)):
            raise ValueError(
                f"teachers[{index}].datasets={entry.datasets} must be names of env.datasets, which "
                f"are {names}, but {unknown[0]} is not: use some of them."
            )
    shapes = [
        check_teacher(config.of_teacher(index), tokenizer) for index in range(config.num_teachers)
    ]
    return max(shapes, key=lambda shape: shape.parameters, default=None)


def check_teacher(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> Shape:
    """Return the teacher's shape, after checking that its vocabulary is the policy's.

    Raises:
        ValueError: the teacher cannot be read, or a token differs.
    """
    name, remote_code = config.teacher_source or "", config.model.trust_remote_code
    with naming_teacher():
        teacher_config = loading.load_config(name, trust_remote_code=remote_code)
        teacher_tokenizer = loading.load_tokenizer(name, trust_remote_code=remote_code)
    policy_tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    teacher_tokens = {token_id: token for token, token_id in teacher_tokenizer.get_vocab().items()}
    token_ids = sorted({*policy_tokens, *teacher_tokens})
    different = [
        token_id
        for token_id in token_ids
        if policy_tokens.get(token_id) != teacher_tokens.get(token_id)
    ]
    if different:
        first = different[0]
        raise ValueError(
            f"teacher.model={name} must have the tokens of model.name={config.model.name}, but "
            f"{len(different)} differ; the first, {first}, is {teacher_tokens.get(first)!r} in the "
            f"teacher and {policy_tokens.get(first)!r} in the model: use another teacher."
        )
    return loading.config_shape(
        teacher_config, config.model.attn_implementation, trust_remote_code=remote_code
    )


def _check_teachers_images(config: GRPOConfig, encoder: ImageEncoder) -> None:
    """Check that the teachers read images as the policy does.

    Raises:
        ValueError: a teacher reads no images, or prepares them differently.
    """
    tokenizer, remote_code = encoder.processor.tokenizer, config.model.trust_remote_code
    for name in {config.of_teacher(i).teacher_source or "" for i in range(config.num_teachers)}:
        with naming_teacher():
            teacher_config = loading.load_config(name, trust_remote_code=remote_code)
            teacher_encoder = loading.load_image_encoder(name, teacher_config, tokenizer)
        if not encoder.equals(teacher_encoder):
            raise ValueError(
                f"teacher.model={name} must prepare images as model.name={config.model.name} does, "
                "but its processor writes other tokens or pixels: use a teacher with the same one."
            )


def _check_teachers_context(config: GRPOConfig, longest: int) -> None:
    """Check that the teachers and their servers can score sequences of ``longest`` tokens.

    Raises:
        ValueError: a context is too small, or a server does not answer or cannot be the teacher.
    """
    for teacher in map(config.of_teacher, range(config.num_teachers)):
        name = teacher.teacher_source or ""
        teacher_config = loading.load_config(name, trust_remote_code=config.model.trust_remote_code)
        limit = exact_context(teacher_config) or longest
        if limit < longest:
            raise ValueError(
                f"teacher.model={name} must score sequences of {longest} tokens, but its log-probs "
                f"depend on the other sequences of a pass beyond {limit}: use "
                f"inference_model.max_model_len={limit}, or another teacher."
            )
        for address in teacher.teacher.address:
            vocabulary = teacher_config.get_text_config().vocab_size
            load_extra("check_served_teacher")(
                address, vocabulary=vocabulary, longest=longest, top_k=config.policy.teacher_top_k
            )


def _check_sharding(config: GRPOConfig, devices: int, model_config: PretrainedConfig) -> None:
    """Check the rules of ``shard_model`` before anything loads."""
    train = config.train_model
    size = train.tensor_parallel_size
    if devices % size:
        raise ConfigError(
            f"train_model.tensor_parallel_size={size} must divide the number of training devices, "
            f"{devices}: use train_model.num_devices={-(-devices // size) * size}, or leave it out."
        )
    check_heads("train_model.tensor_parallel_size", size, model_config)
    copies = train.replicas
    if copies > 1 and (devices % copies or size > 1):
        raise ConfigError(
            f"train_model.replicas={copies} must divide the number of training devices, "
            f"{devices}, with train_model.tensor_parallel_size=1: use "
            f"train_model.num_devices={-(-devices // copies) * copies}, for example, or leave it "
            "out."
        )
    if size > 1 and train.lora.enabled:
        raise ConfigError(
            f"train_model.tensor_parallel_size={size} must be 1 with "
            "train_model.lora.enabled=true: leave it out to shard the model over all devices."
        )
    if train.cpu_offload and config.optimizer.name != "adamw":
        raise ConfigError(
            f"optimizer.name={config.optimizer.name} must be adamw with "
            "train_model.cpu_offload=true, because it does not support steps on the CPU: leave one "
            "of them out."
        )


def _check_quantization(config: GRPOConfig, devices: int, model_config: PretrainedConfig) -> None:
    if getattr(model_config, "quantization_config", None) is not None:
        raise ConfigError(
            f"model.name={config.model.name} must be a model that is not quantized, because its "
            "weights are trained or merged with adapters: use the original model, and for 4 bits "
            "add train_model.quantization=nf4."
        )
    if config.train_model.quantization is None:
        return
    load_extra("check_bitsandbytes")()
    if devices > 1:
        raise ConfigError(
            f"train_model.num_devices={devices} must be 1 with train_model.quantization=nf4, whose "
            "weights cannot be sharded: use train_model.num_devices=1, or leave "
            "train_model.quantization out."
        )


def _with_length(config: GRPOConfig, problems: int) -> GRPOConfig:
    """Return the config with ``train.total_epochs`` converted to trajectories."""
    epochs = config.train.total_epochs
    if epochs is None:
        return config
    total = epochs * problems * config.env.repeats
    return replace(config, train=replace(config.train, total_dialog_turns=total))

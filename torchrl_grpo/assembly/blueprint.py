"""``Blueprint``: a config with everything that can be known and checked before weights load."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl import torchrl_logger
from torchrl.envs import Transform, TransformedEnv
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from torchrl_grpo import keys
from torchrl_grpo.assembly.algorithm import batch_transforms, make_loss
from torchrl_grpo.assembly.components import make_component, make_files_absolute
from torchrl_grpo.assembly.memory import Images, RunMemory, run_memory
from torchrl_grpo.assembly.shares import requests
from torchrl_grpo.assembly.tasks import check_tests, dataset_names, read_task
from torchrl_grpo.checks import GENERATED, check_heads, check_multiple, check_optimizer
from torchrl_grpo.collectors.demonstrations import Demonstrations
from torchrl_grpo.collectors.teacher_prompts import TeacherPrompts
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.generation.base import EngineRequest, SamplingParams, engine_class
from torchrl_grpo.generation.engines import ENGINES, engines_with
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.host.accelerators import accelerators_in_use
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.memory import in_words
from torchrl_grpo.host.text import size
from torchrl_grpo.images import Prompt, images_in, images_of
from torchrl_grpo.images.encoder import ImageEncoder
from torchrl_grpo.images.families import family_of
from torchrl_grpo.learner.resume import Resume, check_length, refusing
from torchrl_grpo.models import loading
from torchrl_grpo.models.memory import Shape
from torchrl_grpo.reporting.trackers import check_logging
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.runtime.placement import (
    DevicePlan,
    available_accelerators,
    num_unused,
    plan_devices,
)
from torchrl_grpo.tasks.base import Split, Task
from torchrl_grpo.weights import Transfer

_BETWEEN_TURNS = 1024
"""Allowance for the tokens that each reply to the policy adds to a dialog."""
_MEMORY_SAVERS = (
    "train_model.cpu_offload=true, train_model.lora.enabled=true, or bfloat16 as "
    "inference_model.dtype and ref_model.dtype"
)
"""Settings that need less device memory."""
_NUM_PROMPTS = 100
"""Number of prompts from which the longest one is estimated."""


@dataclass
class Blueprint:
    """Everything known about a run before weights load; all checks of user input have passed.

    ``resume`` is the checkpoint to resume from. Actors get the driver's blueprint, so that all
    processes draw the same problems and only the driver needs the data. ``folder`` is the run's
    folder, for logs of its processes. ``sleeps``: whether engines share devices with other roles,
    and release them while those work.
    """

    config: GRPOConfig
    plan: DevicePlan
    task: Task
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    params: SamplingParams
    max_prompt_tokens: int
    max_dialog_tokens: int
    image_encoder: ImageEncoder | None
    reward_pool: RewardPool | None
    train_env: LLMEnv
    greedy_env: LLMEnv | None
    sampled_env: LLMEnv | None
    shape: Shape
    resume: Resume | None = None
    folder: Path | None = None
    sleeps: bool = False
    teacher_shape: Shape | None = None
    teacher_prompts: TeacherPrompts | None = None

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum number of tokens of a prompt and everything after it."""
        return self.config.inference_model.max_model_len or _context(self.model_config)

    @property
    def memory(self) -> RunMemory:
        """The memory of each role on one of its devices, with responses of maximum length."""
        prompts = self.train_env.prompts.first(_NUM_PROMPTS)
        return run_memory(
            self.config,
            self.shape,
            prompt=max(map(len, prompts)),
            response=self.config.max_response_tokens,
            ranks=len(self.plan.train),
            samplers=len(self.plan.inference),
            on_cpu=self.plan.train[0].type == "cpu",
            teacher=self.teacher_shape,
            images=None if self.image_encoder is None else self._images(prompts),
        )

    def _images(self, prompts: Sequence[Tensor | Prompt]) -> Images:
        """Return the images of a run, according to some of its prompts."""
        each = [[span.image for span in images_of(prompt)] for prompt in prompts]
        return Images(
            tokens=max(sum(image.num_features for image in images) for images in each),
            pixels=sum(image.nbytes for images in each for image in images) / len(each),
            problems=self.train_env.num_problems,
        )


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Turn a part's ``ValueError`` into a ``ConfigError``, printed as one line; the traceback goes
    to the debug log.
    """
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        torchrl_logger.debug("refused while building", exc_info=True)
        raise ConfigError(str(error)) from error


def prepare(
    config: GRPOConfig,
    accelerators: Sequence[torch.device] | None = None,
    resume: Resume | None = None,
    task: Task | None = None,
) -> Blueprint:
    """Check everything that needs no weights, and make everything that a run needs besides them.

    Args:
        config: validated.
        accelerators: accelerators of the cluster at ``ray.address``; None for this machine's.
        resume: the checkpoint to resume.
        task: task of the config; None makes it.

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
        task = task or read_task(config)
        model_config, tokenizer, stop_token_ids = describe_model(config)
        teacher_shape = None
        if not config.learner_teaches:
            teacher_shape = _check_teachers(config, tokenizer)
        check_optimizer(config.optimizer.name)
        _check_sharding(config, len(plan.train), model_config.get_text_config())
        params = _make_params(config, tokenizer, stop_token_ids)
        max_prompt_tokens, max_dialog_tokens = _max_prompt_tokens(config, model_config)
        request = engine_request(config, plan, model_config, max_dialog_tokens)
        request = replace(request, has_images=_may_have_images(config, task, model_config, plan))
        engine_class(config.inference_model.backend).check(request)
        longest = config.inference_model.max_model_len or _context(model_config)
        if not config.only_evaluates:
            own = max_dialog_tokens + params.max_new_tokens
            _check_served_teacher(config, own if config.teacher.prompt is None else longest)
        image_encoder = None
        if request.has_images:
            try:
                image_encoder = loading.load_image_encoder(
                    config.model.source, model_config, tokenizer
                )
                image_encoder.max_pixels = config.env.max_image_pixels
            except ValueError as error:
                if _has_images(config, task):
                    raise
                torchrl_logger.warning("The run does without images: %s", error)
        if image_encoder is not None:
            _check_teachers_images(config, image_encoder)
        reward_pool = _make_reward_pool(config.env, task)
        make_env = partial(
            LLMEnv,
            task,
            tokenizer,
            max_prompt_tokens=max_prompt_tokens,
            max_dialog_tokens=max_dialog_tokens,
            max_turns=config.env.max_turns,
            reward_pool=reward_pool,
            template_arguments=config.env.chat_template_kwargs,
            image_encoder=image_encoder,
        )
        train_env = _make_train_env(config.env, partial(make_env, seed=config.seed))
        if config.needs_demonstrations:
            Demonstrations.check(train_env, stop_token_ids)
        teacher_prompts = None
        if config.teacher.prompt is not None:
            teacher_prompts = TeacherPrompts(train_env, config.teacher.prompt, longest)
        config = _with_length(config, train_env.num_problems)
        if resume is not None:
            check_length(resume, config)
            with refusing(resume.path):
                train_env.load_state_dict(resume.source["drawing"])
        # The constructors of the transforms check their settings.
        transformed(config, train_env.with_rows(config.env.num_envs)).close()
        greedy_env, sampled_env = _make_test_envs(config, task, partial(make_env, split="test"))
        model = config.model
        shape = loading.config_shape(
            model_config,
            model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
            **config.train_model.lora.options,
        )
        return Blueprint(
            config=config,
            plan=plan,
            task=task,
            tokenizer=tokenizer,
            model_config=model_config,
            params=params,
            max_prompt_tokens=max_prompt_tokens,
            max_dialog_tokens=max_dialog_tokens,
            image_encoder=image_encoder,
            reward_pool=reward_pool,
            train_env=train_env,
            greedy_env=greedy_env,
            sampled_env=sampled_env,
            shape=shape,
            resume=resume,
            teacher_shape=teacher_shape,
            teacher_prompts=teacher_prompts,
        )


def _has_images(config: GRPOConfig, task: Task) -> bool:
    """Return whether prompts have images: a column says so, or a problem of a task has some."""
    own = config.env.own_task is not None
    data = [config.env, *(config.env.datasets or ()), *(config.evaluation.datasets or ())]
    if any(entry.columns.images is not None for entry in data):
        return True
    if not own and not any(entry.dataset in GENERATED for entry in data):
        return False  # rows without a column of images
    splits: tuple[Split, ...] = ("train", "test") if config.evaluation.num_prompts else ("train",)
    problems = chain.from_iterable(map(task.problems, splits))
    return any(images_in(task.messages(problem)) for problem in problems)


def _may_have_images(
    config: GRPOConfig, task: Task, model_config: PretrainedConfig, plan: DevicePlan
) -> bool:
    """Return whether to prepare for images in prompts: some have images, or replies of tasks,
    environments, tools or agents may show them.

    Raises:
        ConfigError: there are images, but the config has something that does not work with them.
    """
    refusal = _images_refusal(config, len(plan.train))
    if _has_images(config, task):
        if refusal:
            raise ConfigError(refusal)
        return True
    if refusal or family_of(model_config) is None:
        return False
    # Most show text. An image that cannot be read is an error for the policy, or for the agent.
    own = config.env.own_task is not None
    replies = own and task.multi_turn and config.env.player is None
    if replies or config.env.environment is not None:
        return True
    shows = bool(config.env.tools) or config.env.player is not None
    return shows and not config.needs_teacher


def _images_refusal(config: GRPOConfig, ranks: int) -> str:
    """Return why a config does not work with images in prompts; empty if it does."""
    backend, train = config.inference_model.backend, config.train_model
    tensor = train.tensor_parallel_size
    others = " or ".join(engines_with("images"))
    unsupported = (
        (not ENGINES[backend].images, f"inference_model.backend={backend}", f"{others}"),
        (config.teacher_addresses, "teacher.address", "[]"),
        (config.env.transforms, f"env.transforms={config.env.transforms}", "[]"),
        (ranks > 1 and train.train_vision, "train_model.train_vision=true", "false"),
        (tensor > 1, f"train_model.tensor_parallel_size={tensor}", "1"),
        (train.cpu_offload, "train_model.cpu_offload=true", "false"),
    )
    for is_set, setting, fix in unsupported:
        if is_set:
            return (
                f"{setting} must be {fix} with problems that have images (env.columns.images), "
                "which it does not support: change it, or leave the images out."
            )
    return ""


def _check_algorithm(config: GRPOConfig) -> None:
    """Make the loss and the batch's transforms once, because their constructors check their
    settings.
    """
    network = TensorDictModule(torch.nn.Identity(), [keys.FULL], [("cur_log_probs", "full")])
    make_loss(config, network)
    batch_transforms(config)


def _make_params(
    config: GRPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: tuple[int, ...],
) -> SamplingParams:
    inference = config.inference_model
    return SamplingParams(
        inference.max_new_tokens,
        temperature=inference.temperature,
        top_p=inference.top_p,
        top_k=inference.top_k,
        min_p=inference.min_p,
        return_kept=inference.top_k > 0,
        return_kept_log_probs=config.policy.score_centering,
        stop_token_ids=stop_token_ids,
        stop=StopStrings(inference.stop, tokenizer) if inference.stop else None,
    )


def _make_reward_pool(env: EnvConfig, task: Task) -> RewardPool | None:
    workers = env.reward_workers or (1 if env.tools or task.is_stateful else 0)
    return RewardPool(task, workers, timeout_s=env.reward_timeout_s) if workers else None


def _make_train_env(env: EnvConfig, make_env: partial[LLMEnv]) -> LLMEnv:
    train_env = make_env(num_envs=env.num_envs, repeats=env.repeats)
    drawing = train_env.drawing
    drawing.difficulty_filter = env.difficulty_filter
    if env.sampling == "pass_rate":
        drawing.pass_rate = (env.sampling_target, env.sampling_floor)
    if env.curriculum is not None:
        drawing.follow(env.curriculum)
    return train_env


def check_loggers(config: GRPOConfig) -> None:
    """Check that the packages for ``logging`` are installed and usable.

    Raises:
        ValueError: one is not.
    """
    logging = config.logging
    check_logging(tensorboard=logging.tensorboard, services=logging.services, page=logging.page)


def describe_model(
    config: GRPOConfig,
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase, tuple[int, ...]]:
    """Return the model's config, tokenizer and end-of-turn tokens, without loading weights.

    Raises:
        ValueError: one of them cannot be read, or they do not match.
    """
    name, remote_code = config.model.source, config.model.trust_remote_code
    arguments = config.train_model.model_kwargs or {}
    loading.check_model_kwargs(arguments, loading.load_config(name, trust_remote_code=remote_code))
    model_config = loading.load_config(name, trust_remote_code=remote_code, arguments=arguments)
    tokenizer = loading.load_tokenizer(
        name, chat_template=config.model.chat_template, trust_remote_code=remote_code
    )
    loading.check_vocabulary(model_config, tokenizer, name)
    return (
        model_config,
        tokenizer,
        loading.stop_token_ids(tokenizer, loading.load_generation_config(name)),
    )


@contextmanager
def naming_teacher() -> Iterator[None]:
    """Replace the model's key by the teacher's in errors within the context."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("model.name=", "teacher.model=")) from error


def _check_teachers(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> Shape | None:
    """Return the shape of the largest teacher, after checking all of them; None without one.

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
    mine = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    theirs = {token_id: token for token, token_id in teacher_tokenizer.get_vocab().items()}
    token_ids = sorted({*mine, *theirs})
    different = [token_id for token_id in token_ids if mine.get(token_id) != theirs.get(token_id)]
    if different:
        first = different[0]
        raise ValueError(
            f"teacher.model={name} must have the tokens of model.name={config.model.name}, but "
            f"{len(different)} differ; the first, {first}, is {theirs.get(first)!r} in the teacher "
            f"and {mine.get(first)!r} in the model: use another teacher."
        )
    return loading.config_shape(
        teacher_config, config.model.attn_implementation, trust_remote_code=remote_code
    )


def _check_teachers_images(config: GRPOConfig, encoder: ImageEncoder) -> None:
    """Check that the teachers read images as the policy does.

    Raises:
        ValueError: one reads none, or prepares them differently.
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


def _check_served_teacher(config: GRPOConfig, longest: int) -> None:
    """Check the teacher's servers, if it has any, for sequences of ``longest`` tokens.

    Raises:
        ValueError: a server does not answer, or cannot be the teacher.
    """
    for teacher in map(config.of_teacher, range(config.num_teachers)):
        for address in teacher.teacher.address:
            teacher_config = loading.load_config(
                teacher.teacher_source or "", trust_remote_code=config.model.trust_remote_code
            )
            vocabulary = teacher_config.get_text_config().vocab_size
            load_extra("check_served_teacher")(
                address, vocabulary=vocabulary, longest=longest, top_k=config.policy.teacher_top_k
            )


def engine_request(
    config: GRPOConfig, plan: DevicePlan, model_config: PretrainedConfig, max_dialog_tokens: int
) -> EngineRequest:
    """Return a config's request for an engine whose prompts have at most ``max_dialog_tokens``."""
    return EngineRequest(
        name=config.model.source,
        path=loading.resolve_name(config.model.source),
        model_config=model_config,
        options=config.inference_model,
        max_dialog_tokens=max_dialog_tokens,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
        on_cpu=plan.inference[0][0].type == "cpu",
        colocated=plan.colocated,
        num_sequences=-(-config.env.num_envs // len(plan.inference)),
        trains=not config.only_evaluates,
    )


def _with_length(config: GRPOConfig, problems: int) -> GRPOConfig:
    """Return the config with ``train.total_epochs`` converted to trajectories."""
    epochs = config.train.total_epochs
    if epochs is None:
        return config
    total = epochs * problems * config.env.repeats
    return replace(config, train=replace(config.train, total_dialog_turns=total))


def transformed(config: GRPOConfig, env: LLMEnv | None) -> Any:
    """Return an environment with new instances of the config's transforms."""
    nodes = [(f"env.transforms[{index}]", node) for index, node in enumerate(config.env.transforms)]
    if env is None or not nodes:
        return env
    transforms = [make_component(name, node, Transform) for name, node in nodes]
    return TransformedEnv(env, load_extra("history_transforms")(*transforms))


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


def _make_test_envs(
    config: GRPOConfig, task: Task, make_env: partial[LLMEnv]
) -> tuple[LLMEnv | None, LLMEnv | None]:
    """Return the environments for pass@1 and pass@k; all runs evaluate the same problems."""
    if not config.evaluation.num_prompts:
        return None, None
    most = config.evaluation.num_prompts
    k = config.evaluation.k
    problems = task.problems("test")
    check_tests(task, problems)
    count = min(most, len(problems))
    greedy_env = make_env(num_envs=count, repeats=1)
    prompts = greedy_env.prompts
    names = dataset_names(config.evaluation.datasets or (), "evaluation.datasets")
    datasets = [prompts.problems[index].dataset for index in prompts.usable]
    sizes = Counter(name if name in names else "" for name in datasets)
    # Some prompts may be too long, or there are several test sets. Their problems alternate, so the
    # first ones have the same number of each set.
    needed = sum(min(most, size) for size in sizes.values())
    if needed != count:
        greedy_env = make_env(num_envs=needed, repeats=1)
    return greedy_env, make_env(num_envs=needed * k, repeats=k) if k else None


def _check_sharding(config: GRPOConfig, devices: int, model_config: PretrainedConfig) -> None:
    """Check the rules of ``shard_model`` before anything loads."""
    train = config.train_model
    size = train.tensor_parallel_size
    if devices % size:
        raise ConfigError(
            f"train_model.tensor_parallel_size={size} must divide the trainer's devices, which are "
            f"{devices}: use train_model.num_devices={-(-devices // size) * size}, or leave it out."
        )
    check_heads("train_model.tensor_parallel_size", size, model_config)
    copies = train.replicas
    if copies > 1 and (devices % copies or size > 1):
        raise ConfigError(
            f"train_model.replicas={copies} must divide the trainer's devices, which are "
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


def _context(model_config: PretrainedConfig) -> int:
    return getattr(model_config.get_text_config(), "max_position_embeddings", None) or 2**31


def _max_prompt_tokens(config: GRPOConfig, model_config: PretrainedConfig) -> tuple[int, int]:
    """Return the maximum length of a prompt that leaves room for a whole response: of a problem,
    and of a dialog's last turn.
    """
    context = _context(model_config)
    longest = config.inference_model.max_model_len
    if longest is not None and longest > context:
        raise ConfigError(
            f"inference_model.max_model_len={longest} must not exceed the model's context of "
            f"{context} tokens: use {context} or less, or leave it out."
        )
    context = longest or context
    room = context - config.inference_model.max_new_tokens
    room -= bool(config.teacher_addresses)  # a teacher on a server samples one more token
    if room < 1:
        raise ConfigError(
            f"inference_model.max_new_tokens={config.inference_model.max_new_tokens} must leave "
            f"room for a prompt in the context of {context} tokens: use {context // 2} or less."
        )
    first = min(room, config.env.max_prompt_tokens or room)
    turns = (config.env.max_turns - 1) * (config.inference_model.max_new_tokens + _BETWEEN_TURNS)
    return first, min(room, first + turns)


def task_geometry(config: GRPOConfig, samplers: int, *, sleeps: bool = False) -> tuple[int, int]:
    """Return the groups of a rollout task, and the tasks that a sampler plays at a time.

    An engine that is not concurrent plays one static batch at a time, others any number of groups
    with continuous batching. An engine that sleeps after each task gets its whole share of a batch.

    Raises:
        ValueError: ``env.num_envs`` cannot be divided into whole groups.
    """
    rows, repeats = config.env.num_envs, config.env.repeats
    what = f"env.repeats={repeats} times the {samplers} samplers of the inference model"
    check_multiple("env.num_envs", rows, samplers * repeats, what)
    groups = rows // samplers // repeats
    if sleeps:
        return config.groups_per_batch // samplers, 1
    return (1, groups) if ENGINES[config.inference_model.backend].concurrent else (groups, 1)


def check_devices(blueprint: Blueprint) -> None:
    """Check that each accelerator of this machine has room for the minimum of its roles: weights,
    gradients, moments, and the engine's share. Activations and CUDA's own memory are extra.

    Args:
        blueprint: the run's blueprint, with its plan.

    Raises:
        ConfigError: an accelerator does not.
    """
    total = max((total for _, total in accelerators_in_use().values()), default=None)
    for device in () if blueprint.config.evaluates_served else blueprint.plan.devices:
        if total is not None and device.type == "cuda":
            with as_config_errors():
                _check_device(blueprint, device, total)


def _check_device(blueprint: Blueprint, device: torch.device, total: int) -> None:
    config, plan, memory = blueprint.config, blueprint.plan, blueprint.memory
    request = engine_request(config, plan, blueprint.model_config, blueprint.max_dialog_tokens)
    share = engine_class(config.inference_model.backend).device_share(request)
    samples = any(device in group for group in plan.inference)
    train = memory.train
    holds: dict[str, float] = {}
    if device in plan.train:
        holds = {"trained weights and optimizer state": train.resting, "gradients": train.gradients}
    of_reference = plan.train if config.ref_model.sharded else plan.reference
    if device in of_reference and memory.reference is not None:
        holds["the reference model"] = memory.reference.weights
    if device in plan.teacher and memory.teacher is not None:
        holds["the teacher"] = memory.teacher.weights
    if not samples or share is None:
        holds |= {"the engine's weights": memory.engine.weights} if samples else {}
        if sum(holds.values()) > total:
            raise ConfigError(
                f"train_model.num_devices={len(plan.train)} must leave each device with room for "
                f"its part, but {device} of {size(total)} would hold {in_words(holds)}: use more "
                f"devices, {_MEMORY_SAVERS}."
            )
        return
    if blueprint.sleeps:  # the engine's share and the gradients never exist at the same time
        holds.pop("gradients", None)
    needed = memory.engine.weights / total
    most = 1 - sum(holds.values()) / total
    if share > most or share < needed:
        lower = math.ceil(needed * 100) / 100
        upper = math.floor(most * 100) / 100
        others = f" beside {in_words(holds)}" if holds else ""
        fix = (
            f"inference_model.gpu_memory_utilization={upper:g}"
            if lower <= upper and upper > 0
            else "more devices"
        )
        raise ConfigError(
            f"inference_model.gpu_memory_utilization={share:g} must be a share of {device} that "
            f"holds the engine's {size(memory.engine.weights)} of weights and fits{others}, but "
            f"that is {size(share * total)} of {size(total)}: use {fix}, {_MEMORY_SAVERS}."
        )


def stored_bytes(blueprint: Blueprint, transfer: Transfer) -> int:
    """Return the bytes of weights in Ray's object store at a time.

    The store holds two versions: the one being read and the next one. Adapters, and other kinds of
    weight transfer, do not count.
    """
    config = blueprint.config
    if config.train_model.lora.enabled or config.evaluates_served:
        return 0
    if transfer.kind != "object_store":
        return 0
    itemsize: int = getattr(torch, config.inference_model.dtype).itemsize
    return 2 * int(blueprint.shape.parameters) * itemsize


def plan_rows(blueprint: Blueprint) -> list[dict[str, Any]]:
    """Return the device plan: one row per role, with the memory of one of its devices."""
    config, plan, memory = blueprint.config, blueprint.plan, blueprint.memory
    train = config.train_model
    inference = config.inference_model
    teacher = config.teacher
    ranks = [(device,) for device in plan.train]
    rows: list[dict[str, Any]] = []

    def add(
        role: str,
        devices: Sequence[Sequence[torch.device]],
        dtype: str,
        peak: int = 0,
        shape: Shape | None = blueprint.shape,
        addresses: Sequence[str] = (),
    ) -> None:
        row = {
            "role": role,
            "devices": ", ".join(addresses) or _format_devices(devices),
            "dtype": dtype,
            "parameters": 0 if shape is None else shape.parameters,
            "memory per device": 0 if addresses else peak,
        }
        rows.append(row)

    if not config.evaluates_served:
        add(
            "train (LoRA)" if train.lora.enabled else "train", ranks, train.dtype, memory.train.peak
        )
    engine, addresses = f"inference ({inference.backend})", inference.address
    add(engine, plan.inference, inference.dtype, memory.engine.peak, addresses=addresses)
    if config.only_evaluates:
        return rows
    if memory.reference is not None:
        own = ranks if config.ref_model.sharded else [(device,) for device in plan.reference]
        add("reference", own, config.ref_model.dtype, memory.reference.peak)
    elif config.needs_reference:
        what = "average" if config.ref_model.decay else "adapters off"
        add(f"reference ({what})", ranks, train.dtype)
    if memory.teacher is not None:
        own = [(device,) for device in plan.teacher]
        addresses = config.teacher_addresses
        dtype = "" if addresses else config.of_teacher(0).teacher.dtype
        shape = blueprint.teacher_shape
        add("teacher", own, dtype, memory.teacher.peak, shape, addresses)
    elif config.learner_teaches:
        add(f"teacher ({teacher.weights})", ranks, train.dtype)
    return rows


def _format_devices(groups: Sequence[Sequence[torch.device]]) -> str:
    """Format devices as ``cuda:0, cuda:1``, those of a tensor-parallel engine as ``cuda:0+cuda:1``,
    and CPU processes as ``3 x cpu``.
    """
    names = ["+".join(map(str, group)) for group in groups]
    if len(names) > 1 and len(set(names)) == 1:
        return f"{len(names)} x {names[0]}"
    return ", ".join(names)


def geometry_rows(blueprint: Blueprint) -> list[dict[str, Any]]:
    """Return the batch geometry: the sizes of one step and of the whole run."""
    config = blueprint.config
    batch, steps = config.dialog_turns_per_batch, config.num_batches
    per_step = {
        "sequences": batch,
        f"groups of {config.env.repeats}": config.groups_per_batch,
        "optimizer steps": config.optim_steps_per_batch,
        "response tokens (max)": batch * config.inference_model.max_new_tokens,
    }
    rows: list[dict[str, Any]] = [
        {"quantity": "steps (weight syncs)", "per step": 1, "whole run": steps}
    ]
    return rows + [
        {"quantity": name, "per step": value, "whole run": value * steps}
        for name, value in per_step.items()
    ]

"""Components of the roles (learner, sampler with its engine, reference model, teacher), from a context
and a device: the only module that makes engines and models.

The driver of a local run calls these functions. In a distributed run each actor calls them in its
own process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchrl.envs import Transform

from torchrl_grpo import keys
from torchrl_grpo.assembly.algorithm import batch_transforms, make_loss
from torchrl_grpo.assembly.context import Context
from torchrl_grpo.assembly.errors import naming_teacher
from torchrl_grpo.assembly.tasks import dataset_names
from torchrl_grpo.collectors.demonstrations import Demonstrations
from torchrl_grpo.collectors.evaluation import Evaluator
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.sampler import Sampler
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.config.policy import PolicyConfig
from torchrl_grpo.config.teacher import OWN_MODEL
from torchrl_grpo.generation.base import Engine, SamplingParams, engine_class
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.out_of_memory import memory_short
from torchrl_grpo.host.startup import say
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.learner.null_learner import NullLearner
from torchrl_grpo.learner.optimizer import EntropyControl, learning_rate_factor, make_optimizer
from torchrl_grpo.learner.resume import restore
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models import loading
from torchrl_grpo.models.compiled import DEVICES, MIN_ELEMENTS
from torchrl_grpo.models.divergence import Teacher
from torchrl_grpo.models.memory import BYTES, weight_bytes
from torchrl_grpo.models.scoring import (
    AdapterOffScorer,
    AverageScorer,
    TokenScorer,
    check_images,
)
from torchrl_grpo.models.sharding import loading_device, lone_mesh, shard_model
from torchrl_grpo.runtime.actors import own_address
from torchrl_grpo.runtime.placement import own_device
from torchrl_grpo.runtime.reference import Reference
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.teacher import TeacherScoring, TeacherStates
from torchrl_grpo.weights import Transfer, make_sender
from torchrl_grpo.weights.named import is_critic

_VALUE_STEP = 0.4
"""Change of a value by Adam's first step, at most; of ``critic.lr``'s default."""


def make_learner(
    context: Context,
    transfer: Transfer,
    mesh: DeviceMesh | None = None,
    *,
    device: torch.device | None = None,
) -> Learner:
    """Make a learner, or one rank of it.

    Args:
        context: checked.
        transfer: kind of weight transfer to the engines; see ``transfer_kind``.
        mesh: the ranks that the model is sharded over; None for one rank.
        device: device of this rank; by default, here and below, the first one visible to this
            process.
    """
    if context.config.evaluates_served:
        return NullLearner()
    device = device or own_device()
    say(f"loading the model {context.config.model.name}")
    config, lora = context.config, context.config.train_model.lora.enabled
    if mesh is None and config.train_model.cpu_offload:  # offloading is a feature of sharding
        mesh = lone_mesh(device)
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    trainer = make_trainer(context, device, mesh)
    transforms: list[Any] = batch_transforms(config, context.task.part_weights)
    if config.policy.value_coef:
        transforms.insert(0, ("values", trainer.score))
    if config.learner_scores:
        scorer: TokenScorer
        if "reference" in trainer.averages:
            scorer = trainer.averages["reference"]
        elif lora:
            temperature = config.inference_model.temperature
            scorer = AdapterOffScorer(trainer.model, temperature=temperature)
        else:
            scorer = _load_scorer(config, "ref_model", device, mesh)
        transforms.insert(0, ("reference", KLScoring(scorer, **_passes(config))))
    if config.learner_teaches:
        teacher = trainer.averages.get("teacher", trainer.loss.actor_network)
        transforms.insert(0, ("teacher_pass", _local_teacher(config, teacher)))
    sender = make_sender(
        transfer,
        dtype=getattr(torch, config.inference_model.dtype),
        adapters=context.adapter_slots is not None,
        host=own_address() if transfer.kind in ("nccl", "ipc") else "",
    )
    learner = Learner(
        trainer,
        transforms,
        sender,
        context.model.tokenizer,
        turns=context.turns,
        sampled=not config.policy.demonstrations,
    )
    if context.resume is not None:
        restore(learner, context.resume)
    return learner


def make_trainer(
    context: Context, device: torch.device, mesh: DeviceMesh | None = None
) -> PolicyTrainer:
    """Make the trainer with its model (sharded over the mesh, if any), loss and optimizer."""
    config = context.config
    train, settings = config.train_model, config.optimizer
    # Sharding moves the model to its device layer by layer, so it need not fit there as a whole.
    model = make_model(config, device if mesh is None else loading_device(mesh))
    if train.gradient_checkpointing:
        loading.enable_gradient_checkpointing(model)
    # Before sharding, because its constructor runs the model as a check.
    scorer = TokenScorer(model, temperature=config.inference_model.temperature)
    prompt = context.train_env.prompts.first_with_images()
    if prompt is not None and scorer.base.device.type != "meta":
        check_images(scorer, prompt)
    if config.policy.value_coef:
        scorer.add_critic()
    if mesh is not None:
        shard_model(model, mesh, param_dtype=_autocast_dtype(config), cpu_offload=train.cpu_offload)
    if config.teacher_in_loss:
        scorer.distill_from(_teacher_head(config, device))
    loss = make_loss(config, scorer)
    for name, buffer in loss.named_buffers(recurse=False):  # the model is already on its device
        setattr(loss, name, buffer.to(device))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = make_optimizer(
        [weight for name, weight in trained.items() if not is_critic(name)],
        settings.name,  # type: ignore[arg-type]
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        critic=[weight for name, weight in trained.items() if is_critic(name)],
        critic_lr=config.critic.lr or _VALUE_STEP / scorer.base.get_output_embeddings().in_features,
    )
    factor = partial(
        learning_rate_factor,
        kind=settings.schedule,  # type: ignore[arg-type]
        warmup=settings.warmup_steps,
        total=config.num_optim_steps,
        floor=settings.lr_floor,
    )
    temperature = config.inference_model.temperature
    averages = {
        role: AverageScorer(model, temperature, decay=decay, every=every)
        for role, (decay, every) in config.averages.items()
    }
    compiles = train.compile
    if compiles == "auto":
        is_large = config.pass_tokens * context.shape.hidden >= MIN_ELEMENTS
        compiles = device.type in DEVICES and is_large and train.tensor_parallel_size == 1
    return PolicyTrainer(
        loss,
        model,
        optimizer,
        averages=averages,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        optim_batch_size=config.optim_batch_size,
        epochs=config.train.epochs,
        micro_batch_tokens=config.pass_tokens,
        autocast_dtype=_autocast_dtype(config),
        clip_grad_norm=settings.clip_grad_norm,
        max_nonfinite_steps=config.train.max_nonfinite_steps,
        entropy_control=_entropy_control(config.policy),
        compiles=compiles,
    )


def make_model(config: GRPOConfig, device: torch.device) -> nn.Module:
    """Make the model to be trained in its initial state, with its adapters."""
    model = _load(config, "train_model", device)
    if not config.train_model.train_vision:
        loading.freeze_vision(model)
    lora = config.train_model.lora.options
    return loading.add_lora(model, **lora) if lora else model


def make_sampler(
    context: Context, *, number: int = 0, device: torch.device | None = None
) -> Sampler:
    """Make a sampler.

    Args:
        context: checked.
        number: index of the sampler.
        device: device of its engine, the first one if it has several.
    """
    config, params = context.config, context.params
    say(f"starting the engine: {config.inference_model.backend}")
    geometry = context.geometry
    # A task, an update and an evaluation may then be calls at the same time.
    concurrent = context.distributed and not context.turns
    engine = make_engine(context, device or own_device(), concurrent=concurrent, number=number)
    policy = GenerationPolicy(engine, params, rescore=_rescorer(config, engine))

    demonstrations = None
    if config.needs_demonstrations:
        demonstrations = Demonstrations(
            context.train_env,
            engine,
            params.stop_token_ids,
            max_turn_tokens=config.inference_model.max_new_tokens,
            max_tokens=context.max_sequence_tokens,
        )

    def make_collector(groups: int) -> RolloutCollector | Demonstrations:
        if demonstrations is not None and config.policy.demonstrations:
            return demonstrations
        env = context.train_env.with_rows(groups * config.env.repeats)
        return RolloutCollector(context.transformed(env), policy)

    evaluator = None
    if context.tests is not None:
        evaluation = config.evaluation
        sampled = SamplingParams(
            params.max_new_tokens,
            temperature=evaluation.temperature or params.temperature,
            top_p=evaluation.top_p,
            top_k=evaluation.top_k,
            min_p=evaluation.min_p,
            stop_token_ids=params.stop_token_ids,
            stop=params.stop,
        )
        evaluator = Evaluator(
            engine,
            context.transformed(context.tests.greedy),
            context.transformed(context.tests.sampled),
            params=sampled,
            further=dataset_names(evaluation.datasets or (), "evaluation.datasets"),
            rows=config.logging.test_rows,
        )
    context.task.load_models()
    return Sampler(
        engine,
        make_collector,
        evaluator,
        groups_at_a_time=min(geometry.task_groups, geometry.groups_at_a_time),
        overlapping=geometry.concurrent_tasks > 1,
        turns=context.turns,
        reward_pool=context.reward_pool,
        writers=_writers(context, demonstrations),
        # Not for a single sampler, which plays all tasks in order, nor for overlapping tasks, which
        # share the engine's random state.
        seed=config.seed if geometry.samplers > 1 and geometry.concurrent_tasks == 1 else None,
    )


def _writers(context: Context, demonstrations: Demonstrations | None) -> list[Any]:
    """Return what adds entries to the rows of each group that a sampler has played."""
    give = None
    if demonstrations is not None and context.config.policy.sft_coef:
        give = demonstrations.give
    return [*filter(None, (give, context.teacher_prompts))]


def make_engine(
    context: Context, device: torch.device, *, concurrent: bool = False, number: int = 0
) -> Engine:
    """Make the generation engine with its model; ``concurrent`` allows calls from many threads, if
    the engine supports them.
    """
    config = context.config
    request = replace(context.engine_request, number=number)
    load_model = partial(_load, config, "inference_model", device)
    return engine_class(config.inference_model.backend).make(
        request, device, load_model, concurrent=concurrent
    )


def _rescorer(config: GRPOConfig, engine: Engine) -> Callable[..., Tensor] | None:
    """Return the scorer for ``inference_model.exact``, with the trainer's computation."""
    if not config.inference_model.exact:
        return None
    model = cast(Any, engine).model  # engines with ``EngineKind.exact`` have one
    scorer = TokenScorer(model, temperature=config.inference_model.temperature)
    return KLScoring(
        scorer, autocast_dtype=_autocast_dtype(config), out_key=keys.LOG_PROBS
    ).log_probs


def make_reference(context: Context, device: torch.device | None = None) -> Reference:
    """Make a separate reference model, with scoring passes of the trainer's size and precision."""
    config = context.config
    scorer = _load_scorer(config, "ref_model", device or own_device())
    return Reference(KLScoring(scorer, **_passes(config)), turns=context.turns)


def make_teacher(
    context: Context, device: torch.device | None = None, *, number: int = 0
) -> Reference:
    """Make a teacher: a reference model with other weights, which may return states instead of
    log-probs.

    Args:
        context: checked.
        device: device of the model, unless it is on a server.
        number: index of the teacher.
    """
    different = context.plan.num_teachers
    config = context.config.of_teacher(number % different)
    entries = context.config.teachers
    datasets = entries[number % different].datasets if entries else None
    if config.teacher.address:
        vocabulary = context.model.config.get_text_config().vocab_size
        address, top_k = config.teacher.address[number // different], config.policy.teacher_top_k
        served = load_extra("served_teacher")(address, top_k=top_k, vocabulary=vocabulary)
        return Reference(_teacher_scoring(config, served, 2 * (top_k or 0), datasets))
    scorer = _load_scorer(config, "teacher", device or own_device())
    return Reference(_local_teacher(config, scorer, datasets), turns=context.turns)


def _local_teacher(
    config: GRPOConfig, scorer: TokenScorer, datasets: Sequence[str] | None = None
) -> Transform:
    """Return the transform with which a model in this process scores as the teacher."""
    scoring: KLScoring
    top_k = config.policy.teacher_top_k
    if config.teacher_in_loss:
        scoring = TeacherStates(scorer, top_k=top_k, **_passes(config))
    else:
        scoring = KLScoring(scorer, out_key=keys.TEACHER_LOG_PROBS, **_passes(config))
    width = scorer.base.get_output_embeddings().in_features if top_k is None else 2 * top_k + 1
    return _teacher_scoring(config, scoring, width, datasets)


def _teacher_scoring(
    config: GRPOConfig,
    scoring: Transform,
    width: int,
    datasets: Sequence[str] | None,
) -> Transform:
    """Return a teacher's transform, with a prompt or data sets of its own if the config has any."""
    if config.teacher.prompt is None and datasets is None:
        return scoring
    return TeacherScoring(scoring, width if config.teacher_in_loss else 0, datasets)


def _teacher_head(config: GRPOConfig, device: torch.device) -> Teacher:
    """Return the divergence from the teacher for the loss, with the teacher's LM head if needed."""
    policy = config.policy
    beta = {"forward": 0.0, "reverse": 1.0}.get(policy.teacher_divergence, policy.teacher_beta)
    if policy.teacher_top_k is not None:
        return Teacher(beta)
    head = _load(config, "teacher", torch.device("cpu")).get_output_embeddings()
    bias = None if head.bias is None else head.bias.detach().to(device)
    return Teacher(beta, head.weight.detach().to(device), bias)


def _load_scorer(
    config: GRPOConfig, role: str, device: torch.device, mesh: DeviceMesh | None = None
) -> TokenScorer:
    """Load a frozen model for scoring; on a mesh it is sharded like the trained model."""
    name = f"teacher {config.teacher_source}" if role == "teacher" else "reference model"
    say(f"loading the {name}")
    model = _load(config, role, device if mesh is None else loading_device(mesh))
    model.requires_grad_(False)
    # Before sharding, because its constructor runs the model as a check.
    scorer = TokenScorer(model, temperature=config.inference_model.temperature)
    if mesh is not None:
        offload = config.train_model.cpu_offload
        shard_model(model, mesh, param_dtype=_autocast_dtype(config), cpu_offload=offload)
    return scorer


def _passes(config: GRPOConfig) -> dict[str, Any]:
    """Return the size of scoring passes, and their precision, which is the trainer's."""
    return {
        "max_tokens": config.train.micro_batch_tokens,
        "autocast_dtype": _autocast_dtype(config),
    }


def _entropy_control(policy: PolicyConfig) -> EntropyControl | None:
    target, delta = policy.entropy_target, policy.entropy_coef_delta
    if target is None:
        return None
    return EntropyControl(policy.entropy_coef, target, delta, policy.entropy_coef_max)


def _autocast_dtype(config: GRPOConfig) -> torch.dtype | None:
    """Return the dtype in which the training step computes; None for the dtype of the weights."""
    return {"full": None, "bf16": torch.bfloat16, "fp16": torch.float16}[
        config.train.mixed_precision
    ]


def _load(config: GRPOConfig, role: str, device: torch.device) -> Any:
    """Load the model of a role onto its device.

    Raises:
        MemoryShortError: the device has no room for it.
    """
    model, dtype = config.model, getattr(config, role).dtype
    is_teacher = role == "teacher" and config.teacher.model != OWN_MODEL
    name = config.teacher_source or "" if is_teacher else model.source
    arguments = None if is_teacher else config.train_model.model_kwargs
    quantization = config.train_model.quantization if role == "train_model" else None
    try:
        with naming_teacher() if is_teacher else nullcontext():
            return loading.load_model(
                name,
                dtype=getattr(torch, dtype),
                device=device,
                attn_implementation=model.attn_implementation,
                trust_remote_code=model.trust_remote_code,
                arguments=arguments,
                quantization=quantization,
            )
    except torch.OutOfMemoryError as error:
        model_config = loading.load_config(
            name, trust_remote_code=model.trust_remote_code, arguments=arguments
        )
        shape = loading.config_shape(model_config, trust_remote_code=model.trust_remote_code)
        weights = weight_bytes(shape, BYTES[dtype], quantized=quantization is not None)
        savings = {}
        if role == "train_model":
            savings = {"train_model.num_devices=2": weights // 2}
        elif dtype == "float32":
            savings = {f"{role}.dtype=bfloat16": weights // 2}
        raise memory_short(
            error, f"Loading {name} for {role}", {"weights": weights}, savings
        ) from error

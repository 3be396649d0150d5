"""Makes the parts of a role from a blueprint and a device: the only place that makes engines,
models and environments.

The driver of a local run calls these functions, and so do the actors of a distributed one, each in
its own process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchrl_grpo import keys
from torchrl_grpo.assembly.algorithm import batch_transforms, make_loss
from torchrl_grpo.assembly.blueprint import Blueprint, engine_request, naming_teacher, transformed
from torchrl_grpo.assembly.tasks import dataset_names
from torchrl_grpo.collectors.demonstrations import Demonstrations
from torchrl_grpo.collectors.evaluation import Evaluator
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.sampler import Sampler
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.generation.base import Engine, engine_class
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.host.memory import memory_short
from torchrl_grpo.host.startup import say
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.learner.optimizer import learning_rate_factor, make_optimizer
from torchrl_grpo.learner.resume import restore
from torchrl_grpo.learner.step import GRPOTrainer
from torchrl_grpo.learner.untrained import Untrained
from torchrl_grpo.models import loading
from torchrl_grpo.models.divergence import Teacher
from torchrl_grpo.models.memory import BYTES, weight_bytes
from torchrl_grpo.models.scoring import AdapterOffScorer, TokenScorer
from torchrl_grpo.models.sharding import loading_device, lone_mesh, shard_model
from torchrl_grpo.runtime.placement import own_device
from torchrl_grpo.runtime.reference import Reference
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.served_teacher import ServedTeacher
from torchrl_grpo.transforms.teacher import TeacherStates
from torchrl_grpo.weights import Transfer, make_sender


def make_learner(
    blueprint: Blueprint,
    transfer: Transfer,
    mesh: DeviceMesh | None = None,
    *,
    device: torch.device | None = None,
) -> Learner:
    """Make a learner, or one rank of it.

    Args:
        blueprint: checked.
        transfer: how its weights reach the engines; see ``transfer_kind``.
        mesh: the ranks that the model is sharded over, None for one rank.
        device: of this rank; by default the first one that this process sees, here and below.
    """
    if blueprint.config.evaluates_served:
        return Untrained()
    device = device or own_device()
    say(f"loading the model {blueprint.config.model.name}")
    config, lora = blueprint.config, blueprint.config.train_model.lora.enabled
    if mesh is None and config.train_model.cpu_offload:  # which is a matter of sharding
        mesh = lone_mesh(device)
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    trainer = make_trainer(blueprint, device, mesh)
    transforms = batch_transforms(config, blueprint.task.part_weights)
    if config.learner_scores:
        temperature = config.inference_model.temperature
        scorer = (
            AdapterOffScorer(trainer.model, temperature=temperature)
            if lora
            else _sharded(blueprint, device, mesh)
        )
        transforms.insert(0, ("reference", _kl_scoring(config, scorer)))
    model = config.model
    base = loading.CheckpointModel(
        model.source,
        _dtype(config.train_model.dtype),
        model.trust_remote_code,
        config.train_model.model_kwargs,
    )
    sender = make_sender(
        transfer,
        dtype=_dtype(config.inference_model.dtype),
        lora_base=base if lora else None,
        host=_own_address() if transfer.kind in ("nccl", "ipc") else "",
    )
    sampled = not config.policy.demonstrations
    learner = Learner(
        trainer,
        transforms,
        sender,
        blueprint.tokenizer,
        makes_room=blueprint.sleeps,
        sampled=sampled,
    )
    if blueprint.resume is not None:
        restore(learner, blueprint.resume)
    return learner


def make_trainer(
    blueprint: Blueprint, device: torch.device, mesh: DeviceMesh | None = None
) -> GRPOTrainer:
    """The trainer with its model, loss and optimizer; the model is sharded over the ranks of a
    mesh.
    """
    config = blueprint.config
    train, settings = config.train_model, config.optimizer
    # Sharding moves the model to its device layer by layer: it need not fit there as a whole.
    model = make_model(config, device if mesh is None else loading_device(mesh))
    if train.gradient_checkpointing:
        loading.enable_gradient_checkpointing(model)
    scorer = TokenScorer(
        model, temperature=config.inference_model.temperature
    )  # before sharding: it checks itself
    if mesh is not None:
        shard_model(model, mesh, param_dtype=_autocast_dtype(config), cpu_offload=train.cpu_offload)
    if config.teacher_in_loss:
        scorer.distill_from(_teacher_head(config, device))
    loss = make_loss(config, scorer)
    for name, buffer in loss.named_buffers(recurse=False):  # the model is where it belongs
        setattr(loss, name, buffer.to(device))
    optimizer = make_optimizer(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        settings.name,  # type: ignore[arg-type]
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    factor = partial(
        learning_rate_factor,
        kind=settings.schedule,  # type: ignore[arg-type]
        warmup=settings.warmup_steps,
        total=config.num_optim_steps,
        floor=settings.lr_floor,
    )
    return GRPOTrainer(
        loss,
        model,
        optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        optim_batch_size=config.optim_batch_size,
        epochs=config.train.epochs,
        micro_batch_tokens=1 if config.inference_model.exact else config.train.micro_batch_tokens,
        autocast_dtype=_autocast_dtype(config),
        clip_grad_norm=settings.clip_grad_norm,
        max_nonfinite_steps=config.train.max_nonfinite_steps,
    )


def make_model(config: GRPOConfig, device: torch.device) -> nn.Module:
    """The model that is trained, as it is before the first step, with its adapters."""
    model: nn.Module = _load(config, "train_model", device)
    lora = config.train_model.lora
    if not lora.enabled:
        return model
    targets: str | list[str] = (
        "all-linear" if lora.target_modules == ["all-linear"] else lora.target_modules
    )
    return loading.add_lora(model, r=lora.r, alpha=lora.alpha, target_modules=targets)


def make_sampler(
    blueprint: Blueprint,
    task_groups: int | None = None,
    concurrent_tasks: int = 1,
    *,
    number: int = 0,
    device: torch.device | None = None,
) -> Sampler:
    """A sampler.

    Args:
        blueprint: checked.
        task_groups: groups of a rollout task; the engine is then one that several may call at a
            time, where there is such a one and it need not sleep. None is a sampler that plays
            whole batches.
        concurrent_tasks: rollout tasks that it plays at a time.
        number: of the sampler, from 0.
        device: of its engine, the first one of several.
    """
    config = blueprint.config
    say(f"starting the engine: {config.inference_model.backend}")
    concurrent = task_groups is not None and not blueprint.sleeps
    engine = make_engine(blueprint, device or own_device(), concurrent=concurrent, number=number)
    policy = GenerationPolicy(engine, blueprint.params, rescore=_rescorer(config, engine))

    shown = None
    if config.needs_demonstrations:
        shown = Demonstrations(
            blueprint.train_env,
            engine,
            blueprint.params.stop_token_ids,
            most=config.inference_model.max_new_tokens,
            longest=blueprint.max_sequence_tokens,
        )

    def make_collector(groups: int) -> RolloutCollector | Demonstrations:
        if shown is not None and config.policy.demonstrations:
            return shown
        env = blueprint.train_env.with_rows(groups * config.env.repeats)
        return RolloutCollector(transformed(config, env), policy)

    evaluator = None
    if blueprint.greedy_env is not None:
        evaluation = config.evaluation
        sampled = replace(
            blueprint.params,
            temperature=evaluation.temperature or blueprint.params.temperature,
            top_p=evaluation.top_p,
            top_k=evaluation.top_k,
            min_p=evaluation.min_p,
        )
        evaluator = Evaluator(
            engine,
            transformed(config, blueprint.greedy_env),
            transformed(config, blueprint.sampled_env),
            params=sampled,
            further=dataset_names(evaluation.datasets or (), "evaluation.datasets"),
            rows=config.logging.test_rows,
        )
    prompts = blueprint.train_env.prompts.first(4)
    at_a_time = config.env.num_envs // config.env.repeats // len(blueprint.plan.inference)
    return Sampler(
        engine,
        make_collector,
        evaluator,
        blueprint.params,
        prompts,
        groups_at_a_time=min(task_groups or at_a_time, at_a_time),
        overlapping=concurrent_tasks > 1,
        sleeps=blueprint.sleeps,
        reward_pool=blueprint.reward_pool,
        demonstrations=shown if config.policy.sft_coef else None,
        # One sampler plays all tasks in their order, and overlapping ones share an engine's draws
        # anyway.
        seed=config.seed if len(blueprint.plan.inference) > 1 and concurrent_tasks == 1 else None,
    )


def make_engine(
    blueprint: Blueprint, device: torch.device, *, concurrent: bool = False, number: int = 0
) -> Engine:
    """The generation engine with its model; ``concurrent`` is one that many threads may call at a
    time, if it can.
    """
    config = blueprint.config
    request = engine_request(
        config, blueprint.plan, blueprint.model_config, blueprint.max_dialog_tokens
    )
    request = replace(request, folder=blueprint.folder, number=number)
    load_model = partial(_load, config, "inference_model", device)
    return engine_class(config.inference_model.backend).make(
        request, device, load_model, concurrent=concurrent
    )


def _rescorer(
    config: GRPOConfig, engine: Engine
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Scorer of single responses that computes as the trainer does with ``inference_model.exact``."""
    if not config.inference_model.exact:
        return None
    model = cast(Any, engine).model  # of each engine whose ``EngineKind.exact`` is true
    scorer = TokenScorer(model, temperature=config.inference_model.temperature)
    return KLScoring(
        scorer, autocast_dtype=_autocast_dtype(config), out_key=keys.LOG_PROBS
    ).log_probs


def make_reference(blueprint: Blueprint, device: torch.device | None = None) -> Reference:
    """Make a separate reference model, which scores in passes of the trainer's size and precision."""
    config = blueprint.config
    say("loading the reference model")
    model = _load(config, "ref_model", device or own_device()).requires_grad_(False)
    scorer = TokenScorer(model, temperature=config.inference_model.temperature)
    return Reference(_kl_scoring(config, scorer), makes_room=blueprint.sleeps)


def make_teacher(
    blueprint: Blueprint, device: torch.device | None = None, *, number: int = 0
) -> Reference:
    """The teacher: a reference model with other weights, which may give states in place of
    log-probs.

    Args:
        blueprint: checked.
        device: of the model, where it is not on a server.
        number: of the teacher, from 0.
    """
    config = blueprint.config
    if config.teacher.address:
        vocabulary = blueprint.model_config.get_text_config().vocab_size
        address, top_k = config.teacher.address[number], config.policy.teacher_top_k
        return Reference(ServedTeacher(address, top_k=top_k, vocabulary=vocabulary))
    say(f"loading the teacher {config.teacher.model}")
    model = _load_teacher(config, device or own_device()).requires_grad_(False)
    scorer = TokenScorer(model, temperature=config.inference_model.temperature)
    if config.teacher_in_loss:
        states = TeacherStates(scorer, top_k=config.policy.teacher_top_k, **_passes(config))
        return Reference(states, makes_room=blueprint.sleeps)
    scoring = KLScoring(scorer, out_key=keys.TEACHER_LOG_PROBS, **_passes(config))
    return Reference(scoring, makes_room=blueprint.sleeps)


def _teacher_head(config: GRPOConfig, device: torch.device) -> Teacher:
    """The divergence from the teacher that the loss takes, with the teacher's LM head where that is
    needed.
    """
    policy = config.policy
    beta = {"forward": 0.0, "reverse": 1.0}.get(policy.teacher_divergence, policy.teacher_beta)
    if policy.teacher_top_k is not None:
        return Teacher(beta)
    head = _load_teacher(config, torch.device("cpu")).get_output_embeddings()
    bias = None if head.bias is None else head.bias.detach().to(device)
    return Teacher(beta, head.weight.detach().to(device), bias)


def _sharded(blueprint: Blueprint, device: torch.device, mesh: DeviceMesh | None) -> TokenScorer:
    """The scorer of a reference model that lies on the training ranks as the trained model does."""
    config = blueprint.config
    say("loading the reference model")
    model = _load(
        config, "ref_model", device if mesh is None else loading_device(mesh)
    ).requires_grad_(False)
    scorer = TokenScorer(
        model, temperature=config.inference_model.temperature
    )  # before sharding: it checks itself
    if mesh is not None:
        offload = config.train_model.cpu_offload
        shard_model(model, mesh, param_dtype=_autocast_dtype(config), cpu_offload=offload)
    return scorer


def _kl_scoring(config: GRPOConfig, scorer: TokenScorer) -> KLScoring:
    return KLScoring(scorer, **_passes(config))


def _passes(config: GRPOConfig) -> dict[str, Any]:
    """Size and precision of scoring passes: those of the trainer."""
    return {
        "max_tokens": config.train.micro_batch_tokens,
        "autocast_dtype": _autocast_dtype(config),
    }


def _own_address() -> str:
    from torchrl_grpo.runtime.actors import own_address

    return own_address()


def _autocast_dtype(config: GRPOConfig) -> torch.dtype | None:
    """Dtype that the training step computes in; None is the dtype of the weights."""
    return {"full": None, "bf16": torch.bfloat16, "fp16": torch.float16}[
        config.train.mixed_precision
    ]


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _load_teacher(config: GRPOConfig, device: torch.device) -> Any:
    with naming_teacher():
        return _load(config, "teacher", device)


def _load(config: GRPOConfig, role: str, device: torch.device) -> Any:
    """The model of a role, on its device.

    Raises:
        MemoryShortError: the device has no room for it.
    """
    model, dtype = config.model, getattr(config, role).dtype
    name, arguments = model.source, config.train_model.model_kwargs
    if role == "teacher":
        name, arguments = config.teacher.model or "", None  # which are of another model
    try:
        return loading.load_model(
            name,
            dtype=_dtype(dtype),
            device=device,
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
            arguments=arguments,
        )
    except torch.OutOfMemoryError as error:
        found = loading.load_config(
            name, trust_remote_code=model.trust_remote_code, arguments=arguments
        )
        shape = loading.config_shape(found, trust_remote_code=model.trust_remote_code)
        weights = weight_bytes(shape, BYTES[dtype])
        knobs = (
            {f"{role}.dtype=bfloat16": weights // 2}
            if dtype == "float32" and role != "train_model"
            else {}
        )
        knobs |= {"train_model.num_devices=2": weights // 2} if role == "train_model" else {}
        raise memory_short(
            error, f"Loading {name} for {role}", {"weights": weights}, knobs
        ) from error

"""From the config to the objects of a run: the only place that wires.

``build`` checks everything that can be checked without weights, shows the plan, and only then loads models.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra.utils import instantiate
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchrl._utils import logger as torchrl_logger
from torchrl.envs import Transform
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from torchrl_grpo import keys
from torchrl_grpo.build_resume import Resume, find_resume, restore_trainer
from torchrl_grpo.collectors.evaluation import Evaluator
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.source import LocalSource
from torchrl_grpo.config import ConfigError, GRPOConfig, plain
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import Engine, SamplingParams, preserve_rng
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.learner.step import GRPOTrainer
from torchrl_grpo.loop.fit import fit
from torchrl_grpo.models import loading
from torchrl_grpo.models.scoring import AdapterOffScorer, TokenScorer, check_logits_are_plain
from torchrl_grpo.models.sharding import shard_model
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.placement import DevicePlan, RoleRequest, available_accelerators, plan_devices
from torchrl_grpo.reporting.console import Console
from torchrl_grpo.reporting.metrics import MetricsLogger, check_logging
from torchrl_grpo.reporting.report import summarize, write_report
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.tasks import make_task
from torchrl_grpo.tasks.base import Split, Task
from torchrl_grpo.transforms.advantage import GroupAdvantage
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.reward import RewardShaping
from torchrl_grpo.weights import sync_mismatch

if TYPE_CHECKING:
    from torchrl_grpo.build_distributed import DistributedParts
    from torchrl_grpo.distributed.cluster import Cluster
    from torchrl_grpo.distributed.source import RaySource
    from torchrl_grpo.distributed.trainer import RayTrainer


@dataclass
class Blueprint:
    """What is known before any weights are loaded; every check on user input has passed.

    ``resume`` is the checkpoint to go on from.
    """

    config: GRPOConfig
    plan: DevicePlan
    task: Task
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    params: SamplingParams
    max_prompt_tokens: int
    reward_pool: RewardPool | None
    train_env: LLMEnv
    greedy_env: LLMEnv | None
    sampled_env: LLMEnv | None
    resume: Resume | None = None


@dataclass
class LocalParts:
    """The roles of a run in one process."""

    trainer: GRPOTrainer
    source: LocalSource
    evaluator: Evaluator | None
    reference: KLScoring | None
    probe_prompts: list[torch.Tensor]

    def refresh_reference(self) -> None:
        """Gives the reference model the trained weights."""
        assert self.reference is not None
        self.reference.update_weights(self.trainer.weights())

    def sync_mismatch(self) -> tuple[float, float]:
        """Mean and largest difference between the engine's and the trainer's log-probs of a few sampled tokens."""
        policy = self.source.collector.policy
        with preserve_rng(policy.engine):
            return sync_mismatch(policy.engine, self.trainer.score, self.probe_prompts, policy.params)


@dataclass
class Run:
    """A run that is ready: ``fit`` it, then ``close`` it (also after an error)."""

    config: GRPOConfig
    directory: Path
    parts: LocalParts | DistributedParts
    checkpointer: Checkpointer
    logger: MetricsLogger
    console: Console
    tokenizer: PreTrainedTokenizerBase
    resources: ExitStack
    resume: Resume | None = None

    @property
    def trainer(self) -> GRPOTrainer | RayTrainer:
        """Makes the steps."""
        return self.parts.trainer

    @property
    def source(self) -> LocalSource | RaySource:
        """Gives the batches."""
        return self.parts.source

    def fit(self) -> dict[str, Any]:
        """Trains, exports the model, writes the report; returns the run in a few numbers."""
        config = self.config
        try:
            fit(
                self.trainer,
                self.source,
                self.parts.evaluator,
                self.checkpointer,
                self.logger,
                self.console,
                num_batches=config.num_batches,
                sequences_per_batch=config.dialog_turns_per_batch,
                evaluation_frequency=config.evaluation.frequency,
                checkpoint_frequency=config.train.checkpoint_frequency,
                sample_frequency=config.logging.sample_frequency,
                before_publish=self._refresh_reference,
                after_publish=self._check_sync,
            )
            model = self.trainer.export(self.checkpointer, self.tokenizer)
        except BaseException:
            torchrl_logger.warning(f"The run ended early. What it did lies in {self.directory}.{self._go_on()}")
            raise
        finally:
            report = write_report(self.directory)
        summary = summarize(self.directory)
        self.console.finish(
            summary,
            {
                "report": report,
                "curves": self.directory / "curves.png",
                "metrics": self.directory / "metrics.jsonl",
                "samples": self.directory / "samples.jsonl",
                "checkpoints": self.checkpointer.directory,
                "model": model,
            },
        )
        return summary

    def _go_on(self) -> str:
        """How the run goes on from its last checkpoint, in words."""
        path = self.checkpointer.latest() or (self.resume.path if self.resume is not None else None)
        return f" It goes on with train.resume={path}" if path is not None else ""

    def _refresh_reference(self) -> None:
        """Gives the reference model the trained weights, every ``ref_model.refresh_every`` steps."""
        version, every = self.trainer.version, self.config.ref_model.refresh_every
        if every is not None and version and version % every == 0:
            self.parts.refresh_reference()

    def _check_sync(self) -> dict[str, float]:
        """Scores a few sampled tokens with engine and trainer, if that is wanted; a large difference ends the run."""
        if not self.config.inference_model.check_sync:
            return {}
        mean, largest = self.parts.sync_mismatch()
        limit = self.config.inference_model.check_sync_tolerance
        if not mean <= limit:
            raise RuntimeError(
                f"after a weight sync, log-probs of engine and trainer differ by {mean:.3g} on average "
                f"({largest:.3g} at most), more than inference_model.check_sync_tolerance={limit}: the engine does not "
                "have the trainer's weights."
            )
        return {"sync/mismatch_mean": mean, "sync/mismatch_max": largest}

    def close(self) -> None:
        """Ends engine, files and terminal output. May be called again."""
        self.resources.close()


def prepare(config: GRPOConfig, cluster: Cluster | None = None, resume: Resume | None = None) -> Blueprint:
    """Checks everything that needs no weights: logging, devices, data, tokenizer, context.

    Args:
        config: validated.
        cluster: the one at ``ray.address``, whose accelerators are used; without, those of this machine are.
        resume: the checkpoint to go on from.

    Raises:
        ConfigError: a rule is broken; the message names field, rule, value and fix.
    """
    with _as_config_errors():
        return _prepare(config, available_accelerators() if cluster is None else cluster.accelerators(), resume)


@contextmanager
def _as_config_errors() -> Iterator[None]:
    """What a part refuses is the user's to mend, so it ends as one line; the traceback goes to the debug log."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        torchrl_logger.debug("refused while building", exc_info=True)
        raise ConfigError(str(error)) from error


def _prepare(config: GRPOConfig, accelerators: Sequence[torch.device], resume: Resume | None) -> Blueprint:
    env, inference = config.env, config.inference_model
    if "VLLM_USE_V1" in os.environ:
        torchrl_logger.info("VLLM_USE_V1 has no effect: vLLM's V0 engine is gone, and V1 is the only one left.")
    make_loss(config, TensorDictModule(torch.nn.Identity(), [keys.FULL], [("cur_log_probs", "full")]))
    batch_transforms(config)
    wandb_mode: Any = config.logging.wandb.mode
    check_logging(tensorboard=config.logging.tensorboard, wandb_mode=wandb_mode)
    own_reference = config.needs_reference and not config.train_model.lora.enabled
    requests = {
        role: RoleRequest(node.num_devices, node.devices)
        for role, node in (("train", config.train_model), ("inference", inference), ("reference", config.ref_model))
    }
    plan = plan_devices(
        requests,
        accelerators,
        needs_reference=own_reference,
        tensor_parallel_size=inference.tensor_parallel_size,
        cluster=config.ray.address,
    )
    if inference.backend == "vllm":
        from torchrl_grpo.generation.vllm import require_vllm

        require_vllm()
    task = make_task(env.dataset, dataset_path=env.dataset_path, difficulty=env.difficulty)
    if env.max_turns > 1 and type(task).next_turn is Task.next_turn:
        raise ConfigError(
            f"env.max_turns={env.max_turns} must be 1 with env.dataset={env.dataset}, whose dialogs end after the "
            "policy's first turn: leave it out."
        )
    workers = env.reward_workers  # the pool holds the task as it is now, without its data
    reward_pool = RewardPool(task, workers, timeout_s=env.reward_timeout_s) if workers else None
    remote_code = config.model.trust_remote_code
    model_config = loading.load_config(config.model.name, trust_remote_code=remote_code)
    tokenizer = loading.load_tokenizer(
        config.model.name, chat_template=config.model.chat_template, trust_remote_code=remote_code
    )
    loading.check_vocabulary(model_config, tokenizer, config.model.name)
    check_logits_are_plain(model_config.get_text_config())
    _check_sharding(config, len(plan.train), model_config.get_text_config())
    params = SamplingParams(
        inference.max_new_tokens,
        temperature=inference.temperature,
        stop_token_ids=loading.stop_token_ids(tokenizer, loading.load_generation_config(config.model.name)),
    )
    max_prompt_tokens = _max_prompt_tokens(config, model_config)

    make = partial(_make_env, config, task, tokenizer, max_prompt_tokens, reward_pool)
    train_env = make("train", env.num_envs, env.repeats)
    if resume is not None:
        train_env.load_state_dict(resume.source["env"])
    num_test, k = min(config.evaluation.num_prompts, len(task.problems("test"))), config.evaluation.k
    greedy_env = make("test", num_test, 1) if num_test else None
    if greedy_env is not None and greedy_env.num_problems < num_test:  # some prompts were too long
        num_test = greedy_env.num_problems
        greedy_env = make("test", num_test, 1)
    return Blueprint(
        config=config,
        plan=plan,
        task=task,
        tokenizer=tokenizer,
        model_config=model_config,
        params=params,
        max_prompt_tokens=max_prompt_tokens,
        reward_pool=reward_pool,
        train_env=train_env,
        greedy_env=greedy_env,
        sampled_env=make("test", num_test * k, k) if num_test and k else None,
        resume=resume,
    )


def _make_env(
    config: GRPOConfig,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    reward_pool: RewardPool | None,
    split: Split,
    num_envs: int,
    repeats: int,
) -> LLMEnv:
    return LLMEnv(
        task,
        tokenizer,
        num_envs=num_envs,
        repeats=repeats,
        split=split,
        max_prompt_tokens=max_prompt_tokens,
        max_turns=config.env.max_turns,
        seed=config.seed if split == "train" else 0,  # all runs are tested on the same problems
        reward_pool=reward_pool,
    )


def make_env(blueprint: Blueprint, split: Split, num_envs: int, repeats: int) -> LLMEnv:
    """An environment like those of the blueprint, of another size."""
    parts = (blueprint.config, blueprint.task, blueprint.tokenizer, blueprint.max_prompt_tokens)
    return _make_env(*parts, blueprint.reward_pool, split, num_envs, repeats)


def _check_sharding(config: GRPOConfig, devices: int, model_config: PretrainedConfig) -> None:
    """The rules of ``shard_model``, before anything is loaded."""
    train = config.train_model
    size = train.tensor_parallel_size
    if devices % size:
        raise ConfigError(
            f"train_model.tensor_parallel_size={size} must divide the trainer's devices, which are {devices}: use "
            f"train_model.num_devices={-(-devices // size) * size}, or leave it out."
        )
    heads = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
    if heads % size:
        raise ConfigError(
            f"train_model.tensor_parallel_size={size} must divide the model's {heads} key and value heads: use "
            f"{max(fits for fits in range(1, size) if heads % fits == 0)}."
        )
    if size > 1 and train.lora.enabled:
        raise ConfigError(
            f"train_model.tensor_parallel_size={size} must be 1 with train_model.lora.enabled=true: leave it out, and "
            "the model is sharded over all devices."
        )
    if train.cpu_offload and devices == 1:
        raise ConfigError(
            "train_model.cpu_offload=true needs a model that is sharded, but the trainer has 1 device: use "
            "train_model.num_devices=2 or more, or train_model.gradient_checkpointing=true to save memory."
        )


def _make(field: str, node: dict[str, Any], base: type[Any], *args: Any, **settings: Any) -> Any:
    """An object of the class that ``_target_`` names, one of the package's or the user's own.

    Args:
        field: the node's dotted name.
        node: ``_target_`` and further arguments.
        base: what the class must derive from.
        *args: first arguments.
        **settings: arguments that follow from other fields.

    Raises:
        ConfigError: there is no such class, or it does not take the arguments.
    """
    name = node.get("_target_")
    try:
        made = instantiate({**node, "_partial_": True}, _convert_="all")
    except Exception as error:  # whatever importing the user's module may raise
        raise ConfigError(
            f"{field}._target_={name} must name a class that can be imported ({error.__cause__ or error}): use "
            f"{base.__module__}.{base.__name__}, or put the folder of yours on PYTHONPATH."
        ) from error
    if not (isinstance(made, partial) and isinstance(made.func, type) and issubclass(made.func, base)):
        raise ConfigError(
            f"{field}._target_={name} must be a subclass of {base.__name__}: derive it from {base.__module__}."
        )
    try:
        return made.func(*args, **settings, **made.keywords)
    except TypeError as error:
        raise ConfigError(
            f"{field}={node} must be _target_ and arguments that it takes beside those of other fields ({error}): use "
            f"{' '.join(f'~{field}.{key}' for key in made.keywords) or '**kwargs in your __init__'}."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{field}._target_={name} was refused: {error}") from error


def _max_prompt_tokens(config: GRPOConfig, model_config: PretrainedConfig) -> int:
    """The longest prompt that leaves room for a whole response."""
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None) or 2**31
    if config.inference_model.max_model_len is not None:
        context = min(context, config.inference_model.max_model_len)
    room = context - config.inference_model.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"inference_model.max_new_tokens={config.inference_model.max_new_tokens} must leave room for a prompt in "
            f"the context of {context} tokens: use {context // 2} or less."
        )
    return min(room, config.env.max_prompt_tokens or room)


def build(config: GRPOConfig, directory: str | os.PathLike[str], *, asynchronous: bool = False) -> Run:
    """Makes a run: checks, shows the plan, loads the models, starts the engine.

    Args:
        config: validated.
        directory: where the run's files go.
        asynchronous: whether sampling and training overlap. They are then processes on Ray, as they are where a role
            has several devices or ``ray.address`` names a cluster.

    Raises:
        ConfigError: a rule is broken, before any weights are loaded.
    """
    transformers_logging.disable_progress_bar()  # it would write over the run's own
    max_staleness = _max_staleness(config, asynchronous)
    directory = Path(directory)
    saved = plain(config)
    wandb_mode: Any = config.logging.wandb.mode
    with _as_config_errors(), ExitStack() as resources:
        cluster, resume = None, find_resume(config, saved, max_staleness)
        if config.ray.address is not None:
            from torchrl_grpo.distributed.cluster import start

            cluster = start(config.ray.address)  # first, because the plan is made of its accelerators
            resources.callback(cluster.shutdown)
        blueprint = prepare(config, cluster, resume)
        distributed = asynchronous or cluster is not None or blueprint.plan.distributed
        if distributed:
            from torchrl_grpo.build_distributed import check_distributed, distributed_parts

            check_distributed(blueprint, cluster)
        elif config.inference_model.in_flight != "wait":
            raise ConfigError(
                f"inference_model.in_flight={config.inference_model.in_flight} must be wait where sampling and "
                "training take turns in one process: leave it out, or use sota/grpo/grpo-async.py."
            )
        elif config.inference_model.weight_transfer != "auto":
            raise ConfigError(
                f"inference_model.weight_transfer={config.inference_model.weight_transfer} must be auto where "
                "trainer and engine are in one process, which needs no choice: leave it out, or use "
                "sota/grpo/grpo-async.py."
            )
        console = resources.enter_context(Console())
        console.plan(plan_rows(blueprint))
        console.geometry(geometry_rows(blueprint))
        logging = config.logging
        logger = resources.enter_context(
            MetricsLogger(
                directory,
                tensorboard=logging.tensorboard,
                wandb_mode=wandb_mode,
                project=logging.wandb.project,
                name=logging.wandb.name,
                config=saved,
            )
        )
        if resume is not None:
            console.resume(resume.step, resume.path)
            logger.truncate(resume.step + 1)  # what this run's folder has of later steps is done again
        random.seed(config.seed)
        torch.manual_seed(config.seed)
        parts: LocalParts | DistributedParts
        if distributed:
            parts = distributed_parts(blueprint, max_staleness, resources, directory, cluster)
        else:
            parts = local_parts(blueprint, resources)
        return Run(
            config=config,
            directory=directory,
            parts=parts,
            checkpointer=Checkpointer(directory / "checkpoints", saved),
            logger=logger,
            console=console,
            tokenizer=blueprint.tokenizer,
            resources=resources.pop_all(),
            resume=resume,
        )


def _max_staleness(config: GRPOConfig, asynchronous: bool) -> int:
    asked = config.train.max_staleness
    if asked and not asynchronous:
        raise ConfigError(
            f"train.max_staleness={asked} must be 0 in grpo.py, which trains on what the current weights sampled: use "
            "sota/grpo/grpo-async.py, or leave it out."
        )
    return (1 if asynchronous else 0) if asked is None else asked


def local_parts(blueprint: Blueprint, resources: ExitStack) -> LocalParts:
    """The roles in this process; what must be ended is put into ``resources``."""
    config = blueprint.config
    trainer = make_trainer(blueprint)
    engine = make_engine(blueprint)
    resources.callback(engine.close)
    engine.seed(config.seed)
    if blueprint.reward_pool is not None:
        resources.callback(blueprint.reward_pool.close)
    collector = RolloutCollector(
        blueprint.train_env,
        GenerationPolicy(engine, blueprint.params),
        dialog_turns_per_batch=config.dialog_turns_per_batch,
        dynamic_sampling=config.policy.dynamic_sampling,
        max_sampling_rounds=config.policy.max_sampling_rounds,
    )
    resources.callback(collector.shutdown)
    transforms: list[Any] = []
    reference = None
    if config.needs_reference:
        reference = make_reference(blueprint, trainer.model)
        transforms.append(("reference", reference))
    transforms += batch_transforms(config)
    source = LocalSource(collector, transforms, colocated=blueprint.plan.colocated, reward_pool=blueprint.reward_pool)
    evaluator = None
    if blueprint.greedy_env is not None:
        evaluator = Evaluator(engine, blueprint.greedy_env, blueprint.sampled_env, params=blueprint.params)
    if blueprint.resume is not None:
        restore_trainer(trainer, blueprint.resume)
        source.load_state_dict(blueprint.resume.source)
    return LocalParts(trainer, source, evaluator, reference, blueprint.train_env.first_prompts(4))


def make_loss(config: GRPOConfig, actor_network: TensorDictModuleBase) -> GRPOLoss:
    """The loss that the config names, around an actor network.

    Raises:
        ConfigError: the class does not take these settings.
        ValueError: a setting is out of its range.
    """
    policy = config.policy
    proximal = policy.proximal
    if policy.proximal == "recomputed" and config.optim_steps_per_batch == 1:
        proximal = "current"  # the same values, without a forward pass of their own
    loss: GRPOLoss = _make(
        "policy.loss",
        policy.loss,
        GRPOLoss,
        actor_network,
        clip_epsilon=config.clip_epsilon,
        ratio_level=policy.ratio_level,
        aggregation=policy.aggregation,
        constant_length=policy.constant_length or config.max_response_tokens,
        dual_clip=policy.dual_clip,
        proximal=proximal,
        behaviour_weight=policy.behaviour_weight,
        behaviour_level=policy.behaviour_level,
        behaviour_cap=policy.behaviour_cap,
        mask_truncated=policy.mask_truncated,
        kl_estimator=config.kl_estimator,
        kl_to_ref_coeff=0.0 if policy.kl_in_reward else policy.kl_coef,
        kl_to_inference_coeff=policy.kl_to_behaviour_coef,
        entropy_coeff=policy.entropy_coef,
    )
    return loss


def batch_transforms(config: GRPOConfig) -> list[tuple[str, Transform]]:
    """What makes advantages of the rewards of a whole batch, after reference scoring, in order."""
    policy, shaping, settings = config.policy, [], {}
    if config.shapes_reward:
        longest = config.max_response_tokens
        transform = RewardShaping(
            scale=policy.reward_scale,
            bias=policy.reward_bias,
            clip=None if policy.reward_clip is None else (policy.reward_clip[0], policy.reward_clip[1]),
            overlong_buffer=max(1, round(policy.overlong_buffer * longest)) if policy.overlong_buffer else 0,
            max_response_tokens=longest,
            kl_coef=policy.kl_coef if policy.kl_in_reward else 0.0,
            kl_estimator=config.kl_estimator,
        )
        shaping = [("shaping", transform)]
        if policy.advantage_level == "sequence":
            settings = {"reward_key": keys.SHAPED_REWARD}
    advantage = _make(
        "policy.advantage",
        policy.advantage,
        GroupAdvantage,
        repeats=config.env.repeats,
        mean=policy.advantage_mean,
        std=policy.advantage_std,
        level=policy.advantage_level,
        gamma=policy.gae_gamma,
        lmbda=policy.gae_lambda,
        **settings,
    )
    return [*shaping, ("advantage", advantage)]


def _load(blueprint: Blueprint, dtype: str, device: torch.device) -> Any:
    model = blueprint.config.model
    return loading.load_model(
        model.name,
        dtype=getattr(torch, dtype),
        device=device,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
    )


def make_trainer(blueprint: Blueprint, mesh: DeviceMesh | None = None) -> GRPOTrainer:
    """The trainer with its model, loss and optimizer; the model is sharded over the ranks of a mesh."""
    config = blueprint.config
    device = blueprint.plan.train[0]
    # Sharding moves the model to its device layer by layer: it need not fit there as a whole.
    at_first = device if mesh is None else torch.device("cpu")
    model: nn.Module = _load(blueprint, config.train_model.dtype, at_first)
    lora = config.train_model.lora
    if lora.enabled:
        names = lora.target_modules
        targets: str | list[str] = "all-linear" if names == ["all-linear"] else names
        model = loading.add_lora(model, r=lora.r, alpha=lora.alpha, target_modules=targets)
    if config.train_model.gradient_checkpointing:
        loading.enable_gradient_checkpointing(model)
    if mesh is not None:
        shard_model(model, mesh, param_dtype=autocast_dtype(config), cpu_offload=config.train_model.cpu_offload)
    loss = make_loss(config, TokenScorer(model, temperature=config.inference_model.temperature))
    for name, buffer in loss.named_buffers(recurse=False):  # the model is where it belongs
        setattr(loss, name, buffer.to(device))
    settings = config.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = {
        "params": [parameter for parameter in trained if parameter.ndim > 1],
        "weight_decay": settings.weight_decay,
    }
    vectors = {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(
        [group for group in (matrices, vectors) if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=device.type == "cuda" and not config.train_model.cpu_offload,
    )
    scheduler = None
    if settings.warmup_steps:
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / settings.warmup_steps)
        )
    return GRPOTrainer(
        loss,
        model,
        optimizer,
        scheduler=scheduler,
        optim_batch_size=config.optim_batch_size,
        epochs=config.train.epochs,
        micro_batch_tokens=config.train.micro_batch_tokens,
        autocast_dtype=autocast_dtype(config),
        clip_grad_norm=settings.clip_grad_norm,
        max_nonfinite_steps=config.train.max_nonfinite_steps,
    )


def autocast_dtype(config: GRPOConfig) -> torch.dtype | None:
    """What the training step computes in; None is the dtype of the weights."""
    return {"full": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.train.mixed_precision]


def make_engine(blueprint: Blueprint) -> Engine:
    """The generation engine with its model."""
    config, plan = blueprint.config.inference_model, blueprint.plan
    if config.backend == "transformers":
        from torchrl_grpo.generation.transformers import TransformersEngine

        return TransformersEngine(_load(blueprint, config.dtype, plan.inference[0][0]), copy=False)
    from torchrl_grpo.generation.vllm import VLLMEngine

    return VLLMEngine(
        loading.resolve_name(blueprint.config.model.name),
        device=plan.inference[0][0],
        dtype=config.dtype,
        max_model_len=config.max_model_len or blueprint.max_prompt_tokens + config.max_new_tokens,
        seed=blueprint.config.seed,
        gpu_memory_utilization=config.gpu_memory_utilization or (0.4 if plan.colocated else 0.9),
        kv_cache_gib=config.kv_cache_gib,
        enforce_eager=config.enforce_eager,
        trust_remote_code=blueprint.config.model.trust_remote_code,
        enable_sleep=plan.colocated,
    )


def reference_scorer(blueprint: Blueprint, trained: nn.Module | None) -> TokenScorer:
    """The reference model; with LoRA the trained one with its adapters off."""
    config = blueprint.config
    temperature = config.inference_model.temperature
    if config.train_model.lora.enabled:
        assert trained is not None
        return AdapterOffScorer(trained, temperature=temperature)
    model = _load(blueprint, config.ref_model.dtype, blueprint.plan.reference[0])
    return TokenScorer(model.requires_grad_(False), temperature=temperature)


def make_reference(blueprint: Blueprint, trained: nn.Module | None) -> KLScoring:
    """What scores the tokens under the reference policy, in passes as large and as precise as the trainer's."""
    config = blueprint.config
    return KLScoring(
        reference_scorer(blueprint, trained),
        max_tokens=config.train.micro_batch_tokens,
        autocast_dtype=autocast_dtype(config),
    )


def plan_rows(blueprint: Blueprint) -> list[dict[str, Any]]:
    """The device plan: a row a role, with what its weights (and the optimizer's state) take on one device."""
    config, plan = blueprint.config, blueprint.plan
    count = loading.count_parameters(blueprint.model_config, config.model.attn_implementation)
    lora = config.train_model.lora.enabled
    ranks = [(device,) for device in plan.train]
    copies = 1 if lora else 4  # weights, gradients and Adam's two moments
    # Of each role: its devices in groups, and how many times the model's weights one device holds.
    roles = [
        ("train (LoRA)" if lora else "train", ranks, config.train_model.dtype, copies / len(ranks)),
        (
            f"inference ({config.inference_model.backend})",
            plan.inference,
            config.inference_model.dtype,
            1 / len(plan.inference[0]),
        ),
    ]
    if plan.reference:
        roles.append(("reference", [(device,) for device in plan.reference], config.ref_model.dtype, 1))
    elif config.needs_reference:
        roles.append(("reference (adapters off)", ranks, config.train_model.dtype, 0))
    return [
        {
            "role": role,
            "devices": _listed(devices),
            "dtype": dtype,
            "parameters": count,
            "memory per device": math.ceil(count * getattr(torch, dtype).itemsize * share),
        }
        for role, devices, dtype, share in roles
    ]


def _listed(groups: Sequence[Sequence[torch.device]]) -> str:
    """Devices as ``cuda:0, cuda:1``, those of a tensor-parallel replica as ``cuda:0+cuda:1``, CPU processes counted."""
    names = ["+".join(map(str, group)) for group in groups]
    if len(names) > 1 and len(set(names)) == 1:
        return f"{len(names)} x {names[0]}"
    return ", ".join(names)


def geometry_rows(blueprint: Blueprint) -> list[dict[str, Any]]:
    """The batch geometry: what one step and the whole run consist of."""
    config = blueprint.config
    batch, steps = config.dialog_turns_per_batch, config.num_batches
    tokens = batch * config.inference_model.max_new_tokens
    per_step = {
        "sequences": batch,
        f"groups of {config.env.repeats}": batch // config.env.repeats,
        "optimizer steps": config.optim_steps_per_batch,
        "response tokens, at most": tokens,
    }
    rows: list[dict[str, Any]] = [{"quantity": "steps (weight syncs)", "per step": 1, "whole run": steps}]
    return rows + [
        {"quantity": name, "per step": value, "whole run": value * steps} for name, value in per_step.items()
    ]

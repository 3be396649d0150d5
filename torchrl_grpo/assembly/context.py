"""``Context``: what is known of a run before its weights load."""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torchrl import torchrl_logger
from torchrl.envs import Transform, TransformedEnv
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from torchrl_grpo.assembly.components import make_component
from torchrl_grpo.assembly.estimates import Images
from torchrl_grpo.assembly.geometry import Geometry
from torchrl_grpo.assembly.tasks import check_tests, dataset_names, read_task
from torchrl_grpo.checks import GENERATED, check_multiple, context_length
from torchrl_grpo.collectors.teacher_prompts import TeacherPrompts
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.engines import ENGINES, engines_with
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.generation.base import AdapterSlots, EngineRequest, SamplingParams, engine_class
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.objects import OBJECTS, check_objects
from torchrl_grpo.images import images_in, images_of
from torchrl_grpo.images.encoder import ImageEncoder
from torchrl_grpo.images.families import family_of
from torchrl_grpo.learner.resume import Resume
from torchrl_grpo.models import loading
from torchrl_grpo.models.memory import Shape
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.runtime.placement import DevicePlan
from torchrl_grpo.tasks.base import Split, Task
from torchrl_grpo.weights.named import adapted_layers

_BETWEEN_TURNS = 1024
"""Allowance for the tokens that each reply to the policy adds to a dialog."""
_NUM_PROMPTS = 100
"""Number of prompts from which the longest one is estimated."""


class ModelFiles(NamedTuple):
    """A model without its weights."""

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]

    @property
    def context(self) -> int:
        """Maximum number of tokens of a sequence."""
        return context_length(self.config)


class EvaluationEnvs(NamedTuple):
    """Environments of the test split, for pass@1 and pass@k."""

    greedy: LLMEnv
    sampled: LLMEnv | None


@dataclass
class Context:
    """Facts about a run that are known before its weights load, each computed on first access.

    ``prepare`` computes them in the order in which problems are to be reported. Actors get the
    driver's context with its facts, so that all processes draw the same problems and only the
    driver needs the data. ``dataclasses.replace`` forgets the facts.

    Attributes:
        config: validated. No fact may depend on the run's length, which ``prepare`` fills in.
        plan: devices of the roles.
        resume: checkpoint to resume.
        folder: the run's folder, for logs of its processes.
        max_staleness: bound on the staleness.
        distributed: whether each role has its own process.
        turns: whether engines share devices with other roles, and release them while those work.
        teacher_shape: shape of the largest teacher.
        teacher_prompts: writes the prompts that the teacher reads in place of the policy's.
        objects: objects that the config names; see ``host.objects.OBJECTS``.
    """

    config: GRPOConfig
    plan: DevicePlan
    resume: Resume | None = None
    folder: Path | None = None
    max_staleness: int = 0
    distributed: bool = False
    turns: bool = False
    teacher_shape: Shape | None = None
    teacher_prompts: TeacherPrompts | None = None
    objects: dict[str, Any] = field(default_factory=OBJECTS.copy)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        OBJECTS.update(self.objects)  # in an actor

    def make(self, *facts: str) -> None:
        """Compute these facts now, in this order."""
        for fact in facts:
            getattr(self, fact)

    def without_tests(self) -> Context:
        """Return the same facts without the test split, for roles that do not evaluate."""
        context = copy(self)
        context.tests = None
        return context

    @cached_property
    def task(self) -> Task:
        """The task, with its training data."""
        return read_task(self.config)

    @cached_property
    def model(self) -> ModelFiles:
        """The model's files."""
        return describe_model(self.config)

    @cached_property
    def shape(self) -> Shape:
        """Sizes of the model."""
        return loading.shape_of(self.on_meta)

    @cached_property
    def adapter_slots(self) -> AdapterSlots | None:
        """Slots for the adapters that engines keep separate from their base weights. None if engines
        get whole weights: without LoRA, with a quantized base model, if the engine cannot hold
        adapters, or if some adapters are not on linear layers.
        """
        train, engine = self.config.train_model, self.config.inference_model
        on_cpu = self.plan.inference[0][0].type == "cpu"
        dtypes = ENGINES[engine.backend].adapters
        has_experts = self.shape.active < self.shape.parameters  # vLLM needs a GPU for these
        fits = dtypes and not has_experts if on_cpu else engine.dtype in dtypes
        if not (fits and train.lora.enabled and not train.quantization):
            return None
        layers = adapted_layers(self.on_meta)
        if not (
            all(isinstance(layer.get_base_layer(), nn.Linear) for layer in layers.values())
            and engine_class(engine.backend).takes_adapters(self)
        ):
            return None
        modules = {name.removesuffix(".weight").rpartition(".")[2] for name in layers}
        rank = max(layer.r["default"] for layer in layers.values())
        return AdapterSlots(rank, tuple(sorted(modules)))

    @property
    def on_meta(self) -> nn.Module:
        """The model with its adapters, without allocating any weights."""
        model = self.config.model
        return loading.on_meta(
            self.model.config,
            model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
            **self.config.train_model.lora.options,
        )

    @cached_property
    def params(self) -> SamplingParams:
        """How the policy samples."""
        inference, model = self.config.inference_model, self.model
        return SamplingParams(
            inference.max_new_tokens,
            temperature=inference.temperature,
            top_p=inference.top_p,
            top_k=inference.top_k,
            min_p=inference.min_p,
            return_kept=inference.top_k > 0,
            return_kept_log_probs=self.config.policy.score_centering,
            stop_token_ids=model.stop_token_ids,
            stop=StopStrings(inference.stop, model.tokenizer) if inference.stop else None,
        )

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum number of tokens of a prompt and everything after it."""
        return self.config.inference_model.max_model_len or self.model.context

    @cached_property
    def prompt_tokens(self) -> tuple[int, int]:
        """Maximum length of a prompt that leaves room for a whole response: of a problem, and of a
        dialog's last turn.

        Raises:
            ConfigError: there is no room.
        """
        inference, env = self.config.inference_model, self.config.env
        longest = inference.max_model_len
        if longest is not None and longest > self.model.context:
            raise ConfigError(
                f"inference_model.max_model_len={longest} must not exceed the model's context of "
                f"{self.model.context} tokens: use {self.model.context} or less, or leave it out."
            )
        context = self.max_sequence_tokens
        room = context - inference.max_new_tokens
        room -= bool(self.config.teacher_addresses)  # a teacher on a server samples one more token
        if room < 1:
            raise ConfigError(
                f"inference_model.max_new_tokens={inference.max_new_tokens} must leave room for a "
                f"prompt in the context of {context} tokens: use {context // 2} or less."
            )
        first = min(room, env.max_prompt_tokens or room)
        turns = (env.max_turns - 1) * (inference.max_new_tokens + _BETWEEN_TURNS)
        return first, min(room, first + turns)

    @property
    def engine_request(self) -> EngineRequest:
        """The engine to make, with the path of its model on this machine."""
        config = self.config
        return EngineRequest(
            name=config.model.source,
            path=loading.resolve_name(config.model.source),
            model_config=self.model.config,
            options=config.inference_model,
            max_dialog_tokens=self.prompt_tokens[1],
            seed=config.seed,
            trust_remote_code=config.model.trust_remote_code,
            on_cpu=self.plan.inference[0][0].type == "cpu",
            colocated=self.plan.colocated,
            num_sequences=-(-config.env.num_envs // len(self.plan.inference)),
            trains=not config.only_evaluates,
            slots=self.adapter_slots,
            folder=self.folder,
        )

    @cached_property
    def has_images(self) -> bool:
        """Whether to prepare for images in prompts: some have images, or replies of tasks,
        environments, tools or agents may show them.

        Raises:
            ConfigError: there are images, but the config has something that does not work with
                them.
        """
        env = self.config.env
        refusal = _images_refusal(self.config, len(self.plan.train))
        if _has_images(self.config, self.task):
            if refusal:
                raise ConfigError(refusal)
            return True
        if refusal or family_of(self.model.config) is None:
            return False
        # Most show text. An image that cannot be read is an error for the policy, or for the agent.
        replies = env.own_task is not None and self.task.multi_turn and env.player is None
        if replies or env.environment is not None:
            return True
        shows = bool(env.tools) or env.player is not None
        return shows and not self.config.needs_teacher

    @cached_property
    def image_encoder(self) -> ImageEncoder | None:
        """Encoder of the images of prompts; None without images.

        Raises:
            ValueError: the model reads no images, but prompts have some.
        """
        if not self.has_images:
            return None
        try:
            encoder = loading.load_image_encoder(
                self.config.model.source, self.model.config, self.model.tokenizer
            )
        except ValueError as error:
            if _has_images(self.config, self.task):
                raise
            torchrl_logger.warning("The run continues without images: %s", error)
            return None
        encoder.max_pixels = self.config.env.max_image_pixels
        return encoder

    @cached_property
    def reward_pool(self) -> RewardPool | None:
        """The reward workers; None if the environments score in their own process."""
        env = self.config.env
        workers = env.reward_workers or (1 if env.tools or self.task.is_stateful else 0)
        if not workers:
            return None
        check_objects()
        return RewardPool(self.task, workers, timeout_s=env.reward_timeout_s)

    def make_env(self, **settings: Any) -> LLMEnv:
        """Make an environment of the task; for ``settings`` see ``LLMEnv``."""
        max_prompt_tokens, max_dialog_tokens = self.prompt_tokens
        return LLMEnv(
            self.task,
            self.model.tokenizer,
            max_prompt_tokens=max_prompt_tokens,
            max_dialog_tokens=max_dialog_tokens,
            max_turns=self.config.env.max_turns,
            reward_pool=self.reward_pool,
            template_arguments=self.config.env.chat_template_kwargs,
            image_encoder=self.image_encoder,
            **settings,
        )

    @cached_property
    def train_env(self) -> LLMEnv:
        """The environments of the training split."""
        env = self.config.env
        train_env = self.make_env(num_envs=env.num_envs, repeats=env.repeats, seed=self.config.seed)
        drawing = train_env.drawing
        drawing.difficulty_filter = env.difficulty_filter
        if env.sampling == "pass_rate":
            drawing.pass_rate = (env.sampling_target, env.sampling_floor)
        if env.curriculum is not None:
            drawing.follow(env.curriculum)
        return train_env

    @cached_property
    def tests(self) -> EvaluationEnvs | None:
        """The environments of the test split; None without evaluations. All runs evaluate the same
        problems.
        """
        evaluation = self.config.evaluation
        limit, k = evaluation.num_prompts, evaluation.k
        if not limit:
            return None
        problems = self.task.problems("test")
        check_tests(self.task, problems)
        count = min(limit, len(problems))
        greedy = self.make_env(num_envs=count, repeats=1, split="test")
        names = dataset_names(evaluation.datasets or (), "evaluation.datasets")
        prompts = greedy.prompts
        datasets = [prompts.problems[index].dataset for index in prompts.usable]
        sizes = Counter(name if name in names else "" for name in datasets)
        # Some prompts may be too long, or there are several test sets. Their problems alternate, so
        # the first ones have the same number of each set.
        needed = sum(min(limit, size) for size in sizes.values())
        if needed != count:
            greedy = self.make_env(num_envs=needed, repeats=1, split="test")
        sampled = self.make_env(num_envs=needed * k, repeats=k, split="test") if k else None
        return EvaluationEnvs(greedy, sampled)

    def transformed(self, env: LLMEnv | None) -> Any:
        """Return an environment with new instances of the config's transforms."""
        nodes = [
            (f"env.transforms[{index}]", node)
            for index, node in enumerate(self.config.env.transforms)
        ]
        if env is None or not nodes:
            return env
        transforms = [make_component(name, node, Transform) for name, node in nodes]
        return TransformedEnv(env, load_extra("history_transforms")(*transforms))

    @cached_property
    def geometry(self) -> Geometry:
        """How the samplers play a batch. In one process a rollout task is the whole batch. On Ray an
        engine that takes turns with other roles gets its whole share of the batch, a concurrent
        engine plays any number of groups with continuous batching, and any other engine plays one
        static batch at a time.

        Raises:
            ValueError: ``env.num_envs`` cannot be divided into whole groups.
        """
        config, samplers = self.config, len(self.plan.inference)
        rows, repeats, engine = config.env.num_envs, config.env.repeats, config.inference_model
        what = f"env.repeats={repeats} times the {samplers} samplers of the inference model"
        check_multiple("env.num_envs", rows, samplers * repeats, what)
        groups = rows // samplers // repeats
        batch = config.groups_per_batch // samplers
        if not self.distributed:
            return Geometry(samplers, groups, batch, 1, waits=True)
        concurrent = ENGINES[engine.backend].concurrent
        if self.max_staleness and self.reward_pool is not None and not concurrent:
            # While one task is scored, the engine samples others, up to the staleness bound, and
            # weights may arrive in between.
            return Geometry(samplers, groups, groups, self.max_staleness + 1, waits=False)
        sizes = (batch, 1) if self.turns else (1, groups) if concurrent else (groups, 1)
        waits = engine.in_flight == "wait" and not (concurrent and self.adapter_slots)
        return Geometry(samplers, groups, *sizes, waits=waits)

    @cached_property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest of the first prompts."""
        return max(map(len, self.train_env.prompts.first(_NUM_PROMPTS)))

    @cached_property
    def images(self) -> Images | None:
        """Images of the run, estimated from its first prompts; None without images."""
        if self.image_encoder is None:
            return None
        prompts = self.train_env.prompts.first(_NUM_PROMPTS)
        each = [[span.image for span in images_of(prompt)] for prompt in prompts]
        return Images(
            tokens=max(sum(image.num_features for image in images) for images in each),
            pixels=sum(image.nbytes for images in each for image in images) / len(each),
            problems=self.train_env.num_problems,
        )


def describe_model(config: GRPOConfig) -> ModelFiles:
    """Read everything about a config's model except its weights.

    Raises:
        ValueError: one of them cannot be read, or they do not match.
    """
    name, remote_code = config.model.source, config.model.trust_remote_code
    arguments = config.train_model.model_kwargs or {}
    loading.check_model_kwargs(arguments, loading.load_config(name, trust_remote_code=remote_code))
    model_config = loading.load_config(name, trust_remote_code=remote_code, arguments=arguments)
    tokenizer = loading.load_tokenizer(**config.model.tokenizer_arguments)
    loading.check_vocabulary(model_config, tokenizer, name)
    stops = loading.stop_token_ids(tokenizer, loading.load_generation_config(name))
    return ModelFiles(model_config, tokenizer, stops)


def _has_images(config: GRPOConfig, task: Task) -> bool:
    """Return whether prompts have images: a column is set for them, or a task's problem has some."""
    has_own_task = config.env.own_task is not None
    data = [config.env, *(config.env.datasets or ()), *(config.evaluation.datasets or ())]
    if any(entry.columns.images is not None for entry in data):
        return True
    if not has_own_task and not any(entry.dataset in GENERATED for entry in data):
        return False  # rows without a column of images
    splits: tuple[Split, ...] = ("train", "test") if config.evaluation.num_prompts else ("train",)
    problems = chain.from_iterable(map(task.problems, splits))
    return any(images_in(task.messages(problem)) for problem in problems)


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

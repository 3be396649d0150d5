"""The whole config, and what follows from its keys together. Each node has a file with its keys,
their defaults and rules; ``config/*.yaml`` starts from the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torchrl_grpo import checks
from torchrl_grpo.checks import check_clip_epsilon
from torchrl_grpo.config.critic import CriticConfig
from torchrl_grpo.config.data import DatasetConfig
from torchrl_grpo.config.engine import InferenceModelConfig
from torchrl_grpo.config.env import EnvConfig
from torchrl_grpo.config.fields import leaves, limited
from torchrl_grpo.config.measuring import EvaluationConfig, LoggingConfig
from torchrl_grpo.config.model import (
    ModelConfig,
    TrainModelConfig,
)
from torchrl_grpo.config.optimizer import OptimizerConfig
from torchrl_grpo.config.policy import PolicyConfig
from torchrl_grpo.config.reference import RefModelConfig
from torchrl_grpo.config.teacher import OWN_MODEL, TeacherConfig, TeacherEntry
from torchrl_grpo.config.train import TrainConfig
from torchrl_grpo.engines import ENGINES


@dataclass
class RayConfig:
    """The Ray cluster of a run whose roles are separate processes."""

    address: str | None = None
    """auto (the cluster of this machine or of RAY_ADDRESS) or host:port of a cluster to join, for
    grpo.py too; null starts one on this machine if the run needs one."""
    actor_timeout_s: float = limited(1800.0, gt=0)
    """Seconds within which a process must answer: load its model, play a rollout task, evaluate the
    test split, train a step. A late sampler or reference model is replaced, a late learner ends the
    run."""
    recovery_timeout_s: float = limited(900.0, gt=0)
    """Seconds for which all samplers, or all reference models, may be missing before the run ends;
    must be more than one of them needs to start."""


@dataclass
class GRPOConfig:
    """The whole config of ``sota/grpo/grpo.py``."""

    dry_run: bool = False
    """Check the run without training: report problems with fixes, and the time, disk and memory
    that it would take. Nothing is written."""
    seed: int = limited(0, ge=0, lt=2**32)
    """Seed of all random draws. docs/devices.md says what it reproduces with several samplers."""
    model: ModelConfig = field(default_factory=ModelConfig)
    train_model: TrainModelConfig = field(default_factory=TrainModelConfig)
    inference_model: InferenceModelConfig = field(default_factory=InferenceModelConfig)
    ref_model: RefModelConfig = field(default_factory=RefModelConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    teachers: list[TeacherEntry] | None = None
    """Several teachers instead of teacher.model: [{model: NAME, datasets: [math]}, ...], each for
    the data sets of env.datasets that it names. They are separate workers, which share
    teacher.num_devices."""
    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    @property
    def dialog_turns_per_batch(self) -> int:
        """Trajectories between two weight syncs."""
        return self.train.dialog_turns_per_batch or self.env.num_envs

    @property
    def optim_batch_size(self) -> int:
        """Trajectories in one optimizer step."""
        return self.train.optim_batch_size or self.dialog_turns_per_batch

    @property
    def max_response_tokens(self) -> int:
        """Maximum number of tokens that the policy samples in one trajectory."""
        return self.inference_model.max_new_tokens * self.env.max_turns

    @property
    def pass_tokens(self) -> int:
        """Maximum number of tokens in a pass of training; 1 gives each sequence its own pass."""
        return 1 if self.inference_model.exact else self.train.micro_batch_tokens

    @property
    def optim_steps_per_batch(self) -> int:
        """Optimizer steps between two weight syncs."""
        return self.dialog_turns_per_batch // self.optim_batch_size * self.train.epochs

    @property
    def num_batches(self) -> int:
        """Batches in the run; with ``train.total_epochs`` only once ``prepare`` knows the
        problems.
        """
        turns = self.train.total_dialog_turns
        return self.train.total_steps or -(-turns // self.dialog_turns_per_batch)

    @property
    def num_optim_steps(self) -> int:
        """Optimizer steps in the run."""
        return self.num_batches * self.optim_steps_per_batch

    @property
    def groups_per_batch(self) -> int:
        """Groups in a batch."""
        return self.dialog_turns_per_batch // self.env.repeats

    @property
    def only_evaluates(self) -> bool:
        """Whether nothing is trained."""
        train = self.train
        return train.total_dialog_turns == 0 and not (train.total_epochs or train.total_steps)

    @property
    def evaluates_served(self) -> bool:
        """Whether a model on servers is evaluated, and none is loaded here."""
        return self.only_evaluates and ENGINES[self.inference_model.backend].elsewhere

    @property
    def clip_epsilon(self) -> tuple[float, float]:
        """Clip range as (low, high)."""
        return check_clip_epsilon(self.policy.clip_epsilon)

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs are used."""
        return self.policy.kl_coef > 0

    @property
    def has_own_reference(self) -> bool:
        """Whether a separate model gives them; with LoRA the trained model does, with its adapters
        off, and with ``ref_model.decay`` it does with an average of its weights.
        """
        return self.needs_reference and not (self.train_model.lora.enabled or self.ref_model.decay)

    @property
    def learner_scores(self) -> bool:
        """Whether the training ranks give them."""
        return self.needs_reference and (self.ref_model.sharded or not self.has_own_reference)

    @property
    def needs_demonstrations(self) -> bool:
        """True if responses are read from the data, instead of sampled ones or in addition to
        them."""
        return self.policy.demonstrations or self.policy.sft_coef > 0

    @property
    def scores(self) -> bool:
        """False if no response is scored: demonstrations without evaluation need no reward."""
        return not self.policy.demonstrations or self.evaluation.num_prompts > 0

    @property
    def needs_teacher(self) -> bool:
        """True if a teacher scores the responses."""
        return self.policy.teacher_coef > 0

    def of_teacher(self, index: int) -> GRPOConfig:
        """Return the config for the teacher with this index, as if it were the only one."""
        if not self.teachers:
            return self
        entry = vars(self.teachers[index])
        entry = {name: value for name, value in entry.items() if name != "datasets"}
        return replace(self, teacher=replace(self.teacher, **entry), teachers=None)

    @property
    def teacher_addresses(self) -> list[str]:
        """The servers of all teachers."""
        addresses = [address for entry in self.teachers or () for address in entry.address]
        return addresses or self.teacher.address

    @property
    def num_teachers(self) -> int:
        """Number of different teachers."""
        return len(self.teachers or [None]) if self.needs_teacher else 0

    @property
    def learner_teaches(self) -> bool:
        """Whether the teacher is the trained model, as it is or with an average of its weights."""
        is_trained = self.teacher.model == OWN_MODEL and self.teacher.weights != "frozen"
        return self.needs_teacher and is_trained

    @property
    def teacher_source(self) -> str | None:
        """``name@revision`` of the teacher, as ``ModelConfig.source``."""
        return self.model.source if self.teacher.model == OWN_MODEL else self.teacher.model

    @property
    def averages(self) -> dict[str, tuple[float, int]]:
        """Averages of the trained weights, by role: their decay, and the steps between updates."""
        averages = {}
        if self.needs_reference and self.ref_model.decay:
            averages["reference"] = (self.ref_model.decay, self.ref_model.refresh_every or 1)
        if self.learner_teaches and self.teacher.weights == "ema":
            averages["teacher"] = (self.teacher.decay, 1)
        return averages

    @property
    def teacher_in_loss(self) -> float:
        """Weight of the divergence from the teacher in the loss; 0 if it is part of the
        advantage.
        """
        return self.policy.teacher_coef if self.policy.teacher_divergence != "sampled" else 0.0

    @property
    def kl_estimator(self) -> checks.KLEstimator:
        """Estimator of the KL terms."""
        chosen: Any = self.policy.kl_estimator
        return chosen or ("k1" if self.policy.kl_in_reward else "k3")

    @property
    def advantage_level(self) -> str:
        """Unit that has an advantage of its own: the sequence, each turn or each token."""
        return "turn" if self.policy.turn_credit == "per_turn" else self.policy.advantage_level

    @property
    def shapes_reward(self) -> bool:
        """Whether the advantage is made of something else than the task's reward."""
        policy = self.policy
        plain = (
            policy.reward_scale,
            policy.reward_bias,
            policy.reward_clip,
            policy.overlong_buffer,
        )
        token = self.advantage_level == "token"
        return plain != (1.0, 0.0, None, None) or policy.kl_in_reward or token


LENGTHS = ("train.total_dialog_turns", "train.total_epochs", "train.total_steps")
"""Keys for the length of a run, one of which is used."""

RETRY_PROMPT = "That answer is not right. Think again, step by step, and give another one."
"""The ``env.retry_prompt`` of ``env.reasoning=true``."""

COMPONENTS = ("policy.loss", "policy.advantage", "env.task")
"""Nodes that name a class as ``_target_``, with arguments next to it."""

LOSSES = tuple(
    f"torchrl_grpo.objectives.{name}"
    for name in (
        "CISPOLoss",
        "ClipCovLoss",
        "DemonstrationLoss",
        "GMPOLoss",
        "GRPOLoss",
        "KLCovLoss",
        "SAPOLoss",
        "SFTLoss",
        "VESPOLoss",
    )
)
ADVANTAGES = ("torchrl_grpo.transforms.GroupAdvantage",)
"""The package's own classes for ``policy.loss`` and ``policy.advantage``."""

ENTRY_FIELDS: dict[str, Any] = {name: item for name, item, _ in leaves(DatasetConfig())}
"""The dataclass field of every key of an entry of ``env.datasets``, by its dotted name."""

FIELDS: dict[str, Any] = {name: item for name, item, _ in leaves(GRPOConfig())}
"""The dataclass field of every key by its dotted name."""

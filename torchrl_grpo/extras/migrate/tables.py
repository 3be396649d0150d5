"""Tables of the five libraries, and the defaults of our own config."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, get_args

from torchrl_grpo.checks import Rejection
from torchrl_grpo.extras.peers import read_file

TRL = ("trl_async", "trl_gkd", "trl_distill", "trl_sdft", "trl_sdpo", "trl_sft", "trl")
"""The tables of TRL, whose trainers share many keys; the last one matches any script that no other
table matches.
"""
NAMES = ("verl", "areal", "torchrl", "prime_rl", *TRL)
"""All tables, in the order in which a file is matched."""


@dataclass(frozen=True)
class Row:
    """Translation of one key of another library.

    Attributes:
        ours: our key, or ``@name`` for a quantity that ``sizes`` and ``problems`` turn into ours.
        none: what to do instead, if there is no equivalent.
        differs: difference in meaning, for all values except 0 and false, or by value.
        default: the peer's default; "null" is None.
        null: our key to set by hand if the value is null, which means no bound.
        values: our values, or several of our keys, by their values.
        same: values that need no translation.
        when: the row applies if this other key of theirs is set, has one of the values after ``=``,
            or none of those after ``!=``.
        also_when: a second condition.
        said_when: condition for ``differs``, in the same form.
        list: whether a single value becomes a list.
        table: whether the value is that the table exists.
    """

    ours: str | None = None
    none: str | None = None
    differs: str | Mapping[str, str] | None = None
    default: Any = None
    null: str | None = None
    values: Mapping[str, Any] | None = None
    same: tuple[Any, ...] = ()
    when: str | None = None
    also_when: str | None = None
    said_when: str | None = None
    list: bool = False
    table: bool = False


@dataclass(frozen=True)
class Refusal:
    """Sign that a file describes a run without an equivalent.

    Attributes:
        key: a pattern of their keys; without one, the file has none of ``unless``.
        what: description of that run.
        values: values of the key that match; by default all except null and false.
        unless: values that do not match.
        without: patterns of keys that a file of such a run lacks.
    """

    what: str
    key: str = "*"
    values: tuple[Any, ...] = ()
    unless: tuple[Any, ...] = ()
    without: tuple[str, ...] = ()

    def found_in(self, settings: Mapping[str, Any]) -> str | None:
        """Return the matching key as ``key=value``; None if no key matches."""
        if any(fnmatchcase(key, pattern) for pattern in self.without for key in settings):
            return None
        if self.key == "*":
            return f"no {' or '.join(self.without[:3])}"
        for key, value in settings.items():
            says = value in self.values if self.values else value not in (None, False, *self.unless)
            if says and fnmatchcase(key, self.key):
                return f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        return None


@dataclass(frozen=True)
class Table:
    """Translations of one library's keys.

    Attributes:
        title: name of the library.
        what: description of the supported files.
        marks: keys, or the beginnings of dotted keys, that identify its files.
        without: keys that its files never have.
        differs: differences that do not depend on a single key.
        refused: signs of files that cannot be translated.
        ignored: patterns of keys without an effect here, by reason.
        always: our keys for what the library always does.
        rows: rows by key.
    """

    title: str
    what: str
    marks: tuple[str, ...]
    without: tuple[str, ...]
    differs: tuple[str, ...]
    refused: tuple[Refusal, ...]
    ignored: Mapping[str, tuple[str, ...]]
    always: Mapping[str, Any]
    rows: Mapping[str, Row] = field(repr=False)

    def ignores(self, key: str) -> str | None:
        """Return why a key has no effect here; None if it may have one."""
        why = (
            reason
            for reason, patterns in self.ignored.items()
            for one in patterns
            if fnmatchcase(key, one)
        )
        return next(why, None)

    def is_of(self, settings: Mapping[str, Any]) -> bool:
        """Return whether flat settings belong to this library."""
        if any(key in settings for key in self.without):
            return False
        return any(
            key == mark or key.startswith(f"{mark}.") for mark in self.marks for key in settings
        )


@cache
def read_table(name: str) -> Table:
    """Return the table of one of ``NAMES``."""
    data = _read(name)
    rows = {
        key: Row(**{**row, "same": tuple(row.get("same", ()))}) for key, row in data["keys"].items()
    }
    refused = tuple(
        Refusal(
            **{
                **one,
                **{name: tuple(one.get(name, ())) for name in ("values", "unless", "without")},
            }
        )
        for refusal in data["refused"]
        for one in _each_key(refusal)
    )
    ignored = {why: tuple(patterns) for why, patterns in data["ignored"].items()}
    lists = {key: tuple(data.get(key, ())) for key in ("marks", "without", "differs")}
    return Table(
        title=data[(
            "title"
        )], what=data["what"], always=data["always"], rows=rows, refused=refused, ignored=ignored,
        **lists,
    )  # fmt: skip


def _read(name: str) -> dict[str, Any]:
    """Read a table's file. With a ``base``, it extends the rows, refusals and ignored keys of that
    file.
    """
    data = deepcopy(read_file(name))
    if "base" not in data:
        return data
    base, ignored = _read(data["base"]), data.get("ignored", {})
    data["refused"] = base.get("refused", []) + data.get("refused", [])
    data["ignored"] = {
        why: several + ignored.get(why, []) for why, several in base["ignored"].items()
    }
    data["keys"] = base["keys"] | data["keys"]
    return data


def _each_key(refusal: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one refusal for each of its keys, if it has a list of keys."""
    several = refusal.get("key")
    return [{**refusal, "key": key} for key in several] if isinstance(several, list) else [refusal]


SET_ME = "SET_ME"
"""Placeholder on a printed command line for a value that the file does not contain; no relevant key
accepts it.
"""

BASE: dict[str, Any] = {
    "algo": "grpo",
    "seed": 0,
    "model.name": "Qwen/Qwen2.5-0.5B-Instruct",
    "model.revision": None,
    "model.chat_template": None,
    "model.trust_remote_code": False,
    "model.attn_implementation": "sdpa",
    "env.dataset": "gsm8k",
    "env.datasets": None,
    "env.dataset_config": None,
    "env.train_split": None,
    "env.test_split": None,
    "env.test_fraction": None,
    "env.max_samples": None,
    "env.columns.prompt": None,
    "env.columns.images": None,
    "env.columns.completion": None,
    "env.columns.messages": None,
    "env.system_prompt": None,
    "env.reward": None,
    "env.reward_combination": "sum",
    "env.chat_template_kwargs": None,
    "env.num_envs": 64,
    "env.repeats": 8,
    "env.max_prompt_tokens": 512,
    "env.reasoning": False,
    "env.max_turns": 1,
    "inference_model.backend": "vllm",
    "inference_model.max_new_tokens": 512,
    "inference_model.temperature": 1.0,
    "inference_model.top_k": 0,
    "inference_model.top_p": 1.0,
    "inference_model.min_p": 0.0,
    "inference_model.dtype": "bfloat16",
    "inference_model.max_model_len": None,
    "inference_model.stop": [],
    "inference_model.gpu_memory_utilization": None,
    "inference_model.enforce_eager": False,
    "inference_model.engine_kwargs": None,
    "inference_model.num_devices": None,
    "inference_model.tensor_parallel_size": 1,
    "train_model.num_devices": None,
    "train_model.dtype": "float32",
    "train_model.quantization": None,
    "train_model.gradient_checkpointing": False,
    "train_model.cpu_offload": False,
    "train_model.lora.enabled": False,
    "train_model.lora.r": 16,
    "train_model.lora.alpha": 32,
    "train_model.lora.target_modules": ["all-linear"],
    "ref_model.num_devices": None,
    "ref_model.dtype": "bfloat16",
    "ref_model.refresh_every": None,
    "ref_model.decay": 0.0,
    "teacher.model": None,
    "teacher.address": [],
    "teacher.weights": "live",
    "teacher.decay": 0.99,
    "teacher.prompt": None,
    "teacher.dtype": "float32",
    "policy.loss._target_": "torchrl_grpo.objectives.GRPOLoss",
    "+policy.loss.tau_positive": None,
    "+policy.loss.tau_negative": None,
    "+policy.loss.k_positive": None,
    "+policy.loss.lambda_positive": None,
    "+policy.loss.k_negative": None,
    "+policy.loss.lambda_negative": None,
    "+policy.loss.covariance_share": None,
    "+policy.loss.covariance_low": None,
    "+policy.loss.covariance_high": None,
    "+policy.loss.penalty": None,
    "policy.advantage_mean": "group",
    "policy.advantage_std": "group",
    "policy.advantage_whiten": False,
    "policy.advantage_level": "sequence",
    "policy.gae_gamma": 1.0,
    "policy.gae_lambda": 1.0,
    "policy.reward_scale": 1.0,
    "policy.reward_bias": 0.0,
    "policy.reward_clip": None,
    "policy.overlong_buffer": None,
    "policy.dynamic_sampling": False,
    "policy.max_sampling_rounds": 10,
    "policy.clip_epsilon": 0.2,
    "policy.dual_clip": None,
    "policy.proximal": "behaviour",
    "policy.behaviour_weight": "none",
    "policy.behaviour_level": "token",
    "policy.behaviour_cap": 5.0,
    "policy.behaviour_floor": 0.0,
    **dict.fromkeys(f"+policy.rejection.{rule}" for rule in get_args(Rejection)),
    "policy.top_entropy_quantile": 1.0,
    "policy.mask_truncated": False,
    "policy.ratio_level": "token",
    "policy.aggregation": "sequence_mean",
    "policy.constant_length": None,
    "policy.kl_coef": 0.001,
    "policy.kl_in_reward": False,
    "policy.kl_bias_correction": False,
    "policy.kl_estimator": None,
    "policy.kl_to_behaviour_coef": 0.0,
    "policy.entropy_coef": 0.0,
    "policy.entropy_target": None,
    "policy.entropy_coef_delta": 0.005,
    "policy.entropy_coef_max": 1.0,
    "policy.reward_coef": 1.0,
    "policy.teacher_coef": 0.0,
    "policy.teacher_divergence": "sampled",
    "policy.teacher_beta": 0.5,
    "policy.teacher_top_k": None,
    "train.total_dialog_turns": 64_000,
    "train.total_epochs": None,
    "train.dialog_turns_per_batch": None,
    "train.optim_batch_size": None,
    "train.epochs": 1,
    "train.micro_batch_tokens": 16_384,
    "train.max_staleness": None,
    "train.mixed_precision": "bf16",
    "train.checkpoint_frequency": 100,
    "train.keep_checkpoints": "last:3",
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-6,
    "optimizer.weight_decay": 0.0,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.eps": 1e-8,
    "optimizer.clip_grad_norm": 1.0,
    "optimizer.warmup_steps": 10,
    "optimizer.schedule": "constant",
    "optimizer.lr_floor": 0.0,
    "evaluation.num_prompts": 200,
    "evaluation.frequency": 50,
    "evaluation.k": 8,
    "evaluation.temperature": None,
    "evaluation.top_p": 1.0,
    "evaluation.top_k": 0,
    "evaluation.min_p": 0.0,
    "evaluation.datasets": None,
    "logging.wandb.mode": "disabled",
    "logging.wandb.project": "torchrl-grpo",
    "logging.wandb.name": None,
    "logging.wandb.entity": None,
    "logging.wandb.group": None,
    "logging.wandb.tags": [],
}
"""Default of each key that may be printed, from ``config/grpo_gsm8k.yaml``: keys with their default
are not printed.
"""

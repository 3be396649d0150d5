"""Every rule of the config that can be checked before anything loads."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any

from torchrl_grpo.config.schema import DATASETS, GRPOConfig, leaves
from torchrl_grpo.errors import ConfigError

_COMPARISONS = {
    "ge": (lambda value, limit: value >= limit, "at least"),
    "gt": (lambda value, limit: value > limit, "above"),
    "le": (lambda value, limit: value <= limit, "at most"),
    "lt": (lambda value, limit: value < limit, "below"),
}


def validate(config: GRPOConfig) -> None:
    """Checks every range and combination that needs nothing but the config.

    Raises:
        ConfigError: a rule is broken.
    """
    for name, item, value in leaves(config):
        if value is not None and "choices" in item.metadata:
            check_choice(name, value, item.metadata["choices"])
        limits = item.metadata.get("limits", {})
        if value is None or not limits:
            continue
        holds = all(_COMPARISONS[kind][0](value, limit) for kind, limit in limits.items())
        if not holds or not math.isfinite(value):
            rule = " and ".join(f"{_COMPARISONS[kind][1]} {limit:g}" for kind, limit in limits.items())
            rule = rule if math.isfinite(value) else f"{rule}, and finite"
            works = item.default if item.default is not None else _within(**limits)
            raise ConfigError(f"{name}={value} must be {rule}: use {name}={works}, say.")
    if config.evaluation.k == 1:
        raise ConfigError(
            "evaluation.k=1 must be 0 or at least 2 (pass@1 is measured greedy): use evaluation.k=8, say."
        )
    if config.train_model.dtype != "float32" and not config.train_model.lora.enabled:
        raise ConfigError(
            f"train_model.dtype={config.train_model.dtype} must be float32 without LoRA, because the optimizer's "
            "small steps are lost in 16 bits: use train.mixed_precision=bf16, or train_model.lora.enabled=true."
        )
    _validate_dataset(config)
    _validate_clip_epsilon(config)
    _validate_policy(config)
    _validate_batches(config)
    _validate_devices(config)
    _validate_unread(config)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuses a value that is not one of the ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name}={value} must be one of {', '.join(choices)}: use {name}={choices[0]}, say.")


def _within(**limits: float) -> float:
    """A value that keeps the limits."""
    return limits.get("le", limits.get("ge", limits.get("gt", 0) + 1))


def _validate_dataset(config: GRPOConfig) -> None:
    name = config.env.dataset
    if name == "ifeval":
        raise ConfigError("env.dataset=ifeval has no task yet in this version: use arithmetic or gsm8k.")
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, 1)
        hint = f"did you mean {close[0]}?" if close else "use env.dataset=arithmetic, which needs no download."
        raise ConfigError(f"env.dataset={name} must be one of {', '.join(DATASETS)}: {hint}")


def _validate_clip_epsilon(config: GRPOConfig) -> None:
    value = config.policy.clip_epsilon
    parts = value if isinstance(value, list | tuple) else [value, value]
    numbers = all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts)
    if len(parts) != 2 or not numbers or not (0 <= parts[0] <= 1 and parts[1] >= 0):
        raise ConfigError(
            f"policy.clip_epsilon={value} must be a number, or a pair [low, high], with 0 <= low <= 1 and high >= 0: "
            "use 0.2 or [0.2,0.28]."
        )


def _validate_policy(config: GRPOConfig) -> None:
    policy, lora = config.policy, config.train_model.lora.enabled
    if policy.behaviour_weight != "none" and policy.proximal == "behaviour":
        raise ConfigError(
            f"policy.behaviour_weight={policy.behaviour_weight} needs a proximal policy apart from the one that "
            "sampled, policy.proximal=behaviour makes every weight 1: use policy.proximal=recomputed."
        )
    bounds = policy.reward_clip
    if bounds is not None and not (len(bounds) == 2 and bounds[0] < bounds[1]):
        raise ConfigError(f"policy.reward_clip={list(bounds)} must be a pair [low, high], low < high: use [-1,1], say.")
    grouped = policy.advantage_mean in ("group", "leave_one_out")
    if config.env.repeats == 1 and (grouped or policy.advantage_std == "group" or policy.dynamic_sampling):
        raise ConfigError(
            "env.repeats=1 must be at least 2, because a group of one has nothing to be compared with: use "
            "env.repeats=8, or an advantage over the batch (algo=reinforce_pp)."
        )
    rounds = -(-config.dialog_turns_per_batch // config.env.num_envs)
    if policy.dynamic_sampling and policy.max_sampling_rounds < rounds:
        raise ConfigError(
            f"policy.max_sampling_rounds={policy.max_sampling_rounds} rollouts of env.num_envs={config.env.num_envs} "
            f"must make up train.dialog_turns_per_batch={config.dialog_turns_per_batch}: use {2 * rounds} or more."
        )
    per_token = policy.advantage_level == "token"
    if per_token and policy.advantage_mean == "leave_one_out":
        raise ConfigError(
            "policy.advantage_mean=leave_one_out must not be used with policy.advantage_level=token, because it leaves "
            "a sequence out, not a token: use policy.advantage_mean=group or batch."
        )
    if config.ref_model.refresh_every is not None and (lora or not config.needs_reference):
        why = "the adapters switched off are the reference (LoRA)" if lora else "policy.kl_coef=0 needs none"
        raise ConfigError(
            f"ref_model.refresh_every={config.ref_model.refresh_every} needs a reference model of its own, but {why}: "
            "leave ref_model.refresh_every out."
        )


def _nearest(value: int, of: int) -> str:
    below, above = value // of * of, -(-value // of) * of
    return f"{below} or {above}" if below else f"{above}"


def _divisors(value: int, near: int) -> str:
    candidates = [number for number in range(1, value + 1) if value % number == 0]
    below = max((number for number in candidates if number <= near), default=1)
    above = min((number for number in candidates if number >= near), default=value)
    return f"{below} or {above}" if below != above else f"{below}"


def _validate_batches(config: GRPOConfig) -> None:
    env, batch, step = config.env, config.dialog_turns_per_batch, config.optim_batch_size
    if env.num_envs % env.repeats:
        raise ConfigError(
            f"env.num_envs={env.num_envs} must be a multiple of env.repeats={env.repeats}: "
            f"use {_nearest(env.num_envs, env.repeats)}."
        )
    if batch % env.num_envs:
        raise ConfigError(
            f"train.dialog_turns_per_batch={batch} must be a multiple of env.num_envs={env.num_envs}: "
            f"use {_nearest(batch, env.num_envs)}."
        )
    if batch % step:
        raise ConfigError(
            f"train.optim_batch_size={step} must divide train.dialog_turns_per_batch={batch}: "
            f"use {_divisors(batch, step)}."
        )


def _validate_devices(config: GRPOConfig) -> None:
    for role in ("train_model", "inference_model", "ref_model"):
        node = getattr(config, role)
        if node.num_devices is not None and node.devices is not None:
            raise ConfigError(
                f"{role}.num_devices={node.num_devices} and {role}.devices={list(node.devices)} exclude each other: "
                "give the number and let the devices be chosen, or give the devices."
            )
        if node.devices is not None and (
            not node.devices or min(node.devices) < 0 or len(set(node.devices)) < len(node.devices)
        ):
            raise ConfigError(
                f"{role}.devices={list(node.devices)} must be different indices of accelerators, from 0: use [0], say."
            )

    engine = config.inference_model
    if engine.in_flight != "wait" and engine.backend != "vllm":
        raise ConfigError(
            f"inference_model.in_flight={engine.in_flight} must be wait with inference_model.backend="
            f"{engine.backend}, which samples a batch from beginning to end: use wait, or "
            "inference_model.backend=vllm."
        )
    if engine.tensor_parallel_size > 1 and engine.backend != "vllm":
        raise ConfigError(
            f"inference_model.tensor_parallel_size={engine.tensor_parallel_size} must be 1 with "
            f"inference_model.backend={engine.backend}: use inference_model.backend=vllm."
        )


def _validate_unread(config: GRPOConfig) -> None:
    """What was set, and nothing would read: someone believes that it does something."""
    policy, env, lora = config.policy, config.env, config.train_model.lora
    dataset, aggregation = f"env.dataset={env.dataset}", f"policy.aggregation={policy.aggregation}"
    weighted, per_token = (
        policy.behaviour_weight != "none",
        policy.advantage_level == "token",
    )
    # Whether these are read, with what they are not, and what would make them.
    rules: list[tuple[tuple[str, ...], bool, str, str]] = [
        (("policy.gae_gamma", "policy.gae_lambda"), per_token, "policy.advantage_level=sequence", "=token"),
        (("policy.behaviour_cap", "policy.behaviour_level"), weighted, "policy.behaviour_weight=none", "=mask"),
        (("policy.max_sampling_rounds",), policy.dynamic_sampling, "policy.dynamic_sampling=false", "=true"),
        (("policy.constant_length",), policy.aggregation == "constant", aggregation, "=constant"),
        (("env.dataset_path",), env.dataset != "arithmetic", dataset, "=gsm8k"),
        (("env.difficulty",), env.dataset == "arithmetic", dataset, "=arithmetic"),
        (("env.reward_timeout_s",), env.reward_workers > 0, "env.reward_workers=0", "=2"),
        (
            tuple(f"train_model.lora.{name}" for name in ("r", "alpha", "target_modules")),
            lora.enabled, "train_model.lora.enabled=false", "=true",
        ),
    ]  # fmt: skip
    values, defaults = ({name: value for name, _, value in leaves(node)} for node in (config, GRPOConfig()))
    for names, is_read, where, instead in rules:
        for name in names:
            if not is_read and values[name] != defaults[name]:
                raise ConfigError(
                    f"{name}={values[name]} must be left out with {where}, where nothing reads it: use "
                    f"{where.partition('=')[0]}{instead}, if you want it."
                )

"""Every rule of the config that can be checked before anything is imported or loaded."""

from __future__ import annotations

import difflib
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from torchrl_grpo.checks import (
    check_behaviour_weight,
    check_bounds,
    check_clip_epsilon,
    check_decoupled,
    check_group_size,
    check_level,
    check_multiple,
    check_sampling_rounds,
)
from torchrl_grpo.config.fields import leaves
from torchrl_grpo.config.schema import GRPOConfig
from torchrl_grpo.errors import ConfigError

_COMPARISONS = {
    "ge": (lambda value, limit: value >= limit, "at least"),
    "gt": (lambda value, limit: value > limit, "above"),
    "le": (lambda value, limit: value <= limit, "at most"),
    "lt": (lambda value, limit: value < limit, "below"),
}


def validate(config: GRPOConfig) -> None:
    """Checks every choice, range and combination that needs nothing but the config.

    Raises:
        ConfigError: a rule is broken.
    """
    try:
        for name, item, value in leaves(config):
            if value is not None and "choices" in item.metadata:
                check_choice(name, value, item.metadata["choices"])
            if value is not None and "limits" in item.metadata:
                _check_limits(name, value, item.default, item.metadata["limits"])
        _validate_numbers(config)
        _validate_policy(config)
        _validate_models(config)
        _validate_unread(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_choice(name: str, value: Any, choices: Sequence[str], also: Sequence[str] = ()) -> None:
    """Refuses a value that is neither one of the ``choices`` nor of what is accepted besides."""
    if value not in (*choices, *also):
        close = difflib.get_close_matches(str(value), choices, 1)
        hint = f"did you mean {close[0]}?" if close else f"use {name}={choices[0]}, say."
        raise ConfigError(f"{name}={value} must be one of {', '.join(choices)}: {hint}")


def _check_limits(name: str, value: float, default: Any, limits: Mapping[str, float]) -> None:
    if math.isfinite(value) and all(_COMPARISONS[kind][0](value, limit) for kind, limit in limits.items()):
        return
    rule = " and ".join(f"{_COMPARISONS[kind][1]} {limit:g}" for kind, limit in limits.items())
    rule = rule if math.isfinite(value) else f"{rule}, and finite"
    works = limits.get("le", limits.get("ge", limits.get("gt", 0) + 1)) if default is None else default
    raise ConfigError(f"{name}={value} must be {rule}: use {name}={works}, say.")


def _validate_numbers(config: GRPOConfig) -> None:
    env, batch, step = config.env, config.dialog_turns_per_batch, config.optim_batch_size
    check_multiple("env.num_envs", env.num_envs, env.repeats, f"env.repeats={env.repeats}")
    check_multiple("train.dialog_turns_per_batch", batch, env.num_envs, f"env.num_envs={env.num_envs}")
    if batch % step:
        below = next(size for size in range(min(step, batch), 0, -1) if batch % size == 0)
        above = next(size for size in range(min(step, batch), batch + 1) if batch % size == 0)
        use = f"{below} or {above}" if below < above else above
        raise ConfigError(f"train.optim_batch_size={step} must divide train.dialog_turns_per_batch={batch}: use {use}.")
    if config.evaluation.k == 1:
        raise ConfigError(
            "evaluation.k=1 must be 0 or at least 2 (pass@1 is measured greedy): use evaluation.k=8, say."
        )


def _validate_policy(config: GRPOConfig) -> None:
    policy, env, every = config.policy, config.env, config.ref_model.refresh_every
    check_clip_epsilon(policy.clip_epsilon, "policy.clip_epsilon")
    check_behaviour_weight(policy.behaviour_weight, policy.proximal, "policy.behaviour_weight")
    check_bounds(policy.reward_clip, "policy.reward_clip")
    check_level(policy.advantage_level, policy.advantage_mean, "policy.advantage_mean")
    if env.reward_combination == "gdpo":
        check_decoupled(policy.advantage_level, policy.advantage_mean, "env.reward_combination=gdpo")
        if config.shapes_reward or policy.dynamic_sampling:
            raise ConfigError(
                "env.reward_combination=gdpo must have neither policy.dynamic_sampling nor what changes the sum of the "
                "reward, it reads the parts: leave policy.reward_scale, reward_bias, reward_clip, overlong_buffer, "
                "kl_in_reward and dynamic_sampling out, or use env.reward_combination=sum."
            )
    if policy.dynamic_sampling:
        check_group_size(env.repeats, "group", "group", "env.repeats")
        wanted = config.dialog_turns_per_batch
        check_sampling_rounds(policy.max_sampling_rounds, env.num_envs, wanted, "policy.max_sampling_rounds")
    check_group_size(env.repeats, policy.advantage_mean, policy.advantage_std, "env.repeats")
    if every is not None and not config.has_own_reference:
        why = "the adapters switched off are the reference (LoRA)"
        why = why if config.needs_reference else "policy.kl_coef=0 needs none"
        raise ConfigError(
            f"ref_model.refresh_every={every} needs a reference model apart from the trained one, but {why}: leave "
            "ref_model.refresh_every out."
        )


def _validate_models(config: GRPOConfig) -> None:
    if config.train_model.dtype != "float32" and not config.train_model.lora.enabled:
        raise ConfigError(
            f"train_model.dtype={config.train_model.dtype} must be float32 without LoRA, because the optimizer's "
            "small steps are lost in 16 bits: use train.mixed_precision=bf16, or train_model.lora.enabled=true."
        )
    for role in ("train_model", "inference_model", "ref_model"):
        number, devices = getattr(config, role).num_devices, getattr(config, role).devices
        if number is not None and devices is not None:
            raise ConfigError(
                f"{role}.num_devices={number} and {role}.devices={list(devices)} exclude each other: give the number "
                "and let the devices be chosen, or give the devices."
            )
        if devices is not None and (not devices or min(devices) < 0 or len(set(devices)) < len(devices)):
            raise ConfigError(
                f"{role}.devices={list(devices)} must be different indices of accelerators, from 0: use [0], say."
            )
    engine = config.inference_model
    for name, only in (("in_flight", "wait"), ("tensor_parallel_size", 1)):
        if getattr(engine, name) != only and engine.backend != "vllm":
            raise ConfigError(
                f"inference_model.{name}={getattr(engine, name)} must be {only} with inference_model.backend="
                f"{engine.backend}: use {only}, or inference_model.backend=vllm."
            )


def _validate_unread(config: GRPOConfig) -> None:
    """What was set, and nothing would read: someone believes that it does something."""
    values, defaults = ({name: value for name, _, value in leaves(node)} for node in (config, GRPOConfig()))
    for name, (switch, reads, use) in _READ_WITH.items():
        if values[switch] not in reads and values[name] != defaults[name]:
            raise ConfigError(
                f"{name}={values[name]} must be left out with {switch}={_written(values[switch])}, where nothing reads "
                f"it: use {switch}={use}, if you want it."
            )


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# Keys that are read with some values of another key alone: that key, those values, one of them as it is written.
_READ_WITH: dict[str, tuple[str, Container[Any], str]] = {
    "policy.gae_gamma": ("policy.advantage_level", ("token",), "token"),
    "policy.gae_lambda": ("policy.advantage_level", ("token",), "token"),
    "policy.behaviour_cap": ("policy.behaviour_weight", ("truncate", "mask"), "mask"),
    "policy.behaviour_level": ("policy.behaviour_weight", ("truncate", "mask"), "mask"),
    "policy.max_sampling_rounds": ("policy.dynamic_sampling", (True,), "true"),
    "policy.constant_length": ("policy.aggregation", ("constant",), "constant"),
    "env.dataset_path": ("env.dataset", ("gsm8k",), "gsm8k"),
    "env.difficulty": ("env.dataset", ("arithmetic",), "arithmetic"),
    "env.reward_timeout_s": ("env.reward_workers", range(1, 2**31), "2"),
    "train_model.lora.r": ("train_model.lora.enabled", (True,), "true"),
    "train_model.lora.alpha": ("train_model.lora.enabled", (True,), "true"),
    "train_model.lora.target_modules": ("train_model.lora.enabled", (True,), "true"),
}

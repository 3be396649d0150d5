"""All rules of the config that can be checked before anything is imported or loaded.

Rules are rows of tables, which ``validate`` checks in order and ``docs/config.md`` prints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, ge, gt, le, lt
from typing import Any

from torchrl_grpo.checks import (
    check_behaviour_weight,
    check_bounds,
    check_clip_epsilon,
    check_decoupled,
    check_floor,
    check_group_size,
    check_keep,
    check_level,
    check_multiple,
    check_rejection,
    check_sampling_rounds,
    check_score_centering,
    check_top_entropy,
    did_you_mean,
)
from torchrl_grpo.config import (
    critic,
    engine,
    env,
    measuring,
    model,
    policy,
    reference,
    teacher,
    train,
)
from torchrl_grpo.config.data import DATA_RULES, TEST_RULES
from torchrl_grpo.config.devices import DEVICE_RULES, SERVER_RULES
from torchrl_grpo.config.env import task_kind
from torchrl_grpo.config.fields import leaves
from torchrl_grpo.config.rule import Rule, read_with
from torchrl_grpo.config.schema import GRPOConfig
from torchrl_grpo.config.security import check_no_secrets
from torchrl_grpo.engines import ENGINES
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.plugins import plugins
from torchrl_grpo.host.trees import dotted

_COMPARISONS = {
    "ge": (ge, "at least"),
    "gt": (gt, "above"),
    "le": (le, "at most"),
    "lt": (lt, "below"),
}


def validate(config: GRPOConfig) -> None:
    """Check every choice, range and combination that needs nothing but the config.

    Raises:
        ConfigError: a rule is broken.
    """
    try:
        check_no_secrets(dataclasses.asdict(config))
        check_values(config)
        for rule in RULES:
            rule.check(config)
        for name, entry in _data_nodes(config):
            for rule in TEST_RULES if name.startswith("evaluation") else DATA_RULES:
                rule.check(entry, f"{name}.")
        for role in ("train_model", "inference_model", "ref_model", "teacher"):
            for rule in DEVICE_RULES:
                rule.check(getattr(config, role), f"{role}.")
        _check_servers(config)
        _check_shared(config)
        for rule in UNREAD_RULES:
            rule.check(config)
        for index in range(len(config.teachers or ())):
            validate(config.of_teacher(index))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_servers(config: GRPOConfig) -> None:
    engine, teacher = config.inference_model, config.teacher
    for rule in SERVER_RULES:
        if ENGINES[engine.backend].elsewhere:
            switch = f"inference_model.backend={engine.backend}"
            rule.check(engine, "inference_model.", switch=switch)
        if teacher.address:
            rule.check(teacher, "teacher.", switch="teacher.address")


def check_values(config: GRPOConfig) -> None:
    """Check the choice and the range of each option by itself.

    Raises:
        ConfigError: a value is not allowed.
    """
    for name, item, value in _all_leaves(config):
        if value is not None and "choices" in item.metadata:
            check_choice(name, value, item.metadata["choices"])
        if value is not None and "limits" in item.metadata:
            _check_limits(name, value, item.default, item.metadata["limits"])


def staleness_bound(config: GRPOConfig, asynchronous: bool) -> int:
    """Return the maximum number of steps between the weights that sample a sequence and those
    trained on it.

    Raises:
        ConfigError: the script is ``grpo.py``, which has no staleness, and the config sets some.
    """
    staleness = config.train.max_staleness
    if staleness and not asynchronous:
        raise ConfigError(
            f"train.max_staleness={staleness} must be 0 in grpo.py, which trains on what the "
            "current weights sampled: use sota/grpo/grpo-async.py (in Python asynchronous=True), "
            "or leave it out."
        )
    return int(asynchronous) if staleness is None else staleness


def check_one_process(config: GRPOConfig) -> None:
    """Refuse settings that have no meaning when all roles share one process."""
    for rule in engine.ONE_PROCESS_RULES:
        rule.check(config)


def check_script(config: GRPOConfig, asynchronous: bool) -> None:
    """Refuse what the script cannot do, as far as that is known without the devices.

    Raises:
        ConfigError: a rule is broken.
    """
    staleness_bound(config, asynchronous)
    roles = (config.train_model, config.inference_model, config.ref_model, config.teacher)
    several = any(
        role.num_devices not in (None, 1) or len(role.devices or ()) > 1 for role in roles
    )
    several |= any(len(role.address) > 1 for role in (config.inference_model, config.teacher))
    several |= config.inference_model.devices_per_engine > 1
    if not (asynchronous or several or config.ray.address):
        check_one_process(config)


def _entries(config: GRPOConfig) -> Iterator[tuple[str, Any]]:
    """Yield the entries of both lists of data sets, with their names."""
    for name in ("env.datasets", "evaluation.datasets"):
        for index, entry in enumerate(attrgetter(name)(config) or []):
            yield f"{name}[{index}]", entry


def _data_nodes(config: GRPOConfig) -> Iterator[tuple[str, Any]]:
    """Yield the nodes that describe a data set, with their names."""
    if task_kind(config.env) == "dataset":
        yield "env", config.env
    yield from _entries(config)


def _all_leaves(config: GRPOConfig) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    yield from leaves(config)
    for name, entry in _entries(config):
        yield from leaves(entry, f"{name}.")


def check_choice(name: str, value: Any, names: Collection[str], also: Sequence[str] = ()) -> None:
    """Refuse a value that is neither in ``names`` nor in ``also``, nor from an installed package."""
    if value in (*names, *also) or value in plugins(name):
        return
    names = [*names, *plugins(name)]
    hint = did_you_mean(str(value), names, f"for example, {name}={names[0]}.")
    raise ConfigError(f"{name}={value} must be one of {', '.join(names)}: {hint}")


def check_integers(name: str, value: Any) -> None:
    """Refuse integers that do not fit into 64 bits, including those within lists and groups of
    keys.
    """
    for key, leaf in dotted(value, name, into_lists=True):
        if isinstance(leaf, int) and abs(leaf) >= 2**63:
            text = str(leaf)
            raise ConfigError(
                f"{key}={text[:20]}... must fit into 64 bits, but it has {len(text.lstrip('-'))} "
                "digits: use a smaller number."
            )


def _check_limits(name: str, value: float, default: Any, limits: Mapping[str, float]) -> None:
    if math.isfinite(value) and all(
        _COMPARISONS[kind][0](value, limit) for kind, limit in limits.items()
    ):
        return
    rule = " and ".join(f"{_COMPARISONS[kind][1]} {limit:g}" for kind, limit in limits.items())
    rule = rule if math.isfinite(value) else f"{rule}, and finite"
    example = _value_within(limits) if default is None else default
    raise ConfigError(f"{name}={value} must be {rule}: for example, {name}={example}.")


def _value_within(limits: Mapping[str, float]) -> float:
    """Return a value that satisfies limits."""
    for kind in ("le", "ge"):
        if kind in limits:
            return limits[kind]
    return (limits["gt"] + limits["lt"]) / 2 if "lt" in limits else limits["gt"] + 1


def _check_shared(config: GRPOConfig) -> None:
    """Check the rules that the components check too."""
    policy, env = config.policy, config.env
    mean = policy.advantage_mean
    level = config.advantage_level
    batch = config.dialog_turns_per_batch
    check_multiple("env.num_envs", env.num_envs, env.repeats, f"env.repeats={env.repeats}")
    check_multiple(
        "train.dialog_turns_per_batch", batch, env.num_envs, f"env.num_envs={env.num_envs}"
    )
    check_clip_epsilon(policy.clip_epsilon, "policy.clip_epsilon")
    check_behaviour_weight(policy.behaviour_weight, policy.proximal, "policy.behaviour_weight")
    check_floor(policy.behaviour_floor, policy.behaviour_cap, "policy.behaviour_floor")
    check_rejection(policy.rejection, "policy.rejection")
    check_top_entropy(
        policy.top_entropy_quantile,
        policy.proximal,
        "policy.top_entropy_quantile",
        "policy.proximal",
    )
    if policy.score_centering:
        is_current = policy.proximal == "recomputed" and config.optim_steps_per_batch == 1
        weight_level = policy.behaviour_level
        check_score_centering(is_current, weight_level, policy.rejection or (), "policy.")
    check_bounds(policy.reward_clip, "policy.reward_clip")
    check_level(level, mean, "policy.advantage_mean")
    check_level(level, policy.advantage_std, "policy.advantage_std")
    if env.reward_combination == "gdpo":
        check_decoupled(level, mean, "env.reward_combination=gdpo")
    if policy.kl_bias_correction and (not policy.kl_coef or policy.kl_in_reward):
        raise ConfigError(
            "policy.kl_bias_correction=true must have a KL in the loss to correct, but has "
            f"policy.kl_coef={policy.kl_coef} and policy.kl_in_reward={policy.kl_in_reward}: use "
            "policy.kl_coef=0.001 policy.kl_in_reward=false."
        )
    if policy.dynamic_sampling:
        check_group_size(env.repeats, "group", "group", "env.repeats")
        check_sampling_rounds(
            policy.max_sampling_rounds, env.num_envs, batch, "policy.max_sampling_rounds"
        )
    check_group_size(env.repeats, mean, policy.advantage_std, "env.repeats")


RULES = (
    *env.RULES,
    *train.RULES,
    *measuring.RULES,
    *policy.RULES,
    *critic.RULES,
    *teacher.RULES,
    *reference.RULES,
    *model.RULES,
    *engine.RULES,
    Rule(
        "train.keep_checkpoints",
        "needs evaluations to find the best checkpoint, but evaluation.num_prompts=0",
        "use last:3, for example, or evaluation.num_prompts=200",
        lambda c: (
            "best" in (check_keep(c.train.keep_checkpoints) or {}) and not c.evaluation.num_prompts
        ),
    ),
    Rule(
        "train.total_dialog_turns",
        "only evaluates, which needs evaluation.num_prompts above 0",
        "for example, evaluation.num_prompts=200",
        lambda c: c.only_evaluates and not c.evaluation.num_prompts,
    ),
    Rule(
        "train.resume",
        "must be left out with train.total_dialog_turns=0 and {inference_model.backend=}, which "
        "evaluate the server's model",
        "start the server with the checkpoint's model (python -m torchrl_grpo export), or use "
        "another backend",
        lambda c: (
            c.train.resume is not None
            and c.only_evaluates
            and ENGINES[c.inference_model.backend].elsewhere
        ),
    ),
    *(
        Rule(
            key,
            policy.WITH_SFT,
            "it is for responses that the policy sampled",
            "policy.demonstrations",
        )
        for key in (
            "policy.dynamic_sampling",
            "env.difficulty_filter",
            "env.curriculum",
            "env.sampling",
            "env.transforms",
            "env.environment",
            "env.agent",
            "policy.advantage_whiten",
            "policy.advantage_level",
            "policy.turn_credit",
            "policy.value_coef",
            "policy.reward_scale",
            "policy.reward_bias",
            "policy.reward_clip",
            "policy.overlong_buffer",
            "policy.kl_in_reward",
            "policy.kl_to_behaviour_coef",
            "policy.proximal",
            "policy.ratio_level",
            "policy.dual_clip",
        )
    ),
    Rule(
        "env.repeats",
        "must be 1 with policy.demonstrations=true (algo=sft), because each problem has one "
        "demonstration",
        "leave it out",
        "policy.demonstrations",
        lambda repeats: repeats != 1,
    ),
    Rule(
        "inference_model.temperature",
        "must be 1 with policy.demonstrations=true (algo=sft), whose loss is the plain "
        "log-likelihood",
        "leave it out, or use evaluation.temperature",
        lambda c: (  # a divergence has one (arXiv 2306.13649)
            c.policy.demonstrations and c.inference_model.temperature != 1 and not c.teacher_in_loss
        ),
    ),
    *(
        Rule(
            "policy.sft_coef",
            f"must be left out with {{{key}=}}, {why}",
            "set only one of them",
            key,
        )
        for key, why in (
            ("policy.demonstrations", "which trains only on demonstrations"),
            ("env.agent", "whose prompts are not the rows'"),
            ("env.environment", "whose prompts are not the rows'"),
        )
    ),
    Rule(
        "policy.advantage_level",
        "must be left out with {env.player}, because the samples of its trajectories are not ordered",
        "leave it out",
        "env.player",
    ),
    Rule(
        "env.reward_combination",
        "excludes policy.dynamic_sampling and options that change the sum of the reward, because "
        "it reads the parts",
        "leave policy.reward_scale, reward_bias, reward_clip, overlong_buffer, kl_in_reward and "
        "dynamic_sampling out, or use env.reward_combination=sum",
        lambda c: (
            c.env.reward_combination == "gdpo"
            and c.advantage_level == "sequence"
            and (c.shapes_reward or c.policy.dynamic_sampling)
        ),
    ),
    Rule(
        "policy.score_centering",
        "needs inference_model.top_k, because its mean is over the tokens that were kept",
        "use inference_model.top_k=100",
        partial(engine.lacks_top_k, "policy.score_centering"),
    ),
)
"""Rules of the whole config."""

UNREAD_RULES = (
    *engine.UNREAD,
    *env.UNREAD,
    *policy.UNREAD,
    *critic.UNREAD,
    *measuring.UNREAD,
    *model.UNREAD,
    *read_with(
        "policy.demonstrations",
        (True,),
        "true",
        "env.columns.completion",
        unless=lambda c: c.needs_demonstrations or c.teacher.prompt,
    ),
)
"""Rules that are checked last: for ``inference_model.exact`` and for keys that are never read.
"""

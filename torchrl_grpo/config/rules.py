"""Every rule of the config that can be checked before anything is imported or loaded."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchrl_grpo import checks
from torchrl_grpo.checks import (
    check_behaviour_weight,
    check_bounds,
    check_clip_epsilon,
    check_decoupled,
    check_group_size,
    check_keep,
    check_level,
    check_multiple,
    check_sampling_rounds,
)
from torchrl_grpo.config.data import DataConfig
from torchrl_grpo.config.fields import leaves
from torchrl_grpo.config.measuring import EvaluationConfig
from torchrl_grpo.config.models import InferenceModelConfig, TeacherConfig
from torchrl_grpo.config.schema import EnvConfig, GRPOConfig
from torchrl_grpo.config.security import check_no_secrets
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.generation.engines import ENGINES, engines_with
from torchrl_grpo.host.trees import dotted

MOST_STOP_BYTES = 256
"""Maximum size of ``inference_model.stop``: an engine has a table with a row of the vocabulary for
each byte.
"""

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
        check_no_secrets(dataclasses.asdict(config))
        check_values(config)
        _validate_data(config.env)
        _validate_tests(config.evaluation)
        _validate_turns(config.env)
        _validate_numbers(config)
        _validate_policy(config)
        _validate_models(config)
        _validate_exact(config)
        _validate_unread(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_values(config: GRPOConfig) -> None:
    """Check the choice and the range of each option by itself.

    Raises:
        ConfigError: a value is not among them.
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
        ConfigError: the script is ``grpo.py``, which knows no staleness, and some was asked for.
    """
    asked = config.train.max_staleness
    if asked and not asynchronous:
        raise ConfigError(
            f"train.max_staleness={asked} must be 0 in grpo.py, which trains on what the current "
            "weights sampled: use sota/grpo/grpo-async.py, or leave it out."
        )
    return (1 if asynchronous else 0) if asked is None else asked


def check_one_process(config: GRPOConfig) -> None:
    """Refuse settings without a meaning where all roles are in one process."""
    inference = config.inference_model
    for name, value, only, why in (
        (
            "in_flight",
            inference.in_flight,
            "wait",
            "sampling and training take turns in one process",
        ),
        (
            "weight_transfer",
            inference.weight_transfer,
            "auto",
            "trainer and engine are in one process",
        ),
    ):
        if value != only:
            raise ConfigError(
                f"inference_model.{name}={value} must be {only} where {why}: leave it out, or use "
                "sota/grpo/grpo-async.py."
            )


def check_script(config: GRPOConfig, asynchronous: bool) -> None:
    """Refuse what the script cannot do, as far as it is known before the devices are.

    Raises:
        ConfigError: a rule is broken.
    """
    staleness_bound(config, asynchronous)
    roles = (config.train_model, config.inference_model, config.ref_model, config.teacher)
    several = any(
        role.num_devices not in (None, 1) or len(role.devices or ()) > 1 for role in roles
    )
    several |= any(len(role.address) > 1 for role in (config.inference_model, config.teacher))
    if not (
        asynchronous
        or several
        or config.ray.address
        or config.inference_model.devices_per_engine > 1
    ):
        check_one_process(config)


def _all_leaves(config: GRPOConfig) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    yield from leaves(config)
    for name, entries in (
        ("env.datasets", config.env.datasets),
        ("evaluation.datasets", config.evaluation.datasets),
    ):
        for index, entry in enumerate(entries or []):
            yield from leaves(entry, f"{name}[{index}].")


def check_choice(name: str, value: Any, names: Collection[str], also: Sequence[str] = ()) -> None:
    """Refuses a value that is neither one of the ``names`` nor of what is accepted besides."""
    if value not in (*names, *also):
        close = difflib.get_close_matches(str(value), names, 1)
        hint = f"did you mean {close[0]}?" if close else f"for example, {name}={next(iter(names))}."
        raise ConfigError(f"{name}={value} must be one of {', '.join(names)}: {hint}")


def check_integers(name: str, value: Any) -> None:
    """Refuses whole numbers, also within lists and groups of keys, that no 64 bits can hold."""
    for key, one in dotted(value, name, into_lists=True):
        if isinstance(one, int) and abs(one) >= 2**63:
            text = str(one)
            raise ConfigError(
                f"{key}={text[:20]}... must be a number within 64 bits, it has "
                f"{len(text.lstrip('-'))} digits: use a smaller one."
            )


def _check_limits(name: str, value: float, default: Any, limits: Mapping[str, float]) -> None:
    if math.isfinite(value) and all(
        _COMPARISONS[kind][0](value, limit) for kind, limit in limits.items()
    ):
        return
    rule = " and ".join(f"{_COMPARISONS[kind][1]} {limit:g}" for kind, limit in limits.items())
    rule = rule if math.isfinite(value) else f"{rule}, and finite"
    works = _within(limits) if default is None else default
    raise ConfigError(f"{name}={value} must be {rule}: for example, {name}={works}.")


def _within(limits: Mapping[str, float]) -> float:
    """Return a value that limits allow."""
    for kind in ("le", "ge"):
        if kind in limits:
            return limits[kind]
    return (limits["gt"] + limits["lt"]) / 2 if "lt" in limits else limits["gt"] + 1


def _validate_data(env: EnvConfig) -> None:
    """Check that there is one data set, several or a task, and that every key that is set is read."""
    _check_arguments("env.chat_template_kwargs", env.chat_template_kwargs, "enable_thinking: false")
    if not isinstance(env.task, dict) and not str(env.task).startswith(checks.VERIFIERS):
        raise ConfigError(
            f"env.task={env.task} must be verifiers:NAME or a node with _target_: use "
            f"env.task._target_={env.task or 'my_tasks.MyTask'}."
        )
    own_task = env.own_task
    if isinstance(env.task, dict) and len(env.task) > 1 and own_task is None:
        raise ConfigError(
            f"env.task={env.task} must have _target_: for example, "
            "env.task._target_=my_tasks.MyTask."
        )
    switch = "env.datasets" if own_task is None else env.player or f"env.task._target_={own_task}"
    if own_task is not None and env.datasets is not None:
        raise ConfigError(f"{switch} and env.datasets exclude each other: use one of them alone.")
    _validate_environment(env)
    if own_task is None and env.datasets is None:
        if env.environment is None or env.dataset is not None:
            _validate_dataset(env, "env")
            return
        for name, value in _data_keys(env).items():
            if name not in _OF_SEEDS:
                raise ConfigError(
                    f"env.{name}={value} must be left out with env.environment and no env.dataset, "
                    "where nothing reads it: give env.dataset, if the environment is to get its "
                    "rows."
                )
        return
    if isinstance(env.task, str):
        _check_arguments("env.dataset_options", env.dataset_options, "taskset: {split: train}")
    for name, value in _data_keys(env).items():
        if name not in (_OF_VERIFIERS if isinstance(env.task, str) else ("dataset", "reward")):
            fix = (
                "give it to each data set"
                if own_task is None
                else "its options are env.dataset_options"
                if isinstance(env.task, str)
                else f"use +env.task.{name} for an argument of yours"
            )
            raise ConfigError(f"env.{name}={value} must be left out with {switch}: {fix}.")
    if env.datasets == []:
        raise ConfigError("env.datasets=[] must have a data set: for example, [{dataset: gsm8k}].")
    for index, entry in enumerate(env.datasets or []):
        _validate_dataset(entry, f"env.datasets[{index}]")


def _validate_environment(env: EnvConfig) -> None:
    """That what the environment is given is a name or names, and that nothing else plays the
    dialogs.
    """
    if env.environment is None:
        if env.environments_at_a_time != EnvConfig().environments_at_a_time:
            raise ConfigError(
                f"env.environments_at_a_time={env.environments_at_a_time} needs env.environment: "
                "leave it out."
            )
        return
    named = env.environment
    names = (
        [named]
        if isinstance(named, str)
        else list(named.values())
        if isinstance(named, dict)
        else []
    )
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"env.environment={named} must be a class or classes by name: for example, "
            "my_envs.py:Guess, or {easy: my_envs.py:Easy, hard: my_envs.py:Hard}."
        )
    if isinstance(named, dict) and env.dataset is None and env.datasets is None:
        raise ConfigError(
            f"env.environment={named} needs a data set with the column environment, which says "
            "whose row it is: give env.dataset, or one class."
        )
    for name, value, default in (
        ("env.task" if isinstance(env.task, str) else "env.task._target_", env.own_task, None),
        ("env.agent", env.agent, None),
        ("env.retry_prompt", env.retry_prompt, None),
        ("env.transforms", list(env.transforms), []),
    ):
        if value != default:
            raise ConfigError(
                f"{name}={value} and env.environment exclude each other: use one of them alone."
            )
    for index, entry in enumerate(env.datasets or []):
        if entry.reward is not None:
            raise ConfigError(
                f"env.datasets[{index}].reward={entry.reward} must be left out with "
                "env.environment: use env.reward."
            )


_OF_VERIFIERS = ("dataset", "dataset_options", "max_samples")
_OF_SEEDS = ("max_samples", "prompt_template", "system_prompt", "reward")


def _check_arguments(name: str, value: Any, example: str) -> None:
    if not isinstance(value, dict | None):
        raise ConfigError(
            f"{name}={value} must be arguments by name: for example, '{name}={{{example}}}'."
        )


def _validate_tests(evaluation: EvaluationConfig) -> None:
    for index, entry in enumerate(evaluation.datasets or []):
        field = f"evaluation.datasets[{index}]"
        _validate_dataset(entry, field)
        if entry.weight != 1:
            raise ConfigError(
                f"{field}.weight={entry.weight} must be left out: weights are for env.datasets."
            )


def _validate_turns(env: EnvConfig) -> None:
    """Check that settings for dialogs of several turns come with several turns."""
    for name, value in (("tools", env.tools), ("retry_prompt", env.retry_prompt)):
        if value and env.max_turns < 2:
            raise ConfigError(
                f"env.{name}={value} must have env.max_turns of at least 2, it is {env.max_turns}: "
                "use env.max_turns=2."
            )
    if env.tool_parser is not None and not (env.tools or env.player or env.environment):
        raise ConfigError(
            f"env.tool_parser={env.tool_parser} needs env.tools, env.environment or env.agent, "
            "there are none: name some, or leave it out."
        )
    if env.environment is not None and "python" in env.tools:
        raise ConfigError(
            f"env.tools={list(env.tools)} must not have python with "
            f"env.environment={env.environment}, whose methods are tools with a state already: "
            "leave it out."
        )
    others: dict[str, Any] = {
        "tools": env.tools,
        "retry_prompt": env.retry_prompt,
        "transforms": env.transforms,
    }
    for name, other in others.items():
        if other and env.player is not None:
            raise ConfigError(
                f"env.{name}={other} and {env.player} exclude each other, the agent says itself "
                "what follows a turn: use one of them alone."
            )
    if env.agent is not None and isinstance(env.task, str):
        raise ConfigError(
            f"env.agent={env.agent} and {env.player} exclude each other: use one of them alone."
        )


def _validate_dataset(data: DataConfig, field: str) -> None:
    name = data.dataset
    if not name:
        raise ConfigError(
            f"{field}.dataset={name or 'null'} must be a data set: use {field}.dataset=arithmetic, "
            "a file, a folder or a name on the Hugging Face hub."
        )
    _check_arguments(f"{field}.dataset_options", data.dataset_options, "max_terms: 3")
    for key, value in _data_keys(data).items():
        if not _reads(name, key):
            use = next(
                other
                for other in ("arithmetic", "gsm8k", "reasoning_gym:chain_sum")
                if _reads(other, key)
            )
            raise ConfigError(
                f"{field}.{key}={value} must be left out with {field}.dataset={name}, where "
                f"nothing reads it: use {field}.dataset={use}, if you want it."
            )
    for key in ("dataset_config", "revision"):
        if data.dataset_path is not None and getattr(data, key) is not None:
            raise ConfigError(
                f"{field}.{key}={getattr(data, key)} must be left out with "
                f"{field}.dataset_path={data.dataset_path}: it is for data on the hub."
            )
    if (
        data.columns.messages is not None
        and (data.columns.prompt or data.columns.completion) is not None
    ):
        raise ConfigError(
            f"{field}.columns.messages={data.columns.messages} is prompt and completion in one: "
            f"leave {field}.columns.prompt and completion out."
        )
    if data.test_split is not None and data.test_fraction is not None:
        raise ConfigError(
            f"{field}.test_split={data.test_split} and {field}.test_fraction={data.test_fraction} "
            "exclude each other: use one of them alone."
        )


def _reads(dataset: str, key: str) -> bool:
    """Whether a data set uses a key of ``DataConfig``."""
    if key in ("dataset", "reward"):
        return True
    if dataset.startswith(checks.REASONING_GYM):
        return key in ("dataset_options", "max_samples", "prompt_template", "system_prompt")
    if key in ("difficulty", "dataset_options"):
        return key == "difficulty" and dataset in checks.GENERATED
    return dataset in checks.PRESETS if key == "dataset_path" else dataset not in checks.GENERATED


def _data_keys(data: DataConfig) -> dict[str, Any]:
    """The keys of a data set that have another value than the default."""
    defaults = {name: value for name, _, value in leaves(DataConfig())}
    return {
        name: value
        for name, _, value in leaves(data)
        if name in defaults and value != defaults[name]
    }


def _validate_numbers(config: GRPOConfig) -> None:
    env, batch, step = config.env, config.dialog_turns_per_batch, config.optim_batch_size
    check_multiple("env.num_envs", env.num_envs, env.repeats, f"env.repeats={env.repeats}")
    check_multiple(
        "train.dialog_turns_per_batch", batch, env.num_envs, f"env.num_envs={env.num_envs}"
    )
    if batch % step:
        below = next(size for size in range(min(step, batch), 0, -1) if batch % size == 0)
        above = next(size for size in range(min(step, batch), batch + 1) if batch % size == 0)
        use = f"{below} or {above}" if below < above else above
        raise ConfigError(
            f"train.optim_batch_size={step} must divide train.dialog_turns_per_batch={batch}: use "
            f"{use}."
        )
    if (
        "best" in (check_keep(config.train.keep_checkpoints) or {})
        and not config.evaluation.num_prompts
    ):
        raise ConfigError(
            f"train.keep_checkpoints={config.train.keep_checkpoints} needs evaluations to tell the "
            "best one, but evaluation.num_prompts=0: use last:3, for example, or evaluate."
        )
    if env.difficulty_filter is not None:
        bounds = list(env.difficulty_filter)
        if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1] <= 1:
            raise ConfigError(
                f"env.difficulty_filter={bounds} must be [low, high] with low below high, both in "
                "[0, 1]: for example, [0.05,0.95]."
            )
        if env.curriculum is not None:
            raise ConfigError(
                f"env.difficulty_filter={bounds} and env.curriculum={env.curriculum} exclude each "
                "other: use one of them."
            )
    if config.only_evaluates and not config.evaluation.num_prompts:
        raise ConfigError(
            "train.total_dialog_turns=0 only evaluates and must have evaluation.num_prompts above "
            "0: for example, evaluation.num_prompts=200."
        )
    served = config.only_evaluates and ENGINES[config.inference_model.backend].elsewhere
    if served and config.train.resume is not None:
        raise ConfigError(
            f"train.resume={config.train.resume} must be left out with train.total_dialog_turns=0 "
            f"and inference_model.backend={config.inference_model.backend}, which evaluate the "
            "model that is served: start the server with the checkpoint's model (python -m "
            "torchrl_grpo.export), or use another backend."
        )
    rows = config.logging.sample_rows
    if rows != "all" and not (isinstance(rows, int) and rows > 0):
        raise ConfigError(
            f"logging.sample_rows={rows} must be all, or a whole number of at least 1: for "
            "example, all."
        )
    if config.evaluation.k == 1:
        raise ConfigError(
            "evaluation.k=1 must be 0 or at least 2 (pass@1 is measured greedy): for example, "
            "evaluation.k=8."
        )


def _validate_policy(config: GRPOConfig) -> None:
    policy, env, every = config.policy, config.env, config.ref_model.refresh_every
    if policy.demonstrations:
        sampled = {
            "policy.dynamic_sampling": policy.dynamic_sampling,
            "env.difficulty_filter": env.difficulty_filter,
            "env.curriculum": env.curriculum,
            "env.sampling": env.sampling != "uniform" and env.sampling,
            "env.transforms": env.transforms,
            "env.environment": env.environment,
            "env.agent": env.agent,
            "policy.teacher_divergence": config.needs_teacher
            and not config.teacher_in_loss
            and "sampled",
            "policy.advantage_whiten": policy.advantage_whiten,
            "policy.advantage_level": policy.advantage_level != "sequence"
            and policy.advantage_level,
            "policy.turn_credit": policy.turn_credit != "sum" and policy.turn_credit,
            "policy.reward_scale": policy.reward_scale != 1 and policy.reward_scale,
            "policy.reward_bias": policy.reward_bias,
            "policy.reward_clip": policy.reward_clip,
            "policy.overlong_buffer": policy.overlong_buffer,
            "policy.kl_in_reward": policy.kl_in_reward,
            "policy.kl_to_behaviour_coef": policy.kl_to_behaviour_coef,
            "policy.proximal": policy.proximal != "behaviour" and policy.proximal,
            "policy.ratio_level": policy.ratio_level != "token" and policy.ratio_level,
            "policy.dual_clip": policy.dual_clip,
        }
        for name, value in sampled.items():
            if value:
                raise ConfigError(
                    f"{name}={_written(value)} must be left out with policy.demonstrations=true "
                    "(algo=sft): it is for responses that the policy sampled."
                )
        if env.repeats != 1:
            raise ConfigError(
                f"env.repeats={env.repeats} must be 1 with policy.demonstrations=true (algo=sft), "
                "which has one demonstration for each problem: leave it out."
            )
        target = str(policy.loss.get("_target_"))
        if target.startswith("torchrl_grpo.") and not target.endswith(".SFTLoss"):
            raise ConfigError(
                "policy.demonstrations=true needs "
                f"policy.loss._target_=torchrl_grpo.objectives.SFTLoss, it is {target}, whose "
                "ratio is to a policy that sampled: use algo=sft."
            )
        for name in ("advantage_mean", "advantage_std"):
            if (value := getattr(policy, name)) != "none":
                raise ConfigError(
                    f"policy.{name}={value} must be none with policy.demonstrations=true "
                    "(algo=sft), whose rewards are all 1: use algo=sft alone."
                )
        temperature = config.inference_model.temperature
        if (
            temperature != 1 and not config.teacher_in_loss
        ):  # a divergence has one (arXiv 2306.13649)
            raise ConfigError(
                f"inference_model.temperature={temperature:g} must be 1 with "
                "policy.demonstrations=true (algo=sft), whose loss is the log-likelihood as it "
                "is: leave it out, or use evaluation.temperature."
            )
    if policy.sft_coef:
        for name, value, why in (
            ("policy.demonstrations", policy.demonstrations, "algo=sft trains on nothing else"),
            (
                "policy.teacher_divergence",
                config.teacher_in_loss and policy.teacher_divergence,
                "the teacher has scored no demonstration: sampled works",
            ),
            ("env.agent", env.agent, "whose prompts are not those of the rows"),
            ("env.environment", env.environment, "whose prompts are not those of the rows"),
        ):
            if value:
                raise ConfigError(
                    f"policy.sft_coef={policy.sft_coef:g} must be left out with "
                    f"{name}={_written(value)}, {why}."
                )
    check_clip_epsilon(policy.clip_epsilon, "policy.clip_epsilon")
    check_behaviour_weight(policy.behaviour_weight, policy.proximal, "policy.behaviour_weight")
    check_bounds(policy.reward_clip, "policy.reward_clip")
    check_level(config.advantage_level, policy.advantage_mean, "policy.advantage_mean")
    if policy.turn_credit == "per_turn" and policy.advantage_level == "token":
        raise ConfigError(
            "policy.turn_credit=per_turn and policy.advantage_level=token exclude each other, "
            "both say what a token is credited with: use one of them alone."
        )
    if env.player is not None and config.advantage_level != "sequence":
        name = (
            "policy.turn_credit=per_turn"
            if policy.turn_credit == "per_turn"
            else "policy.advantage_level=token"
        )
        raise ConfigError(
            f"{name} must be left out with {env.player}, whose samples of one trajectory have no "
            "order in common: use one advantage for each trajectory."
        )
    if env.reward_combination == "gdpo":
        check_decoupled(
            config.advantage_level, policy.advantage_mean, "env.reward_combination=gdpo"
        )
        if config.shapes_reward or policy.dynamic_sampling:
            raise ConfigError(
                "env.reward_combination=gdpo must have neither policy.dynamic_sampling nor what "
                "changes the sum of the reward, it reads the parts: leave policy.reward_scale, "
                "reward_bias, reward_clip, overlong_buffer, kl_in_reward and dynamic_sampling "
                "out, or use env.reward_combination=sum."
            )
    others = {
        f"policy.teacher_coef={policy.teacher_coef:g}": config.needs_teacher,
        "policy.turn_credit=per_turn": policy.turn_credit == "per_turn",
        f"policy.sft_coef={policy.sft_coef:g}": policy.sft_coef > 0,
    }
    other = next((name for name, there in others.items() if there), None)
    if policy.dynamic_sampling and other is not None:
        raise ConfigError(
            f"policy.dynamic_sampling=true must be left out with {other}: a group whose rewards "
            "are all equal has a signal there."
        )
    if policy.dynamic_sampling:
        check_group_size(env.repeats, "group", "group", "env.repeats")
        wanted = config.dialog_turns_per_batch
        check_sampling_rounds(
            policy.max_sampling_rounds, env.num_envs, wanted, "policy.max_sampling_rounds"
        )
    check_group_size(env.repeats, policy.advantage_mean, policy.advantage_std, "env.repeats")
    if config.teacher.address:
        _validate_served_teacher(config)
    if config.needs_teacher != (config.teacher.model is not None):
        raise ConfigError(
            f"teacher.model={config.teacher.model or 'null'} and "
            f"policy.teacher_coef={policy.teacher_coef:g} go together: use algo=distill "
            "teacher.model=NAME, or neither."
        )
    if policy.reward_coef != 1 and not config.needs_teacher:
        raise ConfigError(
            f"policy.reward_coef={policy.reward_coef:g} must be 1 without a teacher beside it: "
            "leave it out, or use optimizer.lr."
        )
    if every is not None and not config.has_own_reference:
        why = "the adapters switched off are the reference (LoRA)"
        why = why if config.needs_reference else "policy.kl_coef=0 needs none"
        raise ConfigError(
            f"ref_model.refresh_every={every} needs a reference model apart from the trained one, "
            f"but {why}: leave ref_model.refresh_every out."
        )


def _validate_models(config: GRPOConfig) -> None:
    reference = config.ref_model
    if reference.sharded and (given := reference.num_devices or reference.devices):
        field = "num_devices" if reference.num_devices else "devices"
        raise ConfigError(
            f"ref_model.{field}={given} must be left out with ref_model.sharded=true, which puts "
            f"the reference model on the trained model's devices: leave ref_model.{field} out, or "
            "use ref_model.sharded=false."
        )
    dtype = config.train_model.dtype
    rounds_at_random = dtype == "bfloat16" and config.optimizer.name == "adamw_8bit"
    if dtype != "float32" and not (config.train_model.lora.enabled or rounds_at_random):
        raise ConfigError(
            f"train_model.dtype={dtype} must be float32 without LoRA, because the optimizer's "
            "small steps are lost in 16 bits: use train.mixed_precision=bf16, "
            "train_model.lora.enabled=true, or bfloat16 with optimizer.name=adamw_8bit, which "
            "rounds at random."
        )
    if config.model.revision is not None and (
        config.model.name == "starter" or Path(config.model.name).exists()
    ):
        raise ConfigError(
            f"model.revision={config.model.revision} is for a model on the hub, and "
            f"model.name={config.model.name} is on this machine: leave model.revision out."
        )
    if config.train_model.lora.enabled and "lm_head" in (
        targets := list(config.train_model.lora.target_modules)
    ):
        raise ConfigError(
            f"train_model.lora.target_modules=[{','.join(targets)}] must leave out lm_head, whose "
            "logits are never computed whole: use [all-linear], for example, which is all but the "
            "head."
        )
    for role in ("train_model", "inference_model", "ref_model", "teacher"):
        number, devices = getattr(config, role).num_devices, getattr(config, role).devices
        if number not in (None, "all") and not (type(number) is int and number >= 1):
            raise ConfigError(
                f"{role}.num_devices={number} must be a whole number of at least 1, or all: for "
                f"example, {role}.num_devices=2."
            )
        if number is not None and devices is not None:
            raise ConfigError(
                f"{role}.num_devices={number} and {role}.devices={list(devices)} exclude each "
                "other: give the number and let the devices be chosen, or give the devices."
            )
        if devices is not None and (
            not devices or min(devices) < 0 or len(set(devices)) < len(devices)
        ):
            raise ConfigError(
                f"{role}.devices={list(devices)} must be different indices of accelerators, from "
                "0: for example, [0]."
            )
    engine = config.inference_model
    stop = list(engine.stop)
    if "" in stop or sum(len(text.encode()) for text in stop) > MOST_STOP_BYTES:
        raise ConfigError(
            f"inference_model.stop={stop!s:.200} must be texts that are not empty, of at most "
            f"{MOST_STOP_BYTES} bytes together: for example, inference_model.stop=['</answer>']."
        )
    _check_arguments("inference_model.engine_kwargs", engine.engine_kwargs, "max_num_seqs: 512")
    stages = (engine.engine_kwargs or {}).get("pipeline_parallel_size", 1)
    if not isinstance(stages, int) or stages < 1:
        raise ConfigError(
            f"inference_model.engine_kwargs.pipeline_parallel_size={stages} must be a whole number "
            "of at least 1: for example, 2."
        )
    _check_arguments(
        "train_model.model_kwargs",
        config.train_model.model_kwargs,
        "experts_implementation: grouped_mm",
    )
    kind = ENGINES[engine.backend]
    for name, only, capability in _ENGINE_OPTIONS:
        if getattr(engine, name) != only and not getattr(kind, capability):
            others = " or ".join(engines_with(capability))
            raise ConfigError(
                f"inference_model.{name}={getattr(engine, name)} must be {only} with "
                f"inference_model.backend={engine.backend}: use "
                f"{only}{f', or inference_model.backend={others}' if others else ''}."
            )
    if kind.elsewhere:
        _validate_servers("inference_model", engine, f"inference_model.backend={engine.backend}")
    if engine.weight_transfer not in kind.weight_transfers:
        raise ConfigError(
            f"inference_model.weight_transfer={engine.weight_transfer} must be one of "
            f"{', '.join(kind.weight_transfers)} with inference_model.backend={engine.backend}: "
            f"use inference_model.weight_transfer={kind.weight_transfers[0]}."
        )


def _validate_servers(role: str, node: InferenceModelConfig | TeacherConfig, switch: str) -> None:
    """The addresses of servers, which have the devices that they have."""
    name = f"{role}.address"
    example = f"use {name}=[http://127.0.0.1:8000], for example."
    if not node.address:
        raise ConfigError(f"{switch} needs {name}: {example}")
    for address in node.address:
        if not _is_server(str(address)):
            raise ConfigError(f"{name} must have URLs of servers, {address!r} is none: {example}")
    if len({address.rstrip("/") for address in node.address}) < len(node.address):
        raise ConfigError(
            f"{name}={list(node.address)} must name each server once: leave out the second one."
        )
    for device in ("num_devices", "devices"):
        if getattr(node, device) is not None:
            raise ConfigError(
                f"{role}.{device}={getattr(node, device)} must be left out with {switch}, which "
                "runs on servers: give more addresses."
            )


def _is_server(address: str) -> bool:
    try:
        urlsplit(address).port  # noqa: B018
    except ValueError:  # no number from 0 to 65535, or half of an IPv6 address
        return False
    return re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", address) is not None


def _validate_served_teacher(config: GRPOConfig) -> None:
    """Refuse what a teacher on servers cannot do."""
    policy, teacher = config.policy, config.teacher
    _validate_servers("teacher", teacher, "teacher.address")
    if not config.needs_teacher:
        raise ConfigError(
            f"teacher.address={list(teacher.address)} must be left out without a teacher: use "
            "algo=distill teacher.model=NAME, or leave it out."
        )
    if config.teacher_in_loss and policy.teacher_top_k is None:
        raise ConfigError(
            f"policy.teacher_divergence={policy.teacher_divergence} needs policy.teacher_top_k "
            "with teacher.address, because a server states log-probs of some tokens and not what "
            "goes into its LM head: use policy.teacher_top_k=20, or "
            "policy.teacher_divergence=sampled."
        )
    if config.inference_model.temperature != 1:
        raise ConfigError(
            f"inference_model.temperature={config.inference_model.temperature} must be 1 with "
            "teacher.address, whose servers score at temperature 1: use "
            "inference_model.temperature=1."
        )


def _validate_exact(config: GRPOConfig) -> None:
    """Check that the engine can compute exactly what the trainer computes."""
    backend, exact = config.inference_model.backend, engines_with("exact")
    needed = (
        ("inference_model.backend", backend, backend if backend in exact else exact[0]),
        ("inference_model.dtype", config.inference_model.dtype, config.train_model.dtype),
        ("env.max_turns", config.env.max_turns, 1),
        ("train_model.lora.enabled", config.train_model.lora.enabled, False),
        (
            "train_model.num_devices",
            config.train_model.num_devices or len(config.train_model.devices or [0]),
            1,
        ),
        ("train_model.tensor_parallel_size", config.train_model.tensor_parallel_size, 1),
    )
    for name, value, only in needed if config.inference_model.exact else ():
        if value != only:
            raise ConfigError(
                f"inference_model.exact=true needs {name}={_written(only)}, it is "
                f"{_written(value)}: use that, or policy.proximal=recomputed, which works with all "
                "of them."
            )


def _validate_unread(config: GRPOConfig) -> None:
    """Refuse settings that nothing would read: the user believes that they have an effect."""
    values, defaults = (
        {name: value for name, _, value in leaves(node)} for node in (config, GRPOConfig())
    )
    in_workers = (
        config.env.tools or config.env.environment or config.env.player
    )  # of which there is then one
    for name, (switch, reads, use) in _READ_WITH.items():
        if name == "env.reward_timeout_s" and in_workers:
            continue
        if name == "policy.gae_gamma" and config.advantage_level == "turn":
            continue
        if name == "env.columns.completion" and config.needs_demonstrations:
            continue
        if values[switch] not in reads and values[name] != defaults[name]:
            raise ConfigError(
                f"{name}={values[name]} must be left out with {switch}={_written(values[switch])}, "
                f"where nothing reads it: use {switch}={use}, if you want it."
            )


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# Keys of inference_model that have one value where the engine lacks the capability of
# ``EngineKind``.
_ENGINE_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("in_flight", "wait", "updates_in_flight"),
    ("tensor_parallel_size", 1, "tensor_parallel"),
    ("stop", [], "stop_strings"),
    ("engine_kwargs", None, "own_arguments"),
    ("address", [], "elsewhere"),
    ("weights_folder", None, "elsewhere"),
)

# Keys that are read with some values of another key alone: that key, those values, one of them as
# it is written.
_READ_WITH: dict[str, tuple[str, Container[Any], str]] = {
    "policy.gae_gamma": ("policy.advantage_level", ("token",), "token"),
    "policy.gae_lambda": ("policy.advantage_level", ("token",), "token"),
    "policy.behaviour_cap": ("policy.behaviour_weight", ("truncate", "mask"), "mask"),
    "policy.behaviour_level": ("policy.behaviour_weight", ("truncate", "mask"), "mask"),
    "policy.max_sampling_rounds": ("policy.dynamic_sampling", (True,), "true"),
    "env.columns.completion": ("policy.demonstrations", (True,), "true"),
    "env.sampling_target": ("env.sampling", ("pass_rate",), "pass_rate"),
    "env.sampling_floor": ("env.sampling", ("pass_rate",), "pass_rate"),
    "policy.teacher_beta": ("policy.teacher_divergence", ("jsd",), "jsd"),
    "policy.teacher_top_k": ("policy.teacher_divergence", ("reverse", "forward", "jsd"), "reverse"),
    "policy.constant_length": ("policy.aggregation", ("constant",), "constant"),
    "evaluation.temperature": ("evaluation.k", range(2, 2**31), "8"),
    "evaluation.top_p": ("evaluation.k", range(2, 2**31), "8"),
    "evaluation.top_k": ("evaluation.k", range(2, 2**31), "8"),
    "evaluation.min_p": ("evaluation.k", range(2, 2**31), "8"),
    "evaluation.datasets": ("evaluation.num_prompts", range(1, 2**31), "200"),
    "env.reward_timeout_s": ("env.reward_workers", range(1, 2**31), "2"),
    "train_model.lora.r": ("train_model.lora.enabled", (True,), "true"),
    "train_model.lora.alpha": ("train_model.lora.enabled", (True,), "true"),
    "train_model.lora.target_modules": ("train_model.lora.enabled", (True,), "true"),
}

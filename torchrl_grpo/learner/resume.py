"""Going on from a checkpoint: which one, whether the config fits it, and what of it goes into the trainer.

What the saved state is made for must be as it was: the model, the data and its order, the sizes of a batch, the shape
of the optimizer. All that only steers the run from here on may change: its length, learning rate, loss, devices,
frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_grpo.checkpoint_files import checkpoints_in
from torchrl_grpo.config import GRPOConfig, renamed
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.learner.checkpoint import read_checkpoint, set_rng_state
from torchrl_grpo.learner.learner import Learner

_AS_BEFORE = (
    "seed",
    "model.name",
    "model.chat_template",
    "train_model.dtype",
    "train_model.lora",
    "inference_model.backend",
    "env.dataset",
    "env.difficulty",
    "env.dataset_config",
    "env.revision",
    "env.train_split",
    "env.test_fraction",
    "env.max_samples",
    "env.columns",
    "env.prompt_template",
    "env.system_prompt",
    "env.chat_template_kwargs",
    "env.datasets",
    "env.task",
    "env.num_envs",
    "env.repeats",
    "env.max_prompt_tokens",
    "policy.dynamic_sampling",
    "policy.max_sampling_rounds",
    "train.dialog_turns_per_batch",
    "train.mixed_precision",
    "optimizer.warmup_steps",
)
"""The options, or groups of options, that a checkpoint's state is made for."""


@dataclass(frozen=True)
class Resume:
    """A checkpoint that fits the config.

    Attributes:
        path: the file, absolute: every training rank reads it.
        step: steps that it has behind it.
        source: state of the source of batches.
        reference_version: of the weights that its reference model had; 0 is the base model.
    """

    path: Path
    step: int
    source: dict[str, Any]
    reference_version: int


def find_resume(config: GRPOConfig, plain: Mapping[str, Any], max_staleness: int) -> Resume | None:
    """The checkpoint of ``train.resume``, checked against the config; None without one.

    Args:
        config: validated.
        plain: the same as plain types.
        max_staleness: of this run.

    Raises:
        ConfigError: there is no such checkpoint, it is not whole, or an option does not fit it.
    """
    if config.train.resume is None:
        return None
    path, state = _find(config.train.resume)
    step, source = state["step"], dict(state["source"])
    if "tasks" not in source:
        raise ConfigError(
            f"train.resume={path} must be a checkpoint of this version, but an earlier one wrote it: resume it with "
            "that one, or start a new run."
        )
    tasks = source["tasks"]
    saved = renamed(state["config"])
    _check_options(saved, plain, path)
    if config.only_evaluates:
        tasks = source["tasks"] = []
    if tasks and max_staleness == 0:
        ahead = sum(len(task["wanted"]) for task in tasks)
        raise ConfigError(
            f"train.max_staleness=0 must be at least 1 with {path}, which has {ahead} groups that were drawn ahead of "
            "their training: use sota/grpo/grpo-async.py with train.max_staleness=1 or more."
        )
    every = saved["ref_model"]["refresh_every"]
    reference = source.get("reference_version", step - step % every if every else 0)
    if config.has_own_reference and reference not in (0, step):
        raise ConfigError(
            f"train.resume={path} must be a checkpoint whose reference model is known, but that had the weights of "
            f"step {reference}, which the checkpoint of step {step} does not have: use the checkpoint of step "
            f"{reference} (train.checkpoint_frequency={every or reference} would have written one)."
        )
    return Resume(path, step, source, reference)


def check_length(resume: Resume, config: GRPOConfig) -> None:
    """Checks that there is something left to do.

    Raises:
        ConfigError: the checkpoint has all steps of the run behind it.
    """
    done, train = resume.step * config.dialog_turns_per_batch, config.train
    if config.only_evaluates or resume.step < config.num_batches:
        return
    field, value, use = "total_dialog_turns", train.total_dialog_turns, 2 * done
    if train.total_epochs is not None:
        field, value, use = "total_epochs", train.total_epochs, done * train.total_epochs // value + 1
    raise ConfigError(
        f"train.{field}={value} must be more than the {done} trajectories that {resume.path} has behind it: use "
        f"train.{field}={use}, say."
    )


def check_tasks(resume: Resume, task_groups: int, config: GRPOConfig) -> None:
    """Checks that the samplers play tasks of the size of those that are to be played again.

    Raises:
        ConfigError: they do not.
    """
    sizes = {len(task["groups"]) for task in resume.source["tasks"]}
    if sizes - {task_groups}:
        before = config.env.num_envs // config.env.repeats // max(sizes)
        raise ConfigError(
            f"inference_model.num_devices must be {before}, as in {resume.path}, which has unfinished work for so many "
            f"samplers: use inference_model.num_devices={before}."
        )


def restore(learner: Learner, resume: Resume) -> None:
    """Restores a learner and the random generators of its process; learning rate and the like are the config's.

    With several ranks each of them calls this.
    """
    state, trainer = read_checkpoint(resume.path, trusted=True), learner.trainer
    saved: dict[str, Any] = dict(state["trainer"])
    configured = [{**group, "params": None} for group in trainer.optimizer.param_groups]
    scheduler: Any = trainer.scheduler
    if scheduler is not None:
        saved["scheduler"] = saved["scheduler"] | {"base_lrs": scheduler.base_lrs}
    learner.load_state_dict(saved)
    for index, (group, settings) in enumerate(zip(trainer.optimizer.param_groups, configured, strict=True)):
        group |= settings | {"params": group["params"]}
        if scheduler is not None:
            group["lr"] = scheduler.base_lrs[index] * scheduler.lr_lambdas[index](scheduler.last_epoch)
    set_rng_state(state["rng"])


def _find(given: str) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at a path, or the latest whole one of a run's folder."""
    path = Path(given).expanduser().resolve()
    if path.is_file():
        try:
            return path, read_checkpoint(path)
        except ValueError as error:
            raise ConfigError(
                f"train.resume={given} must be a whole checkpoint of this library, but {error}: give a "
                "checkpoint_*.pt, or the run's folder to have its latest whole one."
            ) from error
    for candidate in [*checkpoints_in(path / "checkpoints"), *checkpoints_in(path)]:
        try:
            return candidate, read_checkpoint(candidate)
        except ValueError as error:
            torchrl_logger.warning(f"train.resume={given}: {candidate} is passed over, {error}.")
    found = "has none" if path.is_dir() else "does not exist"
    raise ConfigError(
        f"train.resume={given} must be a checkpoint_*.pt, or a run's folder that has one, but it {found}: give such a "
        "path, or leave train.resume out to start a new run."
    )


def _check_options(saved: Mapping[str, Any], plain: Mapping[str, Any], path: Path) -> None:
    before, here = (dict(_made_for(config)) for config in (saved, plain))
    for name, value in here.items():
        if name in before and before[name] != value:
            there = _written(before[name])
            raise ConfigError(
                f"{name}={_written(value)} must be {there}, as in {path}, whose state is made for it: use "
                f"{name}={there}."
            )


def _made_for(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options that must be as before, by their dotted names, with the defaults that follow from others."""
    leaves = dict(_leaves(config))
    for name, value in leaves.items():
        if any(name == fixed or name.startswith(f"{fixed}.") for fixed in _AS_BEFORE):
            yield name, leaves["env.num_envs"] if name == "train.dialog_turns_per_batch" and value is None else value


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _written(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

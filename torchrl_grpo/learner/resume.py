"""Resuming: find the checkpoint, check that its state fits this run, and restore the trainer.

``config.resumed`` decides which options may differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl import torchrl_logger

from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.config.resumed import check_options, differences
from torchrl_grpo.errors import ConfigError, RunLostError
from torchrl_grpo.host.checkpoint_files import AUTO, newest
from torchrl_grpo.learner.checkpoint import read_checkpoint, set_rng_state
from torchrl_grpo.learner.learner import Learner

_STATE: dict[str, Any] = {
    "step": int,
    "trainer": {
        **dict.fromkeys(("optimizer", "scheduler", "scaler"), dict),
        **dict.fromkeys(("version", "optim_steps", "skipped_steps", "nonfinite_in_a_row"), int),
    },
    "source": {
        "drawing": {
            **dict.fromkeys(("seed", "epoch", "position", "next_group", "num_problems"), int),
            "problems": str,
        },
        "ahead": list,
        "engines": list,
        "reference_version": int,
    },
    "rng": {"python": list, "torch": Tensor, "cuda": list},
}
"""Types of a state's entries; numbers must not be negative."""
_ACCELERATOR_RNG = 16
"""Size in bytes of the state of an accelerator's random generator."""


@dataclass(frozen=True)
class Resume:
    """A checkpoint that fits the config.

    Attributes:
        path: absolute path of the folder, which every training rank reads.
        step: number of finished steps.
        source: state of the source of batches.
        reference_version: version of the reference model's weights; 0 is the base model.
        date: date that chat templates write, in ISO 8601.
        differences: options that differ between its config and this run's, one row each.
    """

    path: Path
    step: int
    source: dict[str, Any]
    reference_version: int
    date: str
    differences: list[dict[str, Any]] = field(default_factory=list)


def find_resume(
    config: GRPOConfig, plain: Mapping[str, Any], directory: Path = Path()
) -> Resume | None:
    """Return the checkpoint of ``train.resume``, checked against the config; None without one.

    Args:
        config: validated config.
        plain: the same config as plain types.
        directory: folder of this run.

    Raises:
        ConfigError: there is no such checkpoint, it is not complete, or an option does not fit it.
    """
    checkpoint = config.train.resume and newest(config.train.resume, directory, _read)
    if not checkpoint:
        return None
    path, state = checkpoint
    step = state["step"]
    source = dict(state["source"])
    saved = state["config"]
    check_options(saved, plain, path)
    if config.only_evaluates:
        source["ahead"] = []
    every = saved.get("ref_model", {}).get("refresh_every")
    reference = source["reference_version"]
    if config.has_own_reference and reference not in (0, step):
        raise ConfigError(
            f"train.resume={path} must be a checkpoint whose reference model is known, but its "
            f"reference model had the weights of step {reference}, which the checkpoint of step "
            f"{step} does not contain: use the checkpoint of step {reference} "
            f"(train.checkpoint_frequency={every or reference} would have written one)."
        )
    return Resume(path, step, source, reference, state["date"], differences(saved, plain))


def check_length(resume: Resume, config: GRPOConfig) -> None:
    """Check that steps remain.

    Raises:
        ConfigError: the checkpoint already has all steps of the run.
    """
    train = config.train
    if config.only_evaluates or resume.step < config.num_batches or train.resume == AUTO:
        return  # with auto, the model may still have to be written
    trajectories = resume.step * config.dialog_turns_per_batch
    field, value = "total_dialog_turns", train.total_dialog_turns
    suggestion = 2 * trajectories
    if train.total_epochs is not None:
        field, suggestion = "total_epochs", trajectories * train.total_epochs // value + 1
        value = train.total_epochs
    if train.total_steps is not None:
        field, value, suggestion = "total_steps", train.total_steps, 2 * resume.step
    raise ConfigError(
        f"train.{field}={value} must be more than the {trajectories} trajectories that "
        f"{resume.path} has trained: for example, train.{field}={suggestion}."
    )


def restore(learner: Learner, resume: Resume) -> None:
    """Restore a learner and its process's random generators. Settings such as the learning rate
    come from the config.

    Every rank calls this.
    """
    with refusing(resume.path):
        _restore(learner, resume)


def _restore(learner: Learner, resume: Resume) -> None:
    state = read_checkpoint(resume.path, trusted=True)
    trainer = learner.trainer
    saved: dict[str, Any] = dict(state["trainer"])
    configured = [{**group, "params": None} for group in trainer.optimizer.param_groups]
    scheduler: Any = trainer.scheduler
    if scheduler is not None:
        initial = scheduler.state_dict()
        progress = {
            name: value
            for name, value in saved["scheduler"].items()
            if name not in ("base_lrs", "lr_lambdas") and type(value) is type(initial.get(name))
        }
        saved["scheduler"] = initial | progress
    learner.load_state_dict(saved, resume.path)
    for index, (group, settings) in enumerate(
        zip(trainer.optimizer.param_groups, configured, strict=True)
    ):
        group |= settings | {"params": group["params"]}
        if scheduler is not None:
            group["lr"] = scheduler.base_lrs[index] * scheduler.lr_lambdas[index](
                scheduler.last_epoch
            )
    set_rng_state(state["rng"])


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Context for restoring a state that turns any error into a one-line message.

    Raises:
        ConfigError: the state does not fit this run.
    """
    try:
        yield
    except (ValueError, RunLostError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a foreign state may raise anything
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.300}"
        raise ConfigError(
            f"train.resume={path} must be a checkpoint whose state fits this run, but it cannot be "
            f"restored ({reason}): use another one."
        ) from error


def _check_state(state: Any, form: Mapping[str, Any], name: str) -> None:
    """Check that a state has entries of the right types.

    Raises:
        ValueError: an entry has another type.
    """
    for key, kind in form.items():
        value = state.get(key) if isinstance(state, dict) else None
        if isinstance(kind, dict):
            _check_state(value, kind, f"{name}.{key}")
            continue
        fits = type(value) is int and 0 <= value < 2**63 if kind is int else isinstance(value, kind)
        if not fits:
            raise ValueError(f"{name} has an invalid {key}")


def _check_random(rng: Mapping[str, Any], engines: Sequence[Mapping[str, Any]]) -> None:
    """Try the states of random generators. An accelerator's engine has a state of another form."""
    version, numbers, gauss = rng["python"]
    random.Random().setstate((version, tuple(numbers), gauss))
    engine_states = [engine["generator"] for engine in engines if "generator" in engine]
    for state in (rng["torch"], *engine_states):
        if len(state) != _ACCELERATOR_RNG:
            torch.Generator().set_state(state)


def _check_optimizer(optimizer: Mapping[str, Any]) -> None:
    """Check an optimizer's state except for its moments, which are read into tensors of the right
    shape. The count of steps must be a scalar, because a kernel would read beyond anything else.

    Raises:
        ValueError: the state is invalid.
    """
    states = optimizer.get("state", {})
    groups = optimizer.get("param_groups", ())
    if not states.keys() <= {name for group in groups for name in group["params"]}:
        raise ValueError("the optimizer's state and its groups have different parameters")
    for name, state in states.items():
        step = state["step"]
        scalar = step.layout == torch.strided and step.shape == ()
        if state.keys() != {"step"} or not scalar or not 0 <= step.item() < math.inf:
            raise ValueError(f"the optimizer's state of {name} has no valid count of steps")


def _check_position(source: Mapping[str, Any], name: str) -> None:
    """Check the position in the data, and the groups that were drawn ahead.

    Raises:
        ValueError: the position or a group is invalid.
    """
    drawing = source["drawing"]
    ahead = source["ahead"]
    pairs = all(isinstance(pair, list) and [*map(type, pair)] == [int, int] for pair in ahead)
    if (
        not pairs
        or drawing["position"] > drawing["num_problems"]
        or len({group for group, _ in ahead}) < len(ahead)
    ):
        raise ValueError(f"{name} has an invalid position in its data")


def _read(path: Path) -> dict[str, Any]:
    """Read a checkpoint and check its state. Log the reason if it is refused."""
    name = path.name
    try:
        state = read_checkpoint(path)
        _check_state(state, _STATE, name)
        _check_position(state["source"], name)
        engines = [*filter(None, state["source"]["engines"])]
        for engine in engines:
            form = {"policy_version": int, "transforms": dict}
            _check_state({"transforms": {}} | engine, form, f"{name}.source.engines")
        version = state["trainer"]["version"]
        if version != state["step"]:
            raise ValueError(f"{name} has the weights of step {version}, which is another step")
        try:
            _check_random(state["rng"], engines)
            _check_optimizer(state["trainer"]["optimizer"])
            datetime.fromisoformat(state["date"])
        except Exception as error:  # a foreign state may raise anything
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            raise ValueError(f"{name} does not contain a checkpoint ({reason})") from error
        return state
    except ValueError as error:
        torchrl_logger.warning(f"{path} is not used: {error}.")
        raise

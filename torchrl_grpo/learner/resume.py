"""Resuming: find the checkpoint, check that its state fits this run, and restore the trainer.

Which options may differ says ``config.resumed``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl import torchrl_logger

from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.config.resumed import check_options, differences
from torchrl_grpo.errors import ConfigError, RunLostError
from torchrl_grpo.host.checkpoint_files import AUTO, is_sharded, newest
from torchrl_grpo.learner.checkpoint import check_finite, is_whole, read_checkpoint, set_rng_state
from torchrl_grpo.learner.learner import Learner

_STATE: dict[str, Any] = {
    "step": int,
    "trainer": {
        **dict.fromkeys(("model", "optimizer", "scheduler", "scaler"), dict),
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
"""Types of the entries of a state; numbers are not negative."""
_ACCELERATOR_RNG = 16
"""Bytes of the state of an accelerator's random generator."""


@dataclass(frozen=True)
class Resume:
    """A checkpoint that fits the config.

    Attributes:
        path: the file or folder, absolute: every training rank reads it.
        step: steps that it has behind it.
        source: state of the source of batches.
        reference_version: of the weights that its reference model had; 0 is the base model.
        differences: between its config and that of this run, a row an option.
    """

    path: Path
    step: int
    source: dict[str, Any]
    reference_version: int
    differences: list[dict[str, Any]] = field(default_factory=list)


def find_resume(
    config: GRPOConfig, plain: Mapping[str, Any], directory: Path = Path()
) -> Resume | None:
    """Return the checkpoint of ``train.resume``, checked against the config; None without one.

    Args:
        config: validated.
        plain: the same as plain types.
        directory: of this run.

    Raises:
        ConfigError: there is no such checkpoint, it is not whole, or an option does not fit it.
    """
    if config.train.resume is None:
        return None
    found = newest(config.train.resume, directory, _read)
    if found is None:
        return None
    path, state = found
    step, source = state["step"], dict(state["source"])
    saved = state["config"]
    check_options(saved, plain, path)
    if config.only_evaluates:
        source["ahead"] = []
    every = saved.get("ref_model", {}).get("refresh_every")
    reference = source["reference_version"]
    if config.has_own_reference and reference not in (0, step):
        raise ConfigError(
            f"train.resume={path} must be a checkpoint whose reference model is known, but that "
            f"had the weights of step {reference}, which the checkpoint of step {step} does not "
            f"have: use the checkpoint of step {reference} "
            f"(train.checkpoint_frequency={every or reference} would have written one)."
        )
    return Resume(path, step, source, reference, differences(saved, plain))


def check_length(resume: Resume, config: GRPOConfig) -> None:
    """Check that steps remain.

    Raises:
        ConfigError: the checkpoint has all steps of the run behind it.
    """
    done, train = resume.step * config.dialog_turns_per_batch, config.train
    if config.only_evaluates or resume.step < config.num_batches or train.resume == AUTO:
        return  # with auto what is left may be to write the model
    field, value, use = "total_dialog_turns", train.total_dialog_turns, 2 * done
    if train.total_epochs is not None:
        field, value, use = (
            "total_epochs",
            train.total_epochs,
            done * train.total_epochs // value + 1,
        )
    raise ConfigError(
        f"train.{field}={value} must be more than the {done} trajectories that {resume.path} has "
        f"behind it: for example, train.{field}={use}."
    )


def restore(learner: Learner, resume: Resume) -> None:
    """Restore a learner and its process's random generators; learning rate and the like are the
    config's.

    With several ranks each of them calls this.
    """
    with refusing(resume.path):
        _restore(learner, resume)


def _restore(learner: Learner, resume: Resume) -> None:
    state, trainer = read_checkpoint(resume.path, trusted=True), learner.trainer
    saved: dict[str, Any] = dict(state["trainer"])
    configured = [{**group, "params": None} for group in trainer.optimizer.param_groups]
    scheduler: Any = trainer.scheduler
    if scheduler is not None:
        own = scheduler.state_dict()
        kept = {
            name: value
            for name, value in saved["scheduler"].items()
            if type(value) is type(own.get(name))
        }
        saved["scheduler"] = own | kept | {name: own[name] for name in ("base_lrs", "lr_lambdas")}
    learner.load_state_dict(saved, resume.path if is_sharded(resume.path) else None)
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
    """Context in which a state is restored: what does not fit ends the run with one line.

    Raises:
        ConfigError: it does not.
    """
    try:
        yield
    except (ValueError, RunLostError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever restoring a foreign state may raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.300}"
        raise ConfigError(
            f"train.resume={path} must be a checkpoint whose state fits this run, but it cannot be "
            f"restored ({reason}): use another one."
        ) from error


def _check_state(state: Any, form: Mapping[str, Any], name: str) -> None:
    """Check that a state has entries of the right types.

    Raises:
        ValueError: one is not.
    """
    for key, kind in form.items():
        value = state.get(key) if isinstance(state, dict) else None
        if isinstance(kind, dict):
            _check_state(value, kind, f"{name}.{key}")
        elif not isinstance(value, kind) or (
            kind is int and (type(value) is not int or not 0 <= value < 2**63)
        ):
            raise ValueError(f"{name} holds something else as {key}")


def _check_random(rng: Mapping[str, Any], engines: Sequence[Mapping[str, Any]]) -> None:
    """Try the states of random generators; an accelerator's engine has another kind."""
    version, numbers, gauss = rng["python"]
    random.Random().setstate((version, tuple(numbers), gauss))
    for saved in (
        rng["torch"],
        *(engine["generator"] for engine in engines if "generator" in engine),
    ):
        if len(saved) != _ACCELERATOR_RNG:
            torch.Generator().set_state(saved)


def _check_moments(trainer: Mapping[str, Any]) -> None:
    """Check that the optimizer's state is that of the weights: a kernel reads beyond a tensor that is too small.

    Raises:
        ValueError: it is not.
    """
    weights, optimizer = trainer["model"], trainer["optimizer"]
    moments = optimizer.get("state", {})
    grouped = {name for group in optimizer.get("param_groups", ()) for name in group["params"]}
    if not moments.keys() <= grouped <= weights.keys():
        raise ValueError("the optimizer has other parameters than the model")
    for name, key, value in (
        (name, key, value) for name, of in moments.items() for key, value in of.items()
    ):
        numbers = getattr(value, "codes", value)  # of torchao's 8 bits
        shape = () if key == "step" else weights[name].shape
        if not is_whole(numbers) or value.shape != shape or numbers.shape != shape:
            raise ValueError(f"{key} of {name} is no tensor of the weight's shape")
        check_finite([(f"{key} of {name}", numbers)])
        if key in ("step", "exp_avg_sq") and not hasattr(value, "codes") and (value < 0).any():
            raise ValueError(f"{key} of {name} is negative")


def _read(path: Path) -> dict[str, Any]:
    try:
        state = read_checkpoint(path)
        _check_state(state, _STATE, path.name)
        drawing, ahead = state["source"]["drawing"], state["source"]["ahead"]
        pairs = all(isinstance(pair, list) and [*map(type, pair)] == [int, int] for pair in ahead)
        if (
            not pairs
            or drawing["position"] > drawing["num_problems"]
            or len({group for group, _ in ahead}) < len(ahead)
        ):
            raise ValueError(f"{path.name} holds something else as the place in its data")
        engines = [*filter(None, state["source"]["engines"])]
        for engine in engines:
            _check_state(engine, {"policy_version": int}, f"{path.name}.source.engines")
        if state["trainer"]["version"] != state["step"]:
            raise ValueError(
                f"{path.name} has weights of step {state['trainer']['version']} as those of another step"
            )
        try:
            _check_random(state["rng"], engines)
            if not is_sharded(path):  # of which each tensor is read into one of the right shape
                _check_moments(state["trainer"])
        except Exception as error:  # whatever a foreign state may raise
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            raise ValueError(f"{path.name} holds something else ({reason})") from error
        return state
    except ValueError as error:
        torchrl_logger.warning(f"{path} is not used: {error}.")
        raise

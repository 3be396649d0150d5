"""``train.resume`` and the config: where the checkpoint is, what it keeps of its run, what may differ.

The saved config is the base, what the command line says goes on top. What a checkpoint's state is made for must be as
it was: the model, the data and its order, the sizes of a batch, the shape of the optimizer. All that only steers the
run from here on may change: its length, learning rate, loss, devices, frequencies. Nothing heavy is imported here, so
that what is refused is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hydra.conf import HydraConf
from omegaconf import OmegaConf

from torchrl_grpo.config.schema import GRPOConfig
from torchrl_grpo.config.security import code_in
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.checkpoint_files import checkpoints_in, read_manifest
from torchrl_grpo.host.files import METRICS_FILE, read_jsonl
from torchrl_grpo.host.trees import dotted

AUTO = "auto"
"""``train.resume=auto``: the newest checkpoint in the run's own folder, or a fresh start."""

_MOST = 3
"""Damaged checkpoints that are named."""

_AS_BEFORE = (
    "seed",
    "model.name",
    "model.revision",
    "model.chat_template",
    "train_model.dtype",
    "train_model.lora",
    "train_model.model_kwargs",
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
    "optimizer.name",
    "optimizer.warmup_steps",
)
"""The options, or groups of options, that a checkpoint's state is made for."""

_Read = TypeVar("_Read")


def on_saved_config(given: Any, hydra: HydraConf) -> Any:
    """The config to run: what was given or, with ``train.resume``, the saved one with the overrides on top.

    Args:
        given: what Hydra composed, of ``GRPOConfig``.
        hydra: of this job.

    Raises:
        ConfigError: there is no such checkpoint, it does not go with the overrides, or the run's folder has a run.
    """
    directory, resume = Path(hydra.runtime.output_dir), given.train.resume
    if resume is None:
        check_unused(directory)
        return given
    found = newest(resume, directory, _read_config)
    if found is None:
        return given
    path, saved = found
    base: Any = OmegaConf.merge(OmegaConf.structured(GRPOConfig), saved)
    names = {text.lstrip("+~").partition("=")[0] for text in hydra.overrides.task} | {"train.resume"}
    if "train.total_dialog_turns" in names:
        base.train.total_epochs = None
    for name in names:
        name = "policy" if name == "algo" else name  # an algorithm is a yaml of it
        OmegaConf.update(base, name, OmegaConf.select(given, name), merge=False)
    check_options(saved, OmegaConf.to_container(base), path)  # type: ignore[arg-type]
    _check_code(OmegaConf.to_container(base), OmegaConf.to_container(given), path)  # type: ignore[arg-type]
    return base


def _read_config(path: Path) -> dict[str, Any]:
    """The config in a checkpoint's manifest; a ``ValueError`` where there is none."""
    try:
        return dict(read_manifest(path)["config"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name} has no config that can be read") from error


def _check_code(base: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> None:
    """Refuses code that only the checkpoint names: reading a file of someone else's must not run what it says."""
    here = code_in(given)
    for name, value in code_in(base).items():
        if here.get(name) != value:
            raise ConfigError(
                f"{name}={written(value)} must be on the command line too, because {path} names code beside this "
                "package's, and a checkpoint alone must not decide what runs: add the override that set it, if the run "
                "is yours."
            )


def from_saved(saved: Mapping[str, Any]) -> GRPOConfig:
    """The config that a checkpoint keeps as plain types."""
    made: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(GRPOConfig), saved))
    return made


def newest(given: str, directory: Path, read: Callable[[Path], _Read]) -> tuple[Path, _Read] | None:
    """The newest checkpoint that can be read, and what was read; None if ``auto`` finds no checkpoints.

    Args:
        given: ``train.resume``: a file, the folder of a run, or ``auto``.
        directory: of this run.
        read: raises ``ValueError`` where a checkpoint is not to be used.

    Raises:
        ConfigError: there is no such checkpoint, or none that can be read.
    """
    path = directory.resolve() if given == AUTO else Path(given).expanduser().resolve()
    if path.is_file():
        try:
            return path, read(path)
        except ValueError as error:
            raise ConfigError(
                f"train.resume={given} must be a whole checkpoint of this library, but {error}: give a "
                "checkpoint_*.pt, or the run's folder to have its latest whole one."
            ) from error
    if given == AUTO and (path / "checkpoints").exists() and not (path / "checkpoints").is_dir():
        raise ConfigError(
            f"hydra.run.dir={path} must have a folder {path / 'checkpoints'}, but that is a file: move it away, or use "
            "another folder."
        )
    reasons: dict[Path, str] = {}
    while candidates := [one for one in _checkpoints(path, given) if one not in reasons]:  # a live run replaces its own
        for candidate in candidates:
            try:
                return candidate, read(candidate)
            except ValueError as error:
                reasons[candidate] = str(error)
    if given == AUTO and not reasons:
        return None
    if given == AUTO:
        more = f" and {len(reasons) - _MOST} more" if len(reasons) > _MOST else ""
        raise ConfigError(
            f"train.resume=auto must find a checkpoint that is whole, but of those in {path / 'checkpoints'} none is: "
            f"{'; '.join([*reasons.values()][:_MOST])}{more}. Nothing is thrown away: to start afresh use another "
            "hydra.run.dir, or move that folder away."
        )
    found = (
        ("has none" if path.is_dir() else "does not exist")
        if not reasons
        else f"has none: {'; '.join(reasons.values())}"
    )
    raise ConfigError(
        f"train.resume={given} must be a checkpoint_*.pt, or a run's folder that has one, but it {found}: give such a "
        "path, or leave train.resume out to start a new run."
    )


def _checkpoints(path: Path, given: str) -> list[Path]:
    """The checkpoints of a run's folder or, unless it is the run's own, in the folder itself."""
    return [*checkpoints_in(path / "checkpoints"), *([] if given == AUTO else checkpoints_in(path))]


def check_unused(directory: Path) -> None:
    """Checks that the folder of a new run has no run in it: the files of two runs would be mixed.

    Raises:
        ConfigError: it has one.
    """
    saved = checkpoints_in(directory / "checkpoints")
    rows = read_jsonl(directory / METRICS_FILE)
    if saved or rows:
        what = f"{saved[0].name}" if saved else f"{len(rows)} rows of {METRICS_FILE}"
        raise ConfigError(
            f"hydra.run.dir={directory} must be a folder without a run, but it has {what}: use train.resume=auto to go "
            "on with that run, or another folder."
        )


def check_options(saved: Mapping[str, Any], here: Mapping[str, Any], path: Path) -> None:
    """Checks that the options which a checkpoint's state is made for are as before.

    Args:
        saved: the config of the checkpoint at ``path``, as plain types.
        here: that of this run.
        path: for the message.

    Raises:
        ConfigError: one is not.
    """
    before = dict(_made_for(saved))
    for name, value in _made_for(here):
        if name in before and before[name] != value:
            there = written(before[name])
            raise ConfigError(
                f"{name}={written(value)} must be {there}, as in {path}, whose state is made for it: use "
                f"{name}={there}."
            )


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the differences between the config of a checkpoint and that of this run, a row per option."""
    before, now = dict(dotted(saved)), dict(dotted(here))
    return [
        {"option": name, "there": written(before.get(name)), "here": written(now.get(name))}
        for name in sorted({*before, *now} - {"train.resume"})
        if before.get(name) != now.get(name)
    ]


def _made_for(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options that must be as before, by their dotted names, with the defaults that follow from others."""
    leaves = dict(dotted(config))
    for name, value in leaves.items():
        if any(name == fixed or name.startswith(f"{fixed}.") for fixed in _AS_BEFORE):
            yield name, leaves["env.num_envs"] if name == "train.dialog_turns_per_batch" and value is None else value


def written(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

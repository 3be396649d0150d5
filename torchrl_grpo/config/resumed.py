"""``train.resume`` and the config: what a run that goes on keeps of the checkpoint's, and what may differ.

The saved config is the base, what the command line says goes on top. What a checkpoint's state is made for must be as
it was: the model, the data and its order, the size of a batch, the shape of the optimizer. All that only steers the
run from here on may change: its length, learning rate, loss, devices, frequencies, how many sequences are sampled at a
time. No file is read here: ``host.checkpoint_files`` finds the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from torchrl_grpo.config.schema import GRPOConfig
from torchrl_grpo.config.security import code_in
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.trees import dotted

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
    "env.dataset_options",
    "env.dataset_config",
    "env.revision",
    "env.train_split",
    "env.test_fraction",
    "env.max_samples",
    "env.columns.prompt",
    "env.columns.answer",
    "env.columns.messages",
    "env.prompt_template",
    "env.system_prompt",
    "env.chat_template_kwargs",
    "env.datasets",
    "env.task",
    "env.environment",
    "env.repeats",
    "env.curriculum",
    "env.max_prompt_tokens",
    "policy.dynamic_sampling",
    "policy.max_sampling_rounds",
    "train.dialog_turns_per_batch",
    "train.mixed_precision",
    "optimizer.name",
    "optimizer.warmup_steps",
)
"""The options, or groups of options, that a checkpoint's state is made for."""


def on_saved_config(given: Any, overrides: Sequence[str], path: Path, saved: Mapping[str, Any]) -> Any:
    """The config of a run that goes on: the saved one with the overrides on top.

    Args:
        given: what Hydra composed, of ``GRPOConfig``.
        overrides: of the command line.
        path: of the checkpoint, for messages.
        saved: its config, as plain types.

    Raises:
        ConfigError: they do not go together.
    """
    base: Any = OmegaConf.merge(OmegaConf.structured(GRPOConfig), saved)
    names = {text.lstrip("+~").partition("=")[0] for text in overrides} | {"train.resume"}
    if "train.total_dialog_turns" in names:
        base.train.total_epochs = None
    for name in names:
        name = "policy" if name == "algo" else name  # an algorithm is a yaml of it
        OmegaConf.update(base, name, OmegaConf.select(given, name), merge=False)
    check_options(saved, OmegaConf.to_container(base), path)  # type: ignore[arg-type]
    _check_code(OmegaConf.to_container(base), OmegaConf.to_container(given), path)  # type: ignore[arg-type]
    return base


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
        {"option": name, "resumed run": written(before.get(name)), "this run": written(now.get(name))}
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

"""``train.resume`` and the config: what a run that goes on keeps of the checkpoint's, and what may
differ.

The saved config is the base, what the command line says goes on top. What a checkpoint's state is
made for must be as it was: the model, the data and its order, the size of a batch, the shape of the
optimizer. All that only steers the run from here on may change: its length, learning rate, loss,
devices, frequencies, how many sequences are sampled at a time. No file is read here:
``host.checkpoint_files`` finds the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING, OmegaConf

from torchrl_grpo.config.fields import plain, written
from torchrl_grpo.config.rules import check_integers, check_values
from torchrl_grpo.config.schema import GRPOConfig
from torchrl_grpo.config.security import from_outside
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.text import clip, printable
from torchrl_grpo.host.trees import dotted, inner_nodes

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
_OF_MODEL = ("model.attn_implementation", "model.chat_template", "train_model.model_kwargs")
"""The options that make a model and its tokenizer, and that may name code or a file."""


def on_saved_config(
    composed: Any, overrides: Sequence[str], path: Path, saved: Mapping[str, Any]
) -> Any:
    """The config of a run that goes on: the saved one with the overrides on top.

    Args:
        composed: what Hydra composed, of ``GRPOConfig``.
        overrides: of the command line.
        path: of the checkpoint, for messages.
        saved: its config, as plain types.

    Raises:
        ConfigError: they do not go together, or the saved one must not be used.
    """
    names = {text.lstrip("+~").partition("=")[0] for text in overrides} | {"train.resume"}
    names = {"policy" if name == "algo" else name for name in names}  # an algorithm is a yaml of it
    base: Any = _accepted(_without(saved, names), path)
    if "train.total_dialog_turns" in names:
        base.train.total_epochs = None
    written_here = dict(inner_nodes(OmegaConf.to_container(composed)))
    for name in names & written_here.keys():
        value = written_here[name]
        # A merge replaces a list, whose entries it makes of their dataclass; a dict it would fill up.
        OmegaConf.update(base, name, value, merge=isinstance(value, list))
    here: Any = OmegaConf.to_container(base, resolve=True)
    for name, value in from_outside(here, OmegaConf.to_container(composed, resolve=True)):  # type: ignore[arg-type]
        raise ConfigError(
            f"{name}={shown(value)} must be on the command line too, because {path} names code, an "
            "address or a file beside it, and a checkpoint alone must not decide what runs and "
            "who is asked: add the override that set it, if the run is yours."
        )
    check_options(saved, here, path)
    return base


def from_saved(saved: Any, path: Path, *, trusted: bool) -> GRPOConfig:
    """The config that a checkpoint keeps as plain types, for a use of its model alone.

    Args:
        saved: the config.
        path: of the checkpoint, for messages.
        trusted: whether it may name code and files beside the checkpoint.

    Raises:
        ConfigError: it is no config, or names such.
    """
    base: Any = _accepted(saved, path)
    config = cast(GRPOConfig, OmegaConf.to_object(base))
    check_values(config)
    for name, value in from_outside(
        plain(config), plain(GRPOConfig()), () if trusted else _OF_MODEL
    ):
        raise ConfigError(
            f"{name}={shown(value)} needs --trust-remote-code, because it names code or a file "
            f"beside the checkpoint {path}: add that, if the run is yours."
        )
    return config


def _accepted(saved: Any, path: Path) -> Any:
    """Return a saved config, if it is plain data: options of the types that they have here, and no
    references.

    Raises:
        ConfigError: it is something else.
    """
    try:
        check_integers("", saved)
        for name, value in dotted(saved, into_lists=True):
            if "${" in f"{name}{value}" or value == MISSING:
                raise ConfigError(
                    f"{name}={shown(value)} must be a value and refers to another one"
                )
        base: Any = OmegaConf.merge(OmegaConf.structured(GRPOConfig), saved)
        OmegaConf.to_object(base)
    except Exception as error:  # whatever OmegaConf makes of a foreign file
        key = getattr(error, "full_key", None)
        what = f"{key + ': ' if key else ''}{shown(str(error).partition(chr(10))[0])}"
        raise ConfigError(
            f"{what}, in the config of {path}: add an override for that option, if the run is "
            "yours."
        ) from error
    return base


def _without(saved: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a config without what has one of the dotted names."""

    def pruned(node: Any, prefix: str) -> Any:
        if not isinstance(node, Mapping):
            return node
        return {
            key: pruned(value, f"{prefix}{key}.")
            for key, value in node.items()
            if f"{prefix}{key}" not in names
        }

    left: dict[str, Any] = pruned(saved, "")
    return left


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
            there = shown(before[name])
            raise ConfigError(
                f"{name}={shown(value)} must be {there}, as in {path}, whose state is made for it: "
                f"use {name}={there}."
            )


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the differences between the config of a checkpoint and that of this run, a row per
    option.
    """
    before, now = dict(dotted(saved)), dict(dotted(here))
    return [
        {
            "option": name,
            "resumed run": written(before.get(name)),
            "this run": written(now.get(name)),
        }
        for name in sorted({*before, *now} - {"train.resume"})
        if before.get(name) != now.get(name)
    ]


def _made_for(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options that must be as before, by their dotted names, with the defaults that follow from
    others.
    """
    leaves = dict(dotted(config))
    for name, value in leaves.items():
        if any(name == fixed or name.startswith(f"{fixed}.") for fixed in _AS_BEFORE):
            yield (
                name,
                leaves["env.num_envs"]
                if name == "train.dialog_turns_per_batch" and value is None
                else value,
            )


def shown(value: Any) -> str:
    """A value of a foreign config in a message: on one line, and not too long."""
    return clip(printable(written(value)), 200)

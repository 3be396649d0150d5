"""``train.resume`` and the config: which options a resumed run takes from the checkpoint, and which
may differ.

The overrides on the command line apply to the saved config. Options that the checkpoint's state
depends on must not change: the model, the data and its order, the batch size, the shape of the
optimizer. Options that only affect the rest of the run may change: its length, learning rate, loss,
devices, frequencies, the number of sequences sampled at a time. No file is read here:
``host.checkpoint_files`` finds the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING, OmegaConf

from torchrl_grpo.config.fields import plain, split_override, written
from torchrl_grpo.config.rules import check_integers, check_values
from torchrl_grpo.config.schema import LENGTHS, GRPOConfig
from torchrl_grpo.config.security import from_outside
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.text import clip, printable
from torchrl_grpo.host.trees import dotted, inner_nodes

_FIXED_OPTIONS = (
    "seed",
    "model.name",
    "model.revision",
    "model.chat_template",
    "train_model.dtype",
    "train_model.quantization",
    "train_model.lora",
    "train_model.train_vision",
    "train_model.model_kwargs",
    "ref_model.decay",
    "teacher.weights",
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
    "env.columns.images",
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
    "policy.value_coef",
    "train.dialog_turns_per_batch",
    "train.mixed_precision",
    "optimizer.name",
    "optimizer.warmup_steps",
)
"""Options, or groups of options, that a checkpoint's state depends on; of ``policy.value_coef``, only
whether it is 0."""
_MODEL_OPTIONS = (
    "model.attn_implementation",
    "model.chat_template",
    "train_model.lora.settings",
    "train_model.model_kwargs",
)
"""Options of a model and its tokenizer that may name code or a file."""
_REMOVED_KEYS = ("inference_model.check_sync", "inference_model.check_sync_tolerance")
"""Options of earlier versions, which checkpoints may have."""


def on_saved_config(
    composed: Any, overrides: Sequence[str], path: Path, saved: Mapping[str, Any]
) -> Any:
    """Return the config of a resumed run: the saved one with the overrides applied.

    Args:
        composed: the ``GRPOConfig`` that Hydra composed.
        overrides: overrides on the command line.
        path: of the checkpoint, for messages.
        saved: its config, as plain types.

    Raises:
        ConfigError: an override changes a fixed option, or the saved config must not be used.
    """
    names = {split_override(text.lstrip("~"))[0] for text in overrides} | {"train.resume"}
    names = {
        "policy" if name == "algo" else name for name in names
    }  # an algorithm is a file of policy options
    base: Any = _parse_saved(_without(saved, names), path)
    if not names.isdisjoint(LENGTHS):  # it replaces the saved one
        base.train.total_epochs = base.train.total_steps = None
    current = dict(inner_nodes(OmegaConf.to_container(composed)))
    for name in names & current.keys():
        OmegaConf.update(base, name, current[name], merge=True)  # here base has the defaults
    resumed: Any = OmegaConf.to_container(base, resolve=True)
    command_line: Any = OmegaConf.to_container(composed, resolve=True)
    for name, value in from_outside(resumed, command_line):
        raise ConfigError(
            f"{name}={excerpt(value)} must be on the command line too, because {path} must "
            "not choose code, addresses or other files by itself: add the override that set it, if the run "
            "is yours."
        )
    check_options(saved, resumed, path)
    return base


def from_saved(saved: Any, path: Path, *, trusted: bool) -> GRPOConfig:
    """Return the config saved in a checkpoint, given as plain types, to use only its model.

    Args:
        saved: the config.
        path: of the checkpoint, for messages.
        trusted: whether it may name code and other files than the checkpoint.

    Raises:
        ConfigError: it is not a config, or names code or files without being trusted.
    """
    base: Any = _parse_saved(saved, path)
    config = cast(GRPOConfig, OmegaConf.to_object(base))
    check_values(config)
    for name, value in from_outside(
        plain(config), plain(GRPOConfig()), () if trusted else _MODEL_OPTIONS
    ):
        raise ConfigError(
            f"{name}={excerpt(value)} needs --trust-remote-code, because {path} names code or "
            "another file: add it, if the run is yours."
        )
    return config


def _parse_saved(saved: Any, path: Path) -> Any:
    """Return a saved config, which must be plain data: options of the right types, without
    references.

    Raises:
        ConfigError: it is not.
    """
    try:
        check_integers("", saved)
        for name, value in dotted(saved, into_lists=True):
            if "${" in f"{name}{value}" or value == MISSING:
                raise ConfigError(f"{name}={excerpt(value)} must be a value, not a reference")
        base: Any = OmegaConf.merge(
            OmegaConf.structured(GRPOConfig), _without(saved, _REMOVED_KEYS)
        )
        OmegaConf.to_object(base)
    except Exception as error:  # a foreign file may make OmegaConf raise anything
        key = getattr(error, "full_key", None)
        what = f"{key + ': ' if key else ''}{excerpt(str(error).partition(chr(10))[0])}"
        raise ConfigError(
            f"{what}, in the config of {path}: add an override for that option, if the run is "
            "yours."
        ) from error
    return base


def _without(saved: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a config without the nodes that have one of the dotted names."""

    def pruned(node: Any, prefix: str) -> Any:
        if not isinstance(node, Mapping):
            return node
        return {
            key: pruned(value, f"{prefix}{key}.")
            for key, value in node.items()
            if f"{prefix}{key}" not in names
        }

    return pruned(saved, "")


def check_options(saved: Mapping[str, Any], here: Mapping[str, Any], path: Path) -> None:
    """Check that the options that a checkpoint's state depends on have not changed.

    Args:
        saved: the checkpoint's config, as plain types.
        here: this run's config.
        path: the checkpoint's path, for the message.

    Raises:
        ConfigError: an option has changed.
    """
    # Checkpoints from before there were critics have none.
    before = {"policy.value_coef": 0.0} | dict(_fixed_options(saved))
    for name, value in _fixed_options(here):
        old = before.get(name, value)
        if old != value and not (name == "policy.value_coef" and old and value):
            there = excerpt(old)
            also = {
                "train.dialog_turns_per_batch": " and a divisor of it as env.num_envs",
                "policy.value_coef": " and leave algo out",
            }.get(name, "")
            raise ConfigError(
                f"{name}={excerpt(value)} must be {there}, because the state in {path} depends on "
                f"it: use {name}={there}{also}."
            )


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the differences between a checkpoint's config and this run's, one row per option."""
    before = dict(dotted(saved))
    now = dict(dotted(here))
    return [
        {
            "option": name,
            "resumed run": written(before.get(name)),
            "this run": written(now.get(name)),
        }
        for name in sorted({*before, *now} - {"train.resume"})
        if before.get(name) != now.get(name)
    ]


def _fixed_options(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fixed options by their dotted names, with defaults that depend on other options
    filled in.
    """
    leaves = dict(dotted(config))
    for name, value in leaves.items():
        if f"{name}.".startswith(tuple(f"{fixed}." for fixed in _FIXED_OPTIONS)):
            if name == "train.dialog_turns_per_batch" and value is None:
                value = leaves["env.num_envs"]
            yield name, value


def excerpt(value: Any) -> str:
    """Return a value of a foreign config for a message: on one line, and not too long."""
    return clip(printable(written(value)), 200)

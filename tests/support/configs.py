"""Configs, composed like those of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from torchrl_grpo.config import GRPOConfig, from_hydra, register

ROOT = Path(__file__).parents[2]
"""The checkout."""
SMALL = (
    "env.num_envs=16", "env.repeats=4", "train.total_dialog_turns=32", "train.optim_batch_size=8",
    "evaluation.num_prompts=0", "logging.tensorboard=false",
)  # fmt: skip


register()


def last_of_each(words: Sequence[str]) -> list[str]:
    """Return a command line without overrides that a later one of the same key replaces."""
    names = [word.partition("=")[0] if "=" in word else None for word in words]
    return [
        word
        for index, word in enumerate(words)
        if names[index] is None or names[index] not in names[index + 1 :]
    ]


def composed(name: str, overrides: tuple[str, ...]) -> DictConfig:
    """Return the config that Hydra composes from a command line.

    Hydra applies overrides of values after it has composed the files, which takes most of the time
    and is done once for each choice of files.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    values = [override for override in parsed if _sets_a_value(override.key_or_group)]
    if any(override.is_sweep_override() for override in values):
        values = []
    files = tuple(override.input_line for override in parsed if override not in values)
    cfg = deepcopy(_composed(name, files))
    ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
    return cfg


def _sets_a_value(key: str) -> bool:
    return "." in key and "/" not in key and not key.startswith("hydra.")


@cache
def _composed(name: str, overrides: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "config")):
        return compose(name, overrides=list(overrides))


def compose_config(*overrides: str, name: str = "grpo_arithmetic") -> GRPOConfig:
    return from_hydra(composed(name, overrides))

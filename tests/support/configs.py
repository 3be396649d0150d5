"""Configs as a command line gives them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
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
    """A command line without the overrides that a later one of the same key replaces."""
    names = [word.partition("=")[0] if "=" in word else None for word in words]
    return [
        word
        for index, word in enumerate(words)
        if names[index] is None or names[index] not in names[index + 1 :]
    ]


def composed(name: str, overrides: tuple[str, ...]) -> DictConfig:
    """What Hydra makes of a command line."""
    return deepcopy(_composed(name, overrides))


@cache
def _composed(name: str, overrides: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "config")):
        return compose(name, overrides=list(overrides))


def compose_config(*overrides: str, name: str = "grpo_arithmetic") -> GRPOConfig:
    return from_hydra(composed(name, overrides))

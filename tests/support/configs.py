"""Configs as a command line gives them."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir

from torchrl_grpo.config import GRPOConfig, from_hydra, register

ROOT = Path(__file__).parents[2]
"""The checkout."""
SMALL = (
    "env.num_envs=16", "env.repeats=4", "train.total_dialog_turns=32", "train.optim_batch_size=8",
    "evaluation.num_prompts=0", "logging.tensorboard=false",
)  # fmt: skip


register()


def compose_config(*overrides: str, name: str = "grpo_arithmetic") -> GRPOConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "config")):
        return from_hydra(compose(name, overrides=list(overrides)))

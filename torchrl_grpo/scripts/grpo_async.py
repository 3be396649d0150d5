"""Asynchronous GRPO on Ray: rollout, reward, reference scoring and training overlap."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from torchrl_grpo.config import CONFIG_FILES
from torchrl_grpo.scripts import start_grpo_async
from torchrl_grpo.scripts.job import train


@hydra.main(version_base="1.3", config_path=CONFIG_FILES, config_name="grpo_gsm8k")
def main(cfg: DictConfig) -> float | None:
    """The run that the config describes; gives what a sweep is to raise."""
    return train(cfg, asynchronous=True)


if __name__ == "__main__":
    start_grpo_async()

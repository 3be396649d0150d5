"""GRPO, synchronous or, on Ray, asynchronous."""

from __future__ import annotations

from collections.abc import Callable

import hydra
from omegaconf import DictConfig

from torchrl_grpo.config import CONFIG_FILES
from torchrl_grpo.scripts.job import start, train


def job(*, asynchronous: bool) -> Callable[[], None]:
    """Return the entry point of ``grpo`` or, if asynchronous, of ``grpo-async``; it reads the
    command line.
    """

    @hydra.main(version_base="1.3", config_path=CONFIG_FILES, config_name="grpo_gsm8k")
    def main(cfg: DictConfig) -> float | None:
        """Train by the config; return the objective of a sweep."""
        return train(cfg, asynchronous=asynchronous)

    return main


if __name__ == "__main__":
    start(job(asynchronous=False))

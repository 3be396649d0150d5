"""What both scripts do: a job, from its config to its outcome."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from torchrl_grpo.config import check_command_line, from_hydra, orderly_exit, register, starting

register()


def train(cfg: DictConfig, *, asynchronous: bool = False) -> float | None:
    """Builds the run that the config describes, trains, and closes it whatever happens."""
    with orderly_exit():
        hydra_config = HydraConfig.get()
        config = from_hydra(cfg, hydra_config)
        with starting(config, asynchronous=asynchronous):  # takes seconds; --help and mistakes are answered before
            from torchrl_grpo.doctor import examine
            from torchrl_grpo.run import build

        if config.dry_run:
            if not examine(config, hydra_config.runtime.output_dir, asynchronous=asynchronous):
                sys.exit(1)
            return None
        with closing(build(config, hydra_config.runtime.output_dir, asynchronous=asynchronous)) as run:
            run.fit()
    return None


def command(main: Callable[[], object]) -> None:
    """Has ``main`` answer the command line."""
    with orderly_exit():
        sys.argv += check_command_line(sys.argv[1:])
        main()

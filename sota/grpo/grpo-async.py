"""Asynchronous GRPO on Ray: rollout, reward, reference scoring and training overlap.

Sequences are trained at most ``train.max_staleness`` steps after the weights that sampled them. The config is that of
``grpo.py``.

Launch lines:

    python sota/grpo/grpo-async.py --config-name grpo_arithmetic
    python sota/grpo/grpo-async.py --config-name grpo_arithmetic train.max_staleness=4 inference_model.num_devices=2
    python sota/grpo/grpo-async.py train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2
    python sota/grpo/grpo-async.py --cfg job
"""

from __future__ import annotations

import signal
import sys
from contextlib import closing

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is a run to save, Ctrl-C just ends the process

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from torchrl_grpo.config import check_command_line, from_hydra, orderly_exit, register, starting

register()


@hydra.main(version_base="1.3", config_path="../../config", config_name="grpo_gsm8k")
def main(cfg: DictConfig) -> None:
    """Builds the run that the config describes, trains, and closes it whatever happens."""
    with orderly_exit():
        hydra_config = HydraConfig.get()
        config = from_hydra(cfg, hydra_config)
        with starting(config, asynchronous=True):  # takes seconds; --help and mistakes are answered before
            from torchrl_grpo.doctor import examine
            from torchrl_grpo.run import build

        if config.dry_run:
            if not examine(config, hydra_config.runtime.output_dir, asynchronous=True):
                sys.exit(1)
            return
        with closing(build(config, hydra_config.runtime.output_dir, asynchronous=True)) as run:
            run.fit()


if __name__ == "__main__":
    with orderly_exit():
        sys.argv += check_command_line(sys.argv[1:])
        main()

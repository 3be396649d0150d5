"""Asynchronous GRPO on Ray: rollout, reward, reference scoring and training overlap.

The config is that of ``grpo.py`` and composes as there; running it is refused with a clear message in this version.

Launch lines:

    python sota/grpo/grpo-async.py --help
    python sota/grpo/grpo-async.py --cfg job train_model.num_devices=2
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from torchrl_grpo.config import ConfigError, check_command_line, from_hydra, orderly_exit, register

register()


@hydra.main(version_base="1.3", config_path="../../config", config_name="grpo_gsm8k")
def main(cfg: DictConfig) -> None:
    """Checks the config; there is no asynchronous source yet."""
    with orderly_exit():
        from_hydra(cfg)
        raise ConfigError(
            "grpo-async.py needs the Ray source, which this version does not have: use sota/grpo/grpo.py, which takes "
            "the same config."
        )


if __name__ == "__main__":
    with orderly_exit():
        check_command_line(sys.argv[1:])
    main()

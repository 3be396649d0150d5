"""The configuration: dataclasses that Hydra composes, and all rules that can be checked before
anything loads.

Hydra checks types and names when it composes the config; ``validate`` checks choices, ranges and
combinations. ``check_command_line`` catches what Hydra would report less clearly. Defaults are
in the files of the nodes and in ``config/*.yaml`` only.
"""

from torchrl_grpo.config.command_line import (
    CONFIG_FILES,
    check_command_line,
    compose,
    from_hydra,
    orderly_exit,
    register,
    split_command_line,
    starting,
)
from torchrl_grpo.config.fields import leaves, plain
from torchrl_grpo.config.rules import check_one_process, check_script, staleness_bound, validate
from torchrl_grpo.config.schema import GRPOConfig
from torchrl_grpo.errors import ConfigError

__all__ = [
    "CONFIG_FILES",
    "ConfigError",
    "GRPOConfig",
    "check_command_line",
    "check_one_process",
    "check_script",
    "compose",
    "from_hydra",
    "leaves",
    "orderly_exit",
    "plain",
    "register",
    "split_command_line",
    "staleness_bound",
    "starting",
    "validate",
]

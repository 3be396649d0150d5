"""The configuration: dataclasses that Hydra composes, and every rule that can be checked before
anything loads.

Types and names are checked by Hydra when the config is composed (``check_command_line`` says the
same in plainer words before that), choices, ranges and combinations by ``validate``. Defaults live
in ``schema`` and in ``config/*.yaml``, nowhere else.
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
from torchrl_grpo.config.rules import check_one_process, staleness_bound, validate
from torchrl_grpo.config.schema import GRPOConfig
from torchrl_grpo.errors import ConfigError

__all__ = [
    "CONFIG_FILES",
    "ConfigError",
    "GRPOConfig",
    "check_command_line",
    "check_one_process",
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

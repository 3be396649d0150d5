"""The configuration: dataclasses that Hydra composes, and every rule that can be checked before anything loads.

Types and names are checked by Hydra when the config is composed (``check_command_line`` says the same in plainer words
before that), ranges and combinations by ``validate``. Defaults live in ``schema`` and in ``config/*.yaml``, nowhere
else.
"""

from torchrl_grpo.config.command_line import check_command_line, from_hydra, orderly_exit, register
from torchrl_grpo.config.rules import validate
from torchrl_grpo.config.schema import (
    AdvantageLevel,
    Backend,
    ConfigError,
    GRPOConfig,
    InFlight,
    Precision,
    Proximal,
    WeightTransfer,
    leaves,
)

__all__ = [
    "AdvantageLevel",
    "Backend",
    "ConfigError",
    "GRPOConfig",
    "InFlight",
    "Precision",
    "Proximal",
    "WeightTransfer",
    "check_command_line",
    "from_hydra",
    "leaves",
    "orderly_exit",
    "register",
    "validate",
]

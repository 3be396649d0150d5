"""The GRPO loss module and its relatives."""

from torchrl_grpo.objectives.grpo import GRPOLoss
from torchrl_grpo.objectives.output import GRPOLossOutput
from torchrl_grpo.objectives.variants import (
    CISPOLoss,
    DemonstrationLoss,
    GMPOLoss,
    SAPOLoss,
    SFTLoss,
    VESPOLoss,
)

__all__ = [
    "CISPOLoss",
    "DemonstrationLoss",
    "GMPOLoss",
    "GRPOLoss",
    "GRPOLossOutput",
    "SAPOLoss",
    "SFTLoss",
    "VESPOLoss",
]

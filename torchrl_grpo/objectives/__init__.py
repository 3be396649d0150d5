"""The GRPO loss module and its relatives."""

from torchrl_grpo.objectives.grpo import GRPOLoss
from torchrl_grpo.objectives.output import GRPOLossOutput
from torchrl_grpo.objectives.variants import (
    CISPOLoss,
    ClipCovLoss,
    DemonstrationLoss,
    GMPOLoss,
    KLCovLoss,
    SAPOLoss,
    SFTLoss,
    VESPOLoss,
)

__all__ = [
    "CISPOLoss",
    "ClipCovLoss",
    "DemonstrationLoss",
    "GMPOLoss",
    "GRPOLoss",
    "GRPOLossOutput",
    "KLCovLoss",
    "SAPOLoss",
    "SFTLoss",
    "VESPOLoss",
]

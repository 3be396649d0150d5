"""The GRPO loss module and its relatives."""

from torchrl_grpo.objectives.grpo import GRPOLoss
from torchrl_grpo.objectives.output import GRPOLossOutput
from torchrl_grpo.objectives.variants import CISPOLoss, DemonstrationLoss, SAPOLoss, SFTLoss

__all__ = [
    "CISPOLoss",
    "DemonstrationLoss",
    "GRPOLoss",
    "GRPOLossOutput",
    "SAPOLoss",
    "SFTLoss",
]

"""Losses: ``PolicyLoss`` and the parts that it is made of, and ``GRPOLoss`` and its relatives, with
TorchRL's keywords.
"""

from torchrl_grpo.objectives.grpo import GRPOLoss
from torchrl_grpo.objectives.off_policy import OffPolicy
from torchrl_grpo.objectives.output import GRPOLossOutput
from torchrl_grpo.objectives.parts import (
    CISPO,
    GMPO,
    SAPO,
    VESPO,
    Clip,
    ClipCov,
    Distill,
    Entropy,
    KLCov,
    KLTo,
    LogLikelihood,
    NotTruncated,
    Part,
    Select,
    Surrogate,
    Term,
    TopEntropy,
    Valid,
)
from torchrl_grpo.objectives.policy_loss import PolicyLoss
from torchrl_grpo.objectives.tokens import Tokens
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
    "CISPO",
    "GMPO",
    "SAPO",
    "VESPO",
    "CISPOLoss",
    "Clip",
    "ClipCov",
    "ClipCovLoss",
    "DemonstrationLoss",
    "Distill",
    "Entropy",
    "GMPOLoss",
    "GRPOLoss",
    "GRPOLossOutput",
    "KLCov",
    "KLCovLoss",
    "KLTo",
    "LogLikelihood",
    "NotTruncated",
    "OffPolicy",
    "Part",
    "PolicyLoss",
    "SAPOLoss",
    "SFTLoss",
    "Select",
    "Surrogate",
    "Term",
    "Tokens",
    "TopEntropy",
    "VESPOLoss",
    "Valid",
]

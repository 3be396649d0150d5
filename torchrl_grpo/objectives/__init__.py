"""The GRPO loss module and its relatives."""

from torchrl_grpo.objectives.grpo import CISPOLoss, GRPOLoss, SAPOLoss

__all__ = ["CISPOLoss", "GRPOLoss", "SAPOLoss"]

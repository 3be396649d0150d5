"""TorchRL transforms: advantages of groups and reference log-probs."""

from torchrl_grpo.transforms.advantage import GroupAdvantage
from torchrl_grpo.transforms.kl_scoring import KLScoring

__all__ = ["GroupAdvantage", "KLScoring"]

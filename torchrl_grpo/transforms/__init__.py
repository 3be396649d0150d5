"""TorchRL transforms: shaped rewards, advantages of groups, reference log-probs."""

from torchrl_grpo.transforms.advantage import GroupAdvantage
from torchrl_grpo.transforms.history import HistoryTransforms
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.reward import RewardShaping

__all__ = ["GroupAdvantage", "HistoryTransforms", "KLScoring", "RewardShaping"]

"""TorchRL transforms: log-probs of the reference model and of teachers, shaped rewards, and
advantages.
"""

from typing import Any

from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.transforms.advantage import GroupAdvantage
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.reward import RewardShaping

__all__ = ["GroupAdvantage", "HistoryTransforms", "KLScoring", "RewardShaping"]


def __getattr__(name: str) -> Any:
    """Import ``HistoryTransforms`` on demand."""
    if name == "HistoryTransforms":
        return load_extra("history_transforms")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

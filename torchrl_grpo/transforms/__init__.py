"""TorchRL transforms: shaped rewards, group advantages, reference log-probs."""

from typing import TYPE_CHECKING, Any

from torchrl_grpo.transforms.advantage import GroupAdvantage
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.reward import RewardShaping

if TYPE_CHECKING:
    from torchrl_grpo.transforms.history import HistoryTransforms

__all__ = ["GroupAdvantage", "HistoryTransforms", "KLScoring", "RewardShaping"]


def __getattr__(name: str) -> Any:
    """Import ``HistoryTransforms`` on demand, because that imports vLLM if it is installed."""
    if name == "HistoryTransforms":
        from torchrl_grpo.transforms.history import HistoryTransforms

        return HistoryTransforms
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

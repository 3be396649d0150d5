"""Models: loading, sharding and their memory; batches as flat rows, in passes; and the log-probs of
their tokens.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_grpo.models.scoring import AdapterOffScorer, TokenScorer, WrapperScorer

__all__ = ["AdapterOffScorer", "TokenScorer", "WrapperScorer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # It imports torch, which ``memory`` and the planning of a run do not need.
    return getattr(import_module("torchrl_grpo.models.scoring"), name)

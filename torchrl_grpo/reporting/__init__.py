"""Output of a run while it lasts: terminal, files of metrics and samples, and trackers.
``extras/report`` and ``extras/view`` read the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_grpo.reporting.metrics import MetricsLogger

__all__ = ["MetricsLogger"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchrl_grpo.reporting import metrics  # imports torch, which the pages do not need

    return getattr(metrics, name)

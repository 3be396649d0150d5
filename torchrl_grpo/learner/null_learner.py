"""``NullLearner``: the learner of a run that evaluates a model on servers and loads no model."""

from __future__ import annotations

from typing import Any

from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.weights import DirectHandle, WeightHandle


class NullLearner(Learner):
    """Learner without a model: it has no weights, and trains, saves and exports nothing.

    Example:
        >>> learner = NullLearner()
        >>> learner.version, list(learner.weights().weights())
        (0, [])
    """

    version = 0
    resumable = True

    def __init__(self) -> None: ...

    def weights(self) -> WeightHandle:
        """Return an empty handle."""
        return DirectHandle(list)

    def samples(self, limit: int | None) -> list[dict[str, Any]]:
        """Return no rows, because no batch was trained."""
        return []

    def release(self, version: int) -> None:
        """Do nothing, because no weights are kept."""

    def sizes(self) -> tuple[int, int]:
        """Return zeros, because nothing is written."""
        return 0, 0

    def finish_save(self) -> None:
        """Do nothing, because nothing is being saved."""

    def close(self) -> None:
        """Do nothing, because nothing was sent."""

"""``Untrained``: the learner of a run that evaluates a model on servers, and loads none."""

from __future__ import annotations

from typing import Any

from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.weights import DirectHandle, WeightHandle


class Untrained(Learner):
    """Learner without a model: it gives no weights, and trains, saves and exports nothing.

    Example:
        >>> learner = Untrained()
        >>> learner.version, list(learner.weights().weights())
        (0, [])
    """

    version = 0
    resumable = True

    def __init__(self) -> None: ...

    def weights(self) -> WeightHandle:
        """Handle of no weights."""
        return DirectHandle(list)

    def samples(self, most: int | None) -> list[dict[str, Any]]:
        """Nothing: no batch was trained."""
        return []

    def release(self, version: int) -> None:
        """Nothing is kept."""

    def sizes(self) -> tuple[int, int]:
        """No bytes are written."""
        return 0, 0

    def finish_save(self) -> None:
        """Nothing is being saved."""

    def close(self) -> None:
        """Nothing was sent."""

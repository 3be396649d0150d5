"""The loop sends the first weights again if engine and trainer disagree about them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from torchrl_grpo.loop import Schedule, fit


class Learner:
    """A trainer whose log-probs differ by this many nats from those of engines with these weights."""

    version = 0

    def __init__(self, differences: dict[str, float]) -> None:
        self._differences, self.reasons = differences, list[str]()

    def weights(self) -> str:
        return "fast"

    def resend(self, version: int, reason: str) -> str:
        self.reasons.append(reason)
        return "slow"

    def mismatch(self, probe: str) -> tuple[float, float]:
        return self._differences[probe], 1.0


class Rollouts:
    """Two engines; one of them fails to receive weights by the fast path, silently."""

    def __init__(self) -> None:
        self.published: list[tuple[str, int]] = []

    def publish(self, handle: str, version: int) -> None:
        self.published.append((handle, version))

    def probes(self) -> list[str]:
        return ["other", self.published[-1][0]]

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[Any]]:
        return {}, []


@pytest.mark.parametrize(
    ("differences", "tolerance", "published"),
    [
        ({"other": 0.001, "fast": 0.2, "slow": 0.001}, 0.05, ["fast", "slow"]),
        ({"other": 0.001, "fast": float("nan"), "slow": 0.001}, 0.05, ["fast", "slow"]),
        ({"other": 0.001, "fast": 0.002}, 0.05, ["fast"]),
        ({}, None, ["fast"]),
    ],
)
def test_weights_on_trial_are_sent_again_where_log_probs_differ(
    differences: dict[str, float], tolerance: float | None, published: list[str]
) -> None:
    learner = Learner(differences)
    rollouts = Rollouts()
    fit(cast(Any, learner), cast(Any, rollouts), Schedule(0, verify_tolerance=tolerance))
    assert rollouts.published == [(handle, 0) for handle in published]
    assert len(learner.reasons) == len(published) - 1
    assert all("log-probs of engine and trainer differ by " in reason for reason in learner.reasons)

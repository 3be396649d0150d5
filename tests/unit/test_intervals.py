"""The interval of a mean over problems: against beta quantiles, and its coverage."""

from __future__ import annotations

from math import comb
from statistics import fmean

import numpy as np
import pytest

from torchrl_grpo.intervals import mean_interval


def test_right_and_wrong_problems_have_the_interval_of_a_beta_posterior() -> None:
    """Quantiles of Beta(c + 3/4, n - c + 3/4)."""
    assert mean_interval([1.0] * 45 + [0.0] * 5) == pytest.approx((0.7902, 0.9582), abs=0.006)
    low, high = mean_interval([1.0] * 20)
    assert (low, high) == pytest.approx((0.8589, 0.9997), abs=0.006)


def test_the_interval_of_accuracies_covers_in_95_percent_of_all_test_sets() -> None:
    """Exactly, over all outcomes of 50 problems; with one number of problems and one accuracy the
    coverage depends on which outcomes happen to be possible.
    """
    n = 50
    bounds = [mean_interval([1.0] * c + [0.0] * (n - c)) for c in range(n + 1)]
    coverage = [
        sum(
            comb(n, c) * p**c * (1 - p) ** (n - c)
            for c, (low, high) in enumerate(bounds)
            if low <= p <= high
        )
        for p in np.linspace(0.05, 0.95, 181)
    ]
    assert 0.94 < fmean(coverage) < 0.96 and min(coverage) > 0.915


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.2, pytest.param(0.7, marks=pytest.mark.nightly)])
def test_the_interval_of_averages_covers_in_95_percent_of_all_test_sets(mean: float) -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        solved = rng.binomial(8, rng.beta(2 * mean, 2 - 2 * mean, 100)) / 8
        low, high = mean_interval(solved)
        hits += low <= mean <= high
    assert hits / 1000 == pytest.approx(0.95, abs=0.016)  # 2.3 standard errors

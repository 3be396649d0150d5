"""Interval of a mean over problems. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def mean_interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean over all problems of which these are a random sample.

    Percentiles of the Bayesian bootstrap (Rubin 1981) with 3/4 of a problem more at 0 and at 1, so
    that the interval has a width even if all values are equal. For values of 0 and 1 it is that of
    a beta posterior, as Jeffreys' with 1/2 (Brown, Cai, DasGupta 2001); 3/4 covers few problems
    better. The same values always give the same interval.

    Args:
        values: one in [0, 1] for each problem, such as its share of correct samples.

    >>> low, high = mean_interval([1.0] * 45 + [0.0] * 5)
    >>> round(low, 2), round(high, 2)
    (0.79, 0.96)
    """
    levels, counts = np.unique([0.0, 1.0, *values], return_counts=True)
    shares = counts - (levels % 1 == 0) / 4
    weights = np.random.default_rng(0).gamma(shares, size=(5000, len(levels)))
    return tuple(np.quantile(weights @ levels / weights.sum(1), (0.025, 0.975)).tolist())

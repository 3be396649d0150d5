"""Interval of a mean over problems. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def mean_interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean over all problems of which these are a random sample.

    The bounds are percentiles of the Bayesian bootstrap (Rubin 1981) with two pseudo-problems of
    weight 3/4, at 0 and at 1, so the interval has a width even if all values are equal. For values
    of 0 and 1 it is the interval of a beta posterior, similar to the Jeffreys interval with weights
    of 1/2 (Brown, Cai, DasGupta 2001); weights of 3/4 have better coverage with few problems. The
    same values always give the same interval.

    Args:
        values: one value in [0, 1] per problem, such as its share of correct samples.

    >>> low, high = mean_interval([1.0] * 45 + [0.0] * 5)
    >>> round(low, 2), round(high, 2)
    (0.79, 0.96)
    """
    levels, counts = np.unique([0.0, 1.0, *values], return_counts=True)
    shares = counts - (levels % 1 == 0) / 4
    weights = np.random.default_rng(0).gamma(shares, size=(5000, len(levels)))
    return tuple(np.quantile(weights @ levels / weights.sum(1), (0.025, 0.975)).tolist())

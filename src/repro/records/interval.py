"""Repeats to numbers: the median and a bootstrap interval of it.

A seeded percentile bootstrap, so that the same records always give the same interval.
"""

import math
from collections.abc import Iterable

LEVEL = 0.95
RESAMPLES = 2000


def interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Median of `values` and the low and high end of its bootstrap interval at `LEVEL`.

    One value has no spread: low and high are nan then (matplotlib draws nothing for nan).
    Raises ValueError for no values, and for nan or infinite ones.
    """
    import numpy as np  # not above: claims are also checked where nothing is evaluated, and it takes 0.1 s

    sample = np.asarray(list(values), dtype=float)
    if sample.size == 0 or not np.isfinite(sample).all():
        raise ValueError(f"an interval needs at least one value and only finite ones, found {sample.tolist()}")
    middle = float(np.median(sample))
    if sample.size == 1:
        return middle, math.nan, math.nan
    # Sorted, so that the order in which records are found does not change the resamples.
    draws = np.random.default_rng(0).choice(np.sort(sample), size=(RESAMPLES, sample.size))
    low, high = np.quantile(np.median(draws, axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return middle, float(low), float(high)

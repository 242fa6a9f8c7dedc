"""Repeats to numbers: the median and a bootstrap interval of it.

A seeded percentile bootstrap, so that the same records always give the same interval.
"""

import math
from collections.abc import Iterable

RESAMPLES = 2000


def interval(values: Iterable[float], level: float = 0.95, seed: int = 0) -> tuple[float, float, float]:
    """Median of `values` and the low and high end of its bootstrap interval at `level`.

    One value has no spread: low and high are nan then (matplotlib draws nothing for nan).
    Raises ValueError for no values, for nan or infinite ones, and for a level outside (0, 1).
    """
    import numpy as np  # not with the module: whoever only loads the claims needs none

    sample = np.asarray(list(values), dtype=float)
    if sample.size == 0 or not np.isfinite(sample).all():
        raise ValueError(f"an interval needs at least one value and only finite ones, found {sample.tolist()}")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, must be between 0 and 1")
    middle = float(np.median(sample))
    if sample.size == 1:
        return middle, math.nan, math.nan
    # Sorted, so that the order in which records are found does not change the resamples.
    draws = np.random.default_rng(seed).choice(np.sort(sample), size=(RESAMPLES, sample.size))
    low, high = np.quantile(np.median(draws, axis=1), [(1 - level) / 2, (1 + level) / 2])
    return middle, float(low), float(high)

"""Intervals of repeated runs, at 95 %: of their mean, and of what another occasion would show.

Runs of one occasion (a stretch of time without a gap of an hour) share the machine's state of that day, so only the
means of occasions are independent. t-intervals of the mean of few such means have the coverage that they claim where
these are about normal, which logarithms of ratios of times are; tests/records/test_statistics.py simulates it.
"""

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import pairwise

LEVEL = 0.95
APART = timedelta(hours=1)  # runs that begin at least so far from each other are of two occasions


def mean_interval(means: Sequence[float]) -> tuple[float, float, float]:
    """Mean of independent values, and the ends of its t-interval. One value has no interval: infinite ends."""
    middle, spread = _mean_and_spread(means)
    half = _t(len(means) - 1) * spread / math.sqrt(len(means))
    return middle, middle - half, middle + half


def prediction_interval(means: Sequence[float], further: int = 1, level: float = LEVEL) -> tuple[float, float]:
    """Where the mean of so many further values of the same kind lies, with probability `level`."""
    middle, spread = _mean_and_spread(means)
    half = _t(len(means) - 1, level) * spread * math.sqrt(1 / further + 1 / len(means))
    return middle - half, middle + half


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    middle = sum(values) / len(values)
    if len(values) == 1:
        return middle, math.inf
    apart = [value - middle for value in values]
    return middle, math.sqrt(sum(each * each for each in apart) / (len(values) - 1))


def _t(freedom: int, level: float = LEVEL) -> float:
    """Quantile of Student's distribution that leaves half of what is outside `level` above it."""
    if freedom == 0:
        return 1.0
    from scipy.special import stdtrit  # not above: claims are also checked where nothing is evaluated

    return float(stdtrit(freedom, (1 + level) / 2))


def occasions(starts: Sequence[datetime]) -> list[int]:
    """For each start, the number of its occasion, from 0 on: a new one begins `APART` or more after the last start."""
    order = sorted(set(starts))
    number = dict.fromkeys(order[:1], 0)
    for before, start in pairwise(order):
        number[start] = number[before] + (start - before >= APART)
    return [number[start] for start in starts]

"""Intervals of repeated runs, at 95 %: of their mean, and of what another occasion would show.

Runs of one occasion (a stretch of time without a gap of an hour) share the machine's state of that day, so only the
means of occasions are independent. t-intervals of the mean of few such means have at least the coverage that they claim
where these are about normal, which logarithms of ratios of times are; tests/records/test_statistics.py simulates it.
"""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import pairwise

LEVEL = 0.95
OCCASIONS = 4  # that a verdict on times reads. Later ones are not read, or one could run until the wanted verdict comes
APART = timedelta(hours=1)  # runs that begin at least so far from each other are of two occasions


def mean_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Mean of independent groups of values (the pairs of an occasion, or single values), and the ends of its t-interval.
    One group has no interval: infinite ends."""
    middle, spread = _mean_and_spread(groups)
    half = _t(len(groups) - 1) * spread / math.sqrt(len(groups))
    return middle, middle - half, middle + half


def prediction_interval(
    groups: Sequence[Sequence[float]], further: int = 1, level: float = LEVEL
) -> tuple[float, float]:
    """Where the mean of so many further groups of the same kind lies, with probability `level`."""
    middle, spread = _mean_and_spread(groups)
    half = _t(len(groups) - 1, level) * spread * math.sqrt(1 / further + 1 / len(groups))
    return middle - half, middle + half


def _mean_and_spread(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean of the groups' means, and how far one lies from it: by the means, but no less than the values inside the
    groups let expect. Few means agree by chance now and then, though every one of them is uncertain."""
    means = [sum(group) / len(group) for group in groups]
    middle = sum(means) / len(means)
    if len(means) == 1:
        return middle, math.inf
    between = _squares(mean - middle for mean in means) / (len(means) - 1)
    inside = _squares(value - mean for group, mean in zip(groups, means, strict=True) for value in group)
    freedom = sum(len(group) - 1 for group in groups)
    within = inside / freedom * sum(1 / len(group) for group in groups) / len(groups) if freedom else 0.0
    return middle, math.sqrt(max(between, within))


def _squares(distances: Iterable[float]) -> float:
    return sum(each * each for each in distances)  # no power of them, which raises an error where this is infinite


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

"""Where the value of a claim lies, by its runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from repro.claims.reading import Reading
from repro.records import statistics
from repro.records.record import Record


def of(
    reading: Reading,
    values: list[float],
    occasions: list[int],
    pairs: Sequence[tuple[float, list[tuple[Path, Record]]]],
) -> tuple[float, tuple[float, float]]:
    """A claim's value, and its interval as `Reading.sampled` says."""
    if reading.banded:
        low, high = reading.band(pairs[0][1][0][1])
        return values[0], (low, high)
    if reading.sampled == "once":
        return values[0], (values[0], values[0])
    if reading.columns is not None:
        from repro.experiments.common import sequences  # pandas

        sides = [[found[side][0] for _, found in pairs] for side in range(len(reading.groups))]
        value, low, high = sequences.ratio(sides, *reading.columns, reading.complement)
        if reading.form == "reduction":
            value, low, high = 1 - value, 1 - high, 1 - low
        if len(values) > 1:  # other sequences are one source of chance, what a seed draws is another: both add up
            mean, (lowest, highest) = _of_mean(reading, values, occasions)
            low, high = value - math.hypot(value - low, mean - lowest), value + math.hypot(high - value, highest - mean)
        return value, (low, high)
    return _of_mean(reading, values, occasions)


def _of_mean(reading: Reading, values: list[float], occasions: list[int]) -> tuple[float, tuple[float, float]]:
    """The mean of the occasions, or of single values, and its t-interval."""
    scale = scale_of(reading, values)
    value, low, high = statistics.mean_interval(scale.groups(values, occasions))
    low, high = sorted((scale.back(low), scale.back(high)))
    return scale.back(value), (low, high)


@dataclass(frozen=True)
class Scale:
    """Where values are averaged: `to` takes a value there and `back` from there."""

    to: Callable[[float], float]
    back: Callable[[float], float]
    by_occasion: bool

    def groups(self, values: Sequence[float], occasions: Sequence[int]) -> list[list[float]]:
        """What is independent of each other: the values of each occasion; or each value."""
        there = [self.to(value) for value in values]
        if not self.by_occasion:
            return [[value] for value in there]
        return [[v for v, o in zip(there, occasions, strict=True) if o == number] for number in sorted(set(occasions))]


def _exp(there: float) -> float:
    return math.exp(there) if there < 700 else math.inf


PLAIN = Scale(lambda value: value, lambda value: value, by_occasion=True)
LOGARITHMS = Scale(math.log, _exp, by_occasion=True)


def scale_of(reading: Reading, values: Sequence[float]) -> Scale:
    """Logarithms for a ratio, and of 1 - value for a reduction; else values as they are."""
    ratio = any(other is not None for other in (reading.over, reading.sequence, reading.per))
    reduction, by_occasion = reading.form == "reduction", reading.sampled == "occasions"
    if not ratio or min(1 - value if reduction else value for value in values) <= 0:
        return replace(PLAIN, by_occasion=by_occasion)
    if reduction:
        return Scale(lambda value: math.log(1 - value), lambda there: 1 - _exp(there), by_occasion)
    return replace(LOGARITHMS, by_occasion=by_occasion)

"""Intervals of routing statistics by leaving out whole sequences, since tokens of one sequence resemble each other.

The series of a record has a row per held-out sequence: `stratum`, `unit`, and sums over its tokens such as `crossings`
and `transitions`. Sequences of one `unit` (number) are neighbours and are left out together; a `stratum` (name) is a
part whose size is fixed, such as one of two texts. The interval is about other sequences of the same kind: placements
are taken as they are.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from repro.records.record import read_series
from repro.records.statistics import LEVEL

KEYS = ["stratum", "unit"]


def half_width(left_out: np.ndarray, weights: np.ndarray, strata: np.ndarray, level: float = LEVEL) -> float:
    """Half of the interval around a statistic: Student's t times the jackknife's standard error.

    `left_out`: float64 [units], the statistic without each unit; `weights`: [units], tokens or transitions of each;
    `strata`: [units]. Satterthwaite's degrees of freedom, in which unequal units count as fewer equal ones (Kish's
    effective number). nan when some stratum has a single unit, or a statistic is not finite.
    """
    groups = [strata == stratum for stratum in np.unique(strata)]
    units = np.array([group.sum() for group in groups])
    if units.min() < 2 or not np.isfinite(left_out).all():
        return float("nan")
    variances = np.array([(group.sum() - 1) * np.var(left_out[group]) for group in groups])
    if variances.sum() == 0:
        return 0.0
    effective = np.array([weights[group].sum() ** 2 / (weights[group] ** 2).sum() for group in groups])
    freedom = variances.sum() ** 2 / (variances**2 / np.maximum(effective - 1, 0.5)).sum()
    return float(stdtrit(freedom, (1 + level) / 2) * np.sqrt(variances.sum()))


def pseudo_values(value: float, left_out: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """The jackknife's pseudo-values, float64 [units], of a statistic that is no mean, such as mutual information. Their
    mean is the statistic without the bias that few units cause, and they spread as it would with other units.

    `value`: the statistic of all; `left_out`, `strata`: as of `half_width`.
    """
    units = np.unique(strata, return_inverse=True, return_counts=True)
    in_stratum = units[2][units[1]]
    return value + len(left_out) * (in_stratum - 1) / in_stratum * (value - left_out)


def unbiased(
    value: float, left_out: np.ndarray, weights: np.ndarray, strata: np.ndarray, level: float = LEVEL
) -> tuple[float, float, float]:
    """The mean of `pseudo_values`, and the ends of its interval. Arguments as of `half_width`; nan where that is."""
    half = half_width(left_out, weights, strata, level)
    estimate = float(pseudo_values(value, left_out, strata).mean()) + 0 * half
    return estimate, estimate - half, estimate + half


def ratio_interval(sums: np.ndarray, strata: np.ndarray, level: float = LEVEL) -> tuple[float, float, float]:
    """A rate or a ratio of two, and the ends of its interval, which is symmetric in the logarithm.

    `sums`: float64 [units, 2] (numerator, denominator) or [units, 4] (of both sides; 0 where a unit is of one only).
    `strata`: [units], the stratum of each. Ends are nan as `half_width` says. ValueError when a rate is 0.
    """
    value, left_out = _log_ratio(sums.sum(axis=0)), _log_ratio(sums.sum(axis=0) - sums)
    if not np.isfinite(value):
        raise ValueError(f"a rate of {sums.sum(axis=0).tolist()} is 0 or none: it has no logarithm")
    half = half_width(left_out, sums[:, 1::2].max(axis=1), strata, level)
    return float(np.exp(value)), float(np.exp(value - half)), float(np.exp(value + half))


def ratio(
    sides: Sequence[Sequence[Path]], numerator: str, denominator: str, complement: bool = False, level: float = LEVEL
) -> tuple[float, float, float]:
    """`ratio_interval` of records: of the rate of one side, or of the first side's over the second's.

    `sides`: paths of the records of each. A side's rate is its sum of `numerator` over its sum of `denominator`,
    columns of the series; with `complement` 1 minus that. Records of a side (seeds, repeats) are pooled: what one unit
    adds in several of them is left out at once. ValueError when a side is empty or lacks a column, a rate is 0, or
    the sides share sequences but not all of them with equal denominators; RecordError without a series.
    """
    if not 1 <= len(sides) <= 2 or not all(sides):
        raise ValueError(f"records on {[len(side) for side in sides]} sides, allowed: one or two sides, none empty")
    tables = [_pooled(side, numerator, denominator, complement) for side in sides]
    if len(tables) == 2 and not _paired(*tables):
        tables = [pd.concat({side: table}) for side, table in enumerate(tables)]  # units and strata of their own
    table = pd.concat(tables, axis=1).fillna(0.0)
    return ratio_interval(table.to_numpy(), pd.factorize(table.index.droplevel(-1))[0], level)


def _pooled(paths: Sequence[Path], numerator: str, denominator: str, complement: bool) -> pd.DataFrame:
    """Sums of numerator and denominator of each unit over the records of one side."""
    rows = []
    for path in paths:
        series = read_series(path)
        if missing := {*KEYS, numerator, denominator} - set(series.columns):
            raise ValueError(f"{path}: its series has no {', '.join(sorted(missing))}")
        rows.append(series[[*KEYS, numerator, denominator]])
    sums = pd.concat(rows).groupby(KEYS).sum().astype(float)
    if complement:
        sums[numerator] = sums[denominator] - sums[numerator]
    return sums[[numerator, denominator]]


def _paired(one: pd.DataFrame, other: pd.DataFrame) -> bool:
    """Whether both sides are counted on the same sequences; False: on none of each other's. ValueError between."""
    shared = one.index.intersection(other.index)
    if shared.empty:
        return False
    if len(shared) < max(len(one), len(other)) or (one.iloc[:, 1] != other.iloc[:, 1].reindex(one.index)).any():
        counted = f"{len(one)} and {len(other)} units, {len(shared)} of them in both"
        raise ValueError(
            f"the two sides are counted on different sequences: {counted}; allowed: the same, or no common one"
        )
    return True


def _log_ratio(sums: np.ndarray) -> np.ndarray:
    """Logarithm of the rate or of the ratio of rates, of sums [..., numerator and denominator of each side]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(sums) @ np.array([1, -1, -1, 1])[: sums.shape[-1]]

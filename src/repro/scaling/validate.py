"""How good predictions of collectives are where nothing was fitted, and bands that say so beforehand.

A split cuts a table into rows that are fitted and rows that are held out: larger numbers of ranks, larger sizes. The band of
a prediction comes from the fitted rows alone. Some of them are left out in turn (folds), as the held-out rows are: every
third size, the largest sizes, the largest number of ranks, a collective. How far those predictions are off gives the
half-width at each size, and how much it grows with each doubling of the bytes or ranks beyond what was fitted.

Libraries have sizes at which they are slow, on many ranks as on few. Where the fitted rows show that, a prediction for
more ranks carries the error that the model has at this size on the most ranks that were measured (`carries`, `carried`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from repro.scaling.fit import Fit, Model, fit, predict, shaped

COVERAGE = 0.9
KINDS = ("bytes", "ranks", "collectives")  # of distance
CLOSE = 1.5  # ratio of sizes between which times are nearly a straight line
NEAREST = 30  # rows whose errors tell the width at a size: enough for a 90 % quantile


@dataclass(frozen=True, eq=False)
class Band:
    """Half-width of log(measured / predicted): of the fitted rows that are nearest in size, grown by what each doubling
    beyond the fitted ones adds. Variances add up: rates wander a little with each doubling, up or down.

    near     fitted rows by size: bytes, and the absolute log error when the row was left out
    growth   by kind of distance (`distances`), added to the squared half-width at a distance of 1
    """

    near: pd.Series
    growth: dict[str, float]

    def half_widths(self, rows: pd.DataFrame, away: pd.DataFrame) -> NDArray[np.float64]:
        """[rows] at these `distances`. ValueError where rows are away in a way that no fold was."""
        if unknown := [kind for kind in KINDS if (away[kind] > 0).any() and kind not in self.growth]:
            raise ValueError(f"no band beyond the fitted {unknown[0]}: the fitted rows have too few to leave one out")
        near = np.array([_quantile(_nearest(self.near, nbytes), COVERAGE) for nbytes in rows.nbytes])
        grown = sum((away[kind].to_numpy() * each for kind, each in self.growth.items()), np.zeros(len(rows)))
        return np.sqrt(near**2 + grown)


def _nearest(errors: pd.Series, nbytes: float) -> pd.Series:
    """Those of the `NEAREST` sizes next to `nbytes`, by ratio."""
    away = np.abs(np.log(_at_least_one(errors.index) / _at_least_one(nbytes)))
    return errors.iloc[np.argsort(away, kind="stable")[:NEAREST]]


def distances(fitted: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """How far `rows` are from what was fitted: doublings of the bytes and of the ranks beyond the fitted ones, and 1
    for a collective that was not fitted."""
    ranks, fitted_ranks = (table.sizes.map(np.prod).astype(float) for table in (rows, fitted))
    return pd.DataFrame(
        {
            "bytes": _beyond(_at_least_one(rows.nbytes), _at_least_one(fitted.nbytes)),
            "ranks": _beyond(ranks, fitted_ranks),
            "collectives": (~rows.collective.isin(fitted.collective.unique())).astype(float),
        },
        index=rows.index,
    )


def _at_least_one(nbytes: Any) -> Any:
    """For logarithms and ratios: no byte, as of osu_latency, is as one."""
    return np.maximum(nbytes, 1)


def _beyond(values: pd.Series, fitted: pd.Series) -> pd.Series:
    return np.maximum(np.log2(values / fitted.max()), np.log2(fitted.min() / values)).clip(lower=0)


def folds(table: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """Kind of distance ("" for none) and the rows to leave out, as a mask: every third size, thrice; the largest third
    and sixth of the sizes on a logarithmic scale; the larger numbers of ranks; each collective. None leaves nothing."""
    sizes = table.nbytes.rank(method="dense").astype(int)
    if sizes.max() > 2:
        yield from (("", sizes % 3 == k) for k in range(3))
        logs = np.log(_at_least_one(table.nbytes))
        yield from (("bytes", logs > logs.min() + part * (logs.max() - logs.min())) for part in (2 / 3, 5 / 6))
    ranks = table.sizes.map(np.prod)
    yield from (("ranks", ranks > most) for most in sorted(ranks.unique())[:-1])
    if table.collective.nunique() > 1:
        yield from (("collectives", table.collective == kind) for kind in table.collective.unique())


def carried(known: pd.DataFrame, rows: pd.DataFrame) -> NDArray[np.float64]:
    """[rows] The log error to expect of predictions, by the `log_error` of `known` ones: of the same collective and
    algorithm over the same levels, at the same bytes (of an all-to-all, to each rank). Linear in logarithms between the
    sizes and numbers of ranks that are known; the nearest beyond their ranks, and 0 beyond their sizes. Both tables have
    been `shaped`."""
    known, rows = _placed(known), _placed(rows)
    found = pd.Series(0.0, rows.index)
    groups = dict(iter(known.groupby(_ALIKE)))
    for key, asked in rows.groupby(_ALIKE):
        if key in groups:
            found[asked.index] = _interpolated(groups[key], asked)
    return found.to_numpy()


_ALIKE = ["collective", "algorithm", "crossed"]


def _placed(table: pd.DataFrame) -> pd.DataFrame:
    """With what errors are carried along: logarithms of ranks and bytes (of an all-to-all to each rank), levels crossed."""
    ranks = table.sizes.map(np.prod).astype(float)
    size = table.nbytes / np.where(table.collective == "all_to_all", ranks, 1)
    crossed = [f"{hop} {[n > 1 for n in sizes]}" for hop, sizes in zip(table.hop, table.sizes, strict=True)]
    return table.assign(log_ranks=np.log(ranks), log_size=np.log(_at_least_one(size)), crossed=crossed)


def _interpolated(known: pd.DataFrame, asked: pd.DataFrame) -> list[float]:
    """Log errors of the rows `asked` by those of `known`, first by size on each number of ranks, then by ranks."""
    errors = known.groupby(["log_ranks", "log_size"]).log_error.mean()
    ranks = errors.index.unique(0).to_numpy()
    there = [np.interp(asked.log_size, errors[n].index, errors[n], left=np.nan, right=np.nan) for n in ranks]
    return [
        float(np.interp(at, ranks[known_here], column[known_here])) if (known_here := ~np.isnan(column)).any() else 0.0
        for at, column in zip(asked.log_ranks, np.transpose(there), strict=True)
    ]


def carries(fitted: pd.DataFrame, model: Model) -> bool:
    """Whether predictions for the most ranks of `fitted`, by a fit to the others, are nearer (in the median) with the
    errors of the others carried over. False for a table of one number of ranks."""
    table = shaped(fitted, model)
    ranks = table.sizes.map(np.prod)
    most = ranks == ranks.max()
    if most.all():
        return False
    found = fit(table[~most], model)
    plain, carrying = (
        predicted(found, table[~most], table[most], carry).log_error.abs().median() for carry in (False, True)
    )
    return bool(carrying < plain)


def predicted(found: Fit, known: pd.DataFrame, rows: pd.DataFrame, carry: bool) -> pd.DataFrame:
    """`predict`; with `carry` less what is `carried` from the rows `known`."""
    table = predict(found, rows)
    if not carry:
        return table
    off = carried(predict(found, known), table)
    return table.assign(predicted=table.predicted * np.exp(-off), log_error=table.log_error - off)


def band(fitted: pd.DataFrame, model: Model, carry: bool = False) -> Band:
    """The band of predictions by a fit of `model` to `fitted`, so that `COVERAGE` of each fold's rows is inside. `carry`:
    as in `predicted`.

    Rows of a fold err together. So the growth is a quantile within each fold, and of the folds of a kind (fewer than
    ten, of which no 90 % quantile can be told) the largest counts. ValueError for a table of fewer than three sizes.
    """
    table = shaped(fitted, model)
    found = [(kind, *_left_out(table, mask, model, carry)) for kind, mask in folds(table)]
    inside = [errors for kind, errors, _ in found if not kind]
    if not inside:
        raise ValueError(f"a band needs three sizes to leave some out, found {table.nbytes.nunique()}")
    errors = pd.concat(inside)
    near = Band(errors.set_axis(table.nbytes[errors.index]), {})
    growth: dict[str, float] = {}
    for kind, errors, away in found:
        if kind:
            base = near.half_widths(table.loc[errors.index], away * 0)
            more = np.maximum(errors**2 - base**2, 0) / away[kind]
            growth[kind] = max(growth.get(kind, 0.0), _quantile(more, COVERAGE))
    return Band(near.near, growth)


def _left_out(table: pd.DataFrame, mask: pd.Series, model: Model, carry: bool) -> tuple[pd.Series, pd.DataFrame]:
    """Absolute log errors of the rows of `mask`, predicted from the others, and their distances."""
    rest, rows = table[~mask], table[mask]
    errors = predicted(fit(rest, model), rest, rows, carry).log_error.abs()
    return errors.set_axis(rows.index), distances(rest, rows)


def _quantile(values: pd.Series, at: float) -> float:
    return float(np.quantile(values, at, method="higher"))


def banded(found: Fit, fitted: pd.DataFrame, rows: pd.DataFrame, width: Band, carry: bool = False) -> pd.DataFrame:
    """`predicted` with the band's ends `low` and `high` (seconds) and whether the measured time is `inside`."""
    table = predicted(found, fitted, rows, carry)
    half = width.half_widths(table, distances(shaped(fitted, found.model), table))
    return with_band(table, table.predicted * np.exp(-half), table.predicted * np.exp(half))


def with_band(table: pd.DataFrame, low: NDArray[np.float64], high: NDArray[np.float64]) -> pd.DataFrame:
    return table.assign(low=low, high=high, inside=(table.seconds >= low) & (table.seconds <= high))


def scatter(table: pd.DataFrame) -> pd.Series:
    """How far each measurement is from a line through its neighbours in size (log error): what no smooth model can
    predict. Of rows that differ in the size only, and whose neighbours are at most `CLOSE` times smaller and larger."""
    each = [name for name in ("source", "collective", "algorithm", "nodes", "ranks_per_node") if name in table]
    found = []
    for _, rows in table.groupby(each):
        middle = rows.groupby("nbytes").seconds.median()
        x, y = np.log(middle.index.to_numpy(dtype=float)), np.log(middle.to_numpy())
        share = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
        close = np.maximum(x[1:-1] - x[:-2], x[2:] - x[1:-1]) <= np.log(CLOSE)
        found.append((y[:-2] + share * (y[2:] - y[:-2]) - y[1:-1])[close])
    return pd.Series(np.concatenate(found)) if found else pd.Series(dtype=float)

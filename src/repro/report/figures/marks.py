"""Marks of repeated measurements: every value, their median and range, as a point, a line or a bar, and the number."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from repro.claims.sample import Sample
from repro.report.figures.base import MARKERS, PALETTE
from repro.report.figures.data import Data

Row = tuple[str, Iterable[float] | Sample, dict[str, Any]]  # name, values, style of its mark
PAPER = {"color": "black", "marker": "D", "mfc": "white", "linestyle": ""}  # a paper's number
ABOVE = {"loc": "outside upper center", "fontsize": 8, "frameon": False}  # a legend over all panels
CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}  # behind a number: no gridline through it


def middle(values: Iterable[float]) -> tuple[float, list[list[float]]]:
    """Median of repeats, and how far the smallest and the largest are from it, as matplotlib takes an error bar. One
    value has no range: nan, for which nothing is drawn. (Intervals are for verdicts, which say what they are of.)"""
    found = list(values)
    value = float(median(found))
    if len(found) == 1:
        return value, [[math.nan], [math.nan]]
    return value, [[value - min(found)], [max(found) - value]]


def _read(values: Iterable[float] | Sample) -> tuple[list[float], float, list[list[float]]]:
    """Each value, the middle, and how far the error bar reaches: `middle` of repeats; or a number as a claim reads it,
    with its interval, where it has one."""
    if not isinstance(values, Sample):
        found = list(values)
        return found, *middle(found)
    if not all(map(math.isfinite, values.interval)):  # one end alone would be a stray tick
        return values.values, values.value, [[math.nan], [math.nan]]
    return values.values, values.value, [[abs(end - values.value)] for end in values.interval]


def of_claims(data: Data, named: Mapping[str, str], number: str = ".3g") -> str:
    """`name 1.23, other name 4.5`: what claims read from the records, by id → name, as far as they hold it."""
    samples = {name: data.of_claim(claim) for claim, name in named.items()}
    return ", ".join(f"{name} {sample.value:{number}}" for name, sample in samples.items() if sample)


def span(numbers: Iterable[float], number: str = "g") -> str:
    """`1 to 8`, or `8` where all are so in this format."""
    found = list(numbers)
    return " to ".join(dict.fromkeys(f"{end:{number}}" for end in (min(found), max(found))))


def said(sample: Sample, number: str = ".3g") -> str:
    """`1.17 [1.05, 1.3] (8 of 8 interleaved pairs, on 4 occasions)`: a number as a claim reads it, for captions."""
    low, high = sample.interval
    ends = f" [{low:{number}}, {high:{number}}]" if math.isfinite(high - low) and low < high else ""
    return f"{sample.value:{number}}{ends} ({sample.said})"


def _dots(axes: Axes, at: float, values: Sequence[float], across: bool) -> None:
    """Every one of several values, small."""
    places = [at] * len(values)
    x, y = (values, places) if across else (places, values)
    axes.plot(x, y, ".", color="black", markersize=3, zorder=5)


def grid(
    count: int, columns: int, panel: tuple[float, float], edge: tuple[float, float], least: float = 0, **shape: Any
) -> tuple[Figure, Any]:
    """A figure of `count` panels in rows of at most `columns`, and its axes, (rows, columns), the spare ones removed.
    Inches: `panel`, of each; `edge`, around all of them; `least`, of the width."""
    columns = min(columns, count)
    rows = -(-count // columns)
    size = max(least, panel[0] * columns + edge[0]), panel[1] * rows + edge[1]
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **shape)
    for spare in axes.flat[count:]:
        spare.remove()
    return figure, axes


def look(index: int) -> dict[str, str]:
    """Colour and marker number `index` of the style, as keyword arguments of matplotlib's plot."""
    return {"color": PALETTE[index % len(PALETTE)], "marker": MARKERS[index % len(MARKERS)]}


def note(axes: Axes, text: str, x: float, y: float, dx: float = 0, dy: float = 0, **style: Any) -> None:
    """Small text, `dx` and `dy` points away from the data point (x, y)."""
    axes.annotate(text, (x, y), xytext=(dx, dy), textcoords="offset points", **{"fontsize": 8, **style})


def point(axes: Axes, at: float, values: Iterable[float] | Sample, *, across: bool = False, **style: Any) -> float:
    """Median of repeats as a mark with its range and all values, or a claim's number with its interval; returns the number.
    `across`: as in `bar`."""
    found, value, error = _read(values)
    if len(found) > 1:
        _dots(axes, at, found, across)
    x, y = (value, at) if across else (at, value)
    axes.errorbar(x, y, **{"xerr" if across else "yerr": error}, **{"capsize": 3, "linestyle": "", **style})
    return value


def points(axes: Axes, groups: Iterable[tuple[Any, Any]], line: str = "-", label: str = "", **style: Any) -> None:
    """Medians over x with ranges and values, joined by a line. `groups`: (x, repeats), as a grouped column gives them."""
    medians = {x: point(axes, x, values, **style) for x, values in groups}
    axes.plot(list(medians), list(medians.values()), line, label=label or None, **style)


def dot_rows(axes: Axes, found: Iterable[Row], number: str) -> None:
    """A `numbered` point for each row, the first on top; [nan]: a row without one."""
    names = []
    for y, (name, values, style) in enumerate(found):
        numbered(axes, y, values, number, **style)
        names.append(name)
    rows(axes, names, fontsize=8)


def numbered(axes: Axes, y: float, values: Iterable[float] | Sample, number: str, **style: Any) -> None:
    """A `point` at this height, with its number in this format behind all that is drawn of it."""
    values = values if isinstance(values, Sample) else list(values)
    value = point(axes, y, values, across=True, **style)
    each, _, error = _read(values)
    if math.isfinite(value):
        end = max(value, value + error[1][0], *each)  # the second is nan where there is no interval
        note(axes, f"{value:{number}}", end, y, 6, va="center", bbox=CLEAR)


def bar(
    axes: Axes,
    at: float,
    values: Iterable[float] | Sample,
    number: str,
    *,
    across: bool = False,
    after: str = "",
    **style: Any,
) -> None:
    """Median of repeats as a bar with their range, all values, and the median as text, in the format `number`; or a claim's
    number with its interval. `after`: words behind the number.
    `across`: horizontal, at y = `at`; else vertical, at x = `at`."""
    found, value, error = _read(values)
    if len(found) > 1:
        _dots(axes, at, found, across)
    end = max(value, value + error[1][0], *found)  # the second is nan where there is no bar
    if across:
        axes.barh(at, value, xerr=error, capsize=3, **style)
        note(axes, f"{value:{number}}{after}", end, at, 5, va="center", fontsize=8, bbox=CLEAR)
    else:
        axes.bar(at, value, yerr=error, capsize=3, **style)
        note(axes, f"{value:{number}}{after}", at, end, dy=3, ha="center", va="bottom", fontsize=8, bbox=CLEAR)


def bars(
    axes: Axes,
    values: Mapping[str, Iterable[float] | Sample],
    label: str,
    number: str = ",.4g",
    after: Mapping[str, str] | None = None,
    **styles: Any,
) -> None:
    """A horizontal bar for each name, the first on top.

    `styles`: name → style, else one colour for all; `after`: name → words behind its number."""
    for y, (name, repeats) in enumerate(values.items()):
        style = {"color": PALETTE[0], **styles.get(name, {}), "after": (after or {}).get(name, "")}
        bar(axes, y, repeats, number, across=True, height=0.6, **style)
    rows(axes, list(values))
    axes.set(xlabel=label, ylim=(len(values) - 0.5, -0.5))
    axes.margins(x=0.3)


def rows(axes: Axes, names: Sequence[str], **text: Any) -> None:
    """A row for each name, the first at the top."""
    axes.set_yticks(range(len(names)), names, **text)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def log_axis(axis: Axis, ticks: Sequence[float], **text: Any) -> None:
    """Make an axis logarithmic, with labels at `ticks` only."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks], **text)
    axis.set_minor_locator(NullLocator())


def round_ticks(low: float, high: float) -> list[float]:
    """0.01, 0.02, 0.05, 0.1, … 50000, as far as they are from `low` to `high`."""
    numbers = (digit * 10.0**exponent for exponent in range(-2, 5) for digit in (1, 2, 5))
    return [number for number in numbers if low <= number <= high]

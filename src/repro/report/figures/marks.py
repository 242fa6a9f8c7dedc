"""Marks of repeated measurements: a median with its interval, as a point, a line or a bar, and the number beside it."""

from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes

from repro.records.interval import interval
from repro.report.figures.base import MARKERS, PALETTE


def middle(values: Iterable[float]) -> tuple[float, list[list[float]]]:
    """Median of repeats, and how far its 95 % interval reaches below and above, as matplotlib takes an error bar. One
    value has no interval: nan, for which nothing is drawn."""
    value, low, high = interval(values)
    return value, [[value - low], [high - value]]


def look(index: int) -> dict[str, str]:
    """Colour and marker number `index` of the style, as keyword arguments of matplotlib's plot."""
    return {"color": PALETTE[index], "marker": MARKERS[index]}


def note(axes: Axes, text: str, x: float, y: float, dx: float = 0, dy: float = 0, **style: Any) -> None:
    """Small text, `dx` and `dy` points away from the data point (x, y)."""
    axes.annotate(text, (x, y), xytext=(dx, dy), textcoords="offset points", **{"fontsize": 7, **style})


def points(
    axes: Axes, groups: Iterable[tuple[Any, Any]], line: str = "-", label: str | None = None, **style: Any
) -> None:
    """Medians over x with their intervals, joined by a line. `groups`: (x, repeats), as a grouped column gives them."""
    found = [(x, *middle(values)) for x, values in groups]
    for x, value, error in found:
        axes.errorbar(x, value, yerr=error, capsize=3, linestyle="", **style)
    axes.plot([x for x, _, _ in found], [value for _, value, _ in found], line, label=label, **style)


def bar(axes: Axes, at: float, values: Iterable[float], number: str, *, across: bool = False, **style: Any) -> None:
    """Median of repeats as a bar with its interval, and at its end the median as text, in the format `number`.

    `across`: horizontal, at y = `at`; else vertical, at x = `at`.
    """
    value, error = middle(values)
    end = max(value, value + error[1][0])  # the second is nan where there is one value
    if across:
        axes.barh(at, value, xerr=error, capsize=3, **style)
        note(axes, f"{value:{number}}", end, at, 5, va="center", fontsize=8)
    else:
        axes.bar(at, value, yerr=error, capsize=3, **style)
        note(axes, f"{value:{number}}", at, end, ha="center", va="bottom")

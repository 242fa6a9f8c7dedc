"""Shared by the figures of the scaling model: names of plans and machines, looks, bands and whiskers of predictions."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.experiments.common.names import NAMED
from repro.report.figures.marks import look
from repro.report.figures.zero import runs as zero

PLANS = {plan: zero.PLANS[plan].removeprefix("ZeRO-3 with ") for plan in NAMED}  # name in the records: in a figure
FRONTIER = {"frontier": "Frontier", "frontier-rccl": "Frontier, one slow ring"}  # the machine and its scenario


def style(index: int) -> dict[str, Any]:
    """Colour and marker number `index`, for points without a line."""
    return {**look(index), "linestyle": "none"}


def batches(count: int) -> str:
    return f"{zero.micro_batches(count)} per step"


def errors(log_errors: pd.Series) -> str:
    """`n = 40: median 12 %, 90 % within 35 %`, of log(predicted / measured)."""
    middle, most = (100 * np.expm1(np.quantile(np.abs(log_errors), q)) for q in (0.5, 0.9))
    return f"n = {len(log_errors)}: median {middle:.0f} %, 90 % within {most:.0f} %"


def whiskers(rows: pd.DataFrame, name: str) -> np.ndarray:
    """[2, rows]: from the median `name` down to its 5 % and up to its 95 % quantile, as `errorbar` takes it."""
    return np.array([rows[name] - rows[f"{name}_low"], rows[f"{name}_high"] - rows[name]])


def band(axes: Axes, rows: pd.DataFrame, x: str, name: str, color: str, **line: Any) -> None:
    """A line through the medians `name`, and the band from the 5 % to the 95 % quantile."""
    rows = rows.sort_values(x)
    axes.fill_between(rows[x], rows[f"{name}_low"], rows[f"{name}_high"], color=color, alpha=0.15, linewidth=0)
    axes.plot(rows[x], rows[name], color=color, markersize=4, **line)

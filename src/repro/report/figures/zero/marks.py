"""How plans, times and small numbers look in all figures of `zero`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.report.figures.base import HATCHES, MARKERS, PALETTE
from repro.report.figures.marks import middle
from repro.report.figures.zero.runs import MEASURED, PLANS, PREDICTED

# Colour, marker and hatch are of a family of plans.
_FAMILIES = (
    ("ddp", "zero1", "zero2", "zero3"),
    ("hpz", "qwz", "qgz", "qgz_one_hop", "zeropp"),
    ("hierarchical_fp", "hierarchical"),
    ("best",),
    ("mics", "hsdp"),
    ("deepspeed_zero3", "deepspeed_zeropp", "fsdp2", "fsdp2_reshard", "fsdp2_hsdp"),
)
_FAMILY = {plan: number for number, plans in enumerate(_FAMILIES) for plan in plans}
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # of a logarithmic axis of seconds
TICK_MARK = {"color": "black", "markersize": 13, "markeredgewidth": 1.6}  # of a prediction


def color(plan: str) -> str:
    """Colour of a plan."""
    return PALETTE[_FAMILY[plan]]


def look(plan: str) -> dict[str, Any]:
    """Colour and marker of a plan."""
    return {"color": color(plan), "marker": MARKERS[_FAMILY[plan]]}


def fill(plan: str) -> dict[str, Any]:
    """Look of a plan's bar."""
    return {"color": color(plan), "hatch": HATCHES[_FAMILY[plan]], "edgecolor": "white"}


def note(axes: Axes, text: str, x: float, y: float, place: str = "above") -> None:
    """A small number beside a mark: `above` or `right` of it."""
    offset, style = {"above": ((0, 4), {"ha": "center"}), "right": ((7, 0), {"va": "center"})}[place]
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
    axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", fontsize=8, bbox=box, **style)


def rows(axes: Axes, plans: Sequence[str]) -> None:
    """A row per plan, the first at the top."""
    axes.set_yticks(range(len(plans)), [PLANS[plan] for plan in plans])
    axes.set_ylim(len(plans) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def times(axes: Axes, named: Sequence[tuple[str, str, pd.DataFrame]]) -> None:
    """A row per (name, plan, runs): the median step with its interval over repeats, and the predicted one."""
    for y, (_, plan, runs) in enumerate(named):
        if runs.empty:
            axes.text(0.01, y, "not run", transform=axes.get_yaxis_transform(), fontsize=8, color="grey", va="center")
            continue
        value, reach = middle(runs[MEASURED])
        predicted = runs[PREDICTED].median()
        axes.hlines(y, predicted, value, color=color(plan), linewidth=1)
        axes.errorbar(value, y, xerr=reach, capsize=3, markersize=6, **look(plan))
        axes.plot(predicted, y, "|", color="black", markersize=10, markeredgewidth=1.6)
        note(axes, f"{value:.2f}", value + np.nan_to_num(reach[1][0]), y, "right")
    axes.set_yticks(range(len(named)), [name for name, *_ in named])
    axes.set(xlabel="time of a step (s)", ylim=(len(named) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)

"""How plans, times and small numbers look in all figures of `zero`."""

from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.report.figures import marks
from repro.report.figures.base import HATCHES, MARKERS, PALETTE
from repro.report.figures.zero.runs import MEASURED, PREDICTED

_FAMILIES = {  # of plans, by name: each has a colour, a marker and a hatch
    "DDP, ZeRO": ("ddp", "zero1", "zero2", "zero3"),
    "ZeRO++ and its parts": ("hpz", "qwz", "qgz", "qgz_one_hop", "zeropp"),
    "hierarchical": ("hierarchical_fp", "hierarchical"),
    "search's best": ("best",),
    "MiCS, HSDP": ("mics", "hsdp", "hfsdp"),
    "DeepSpeed, FSDP2": ("deepspeed_zero3", "deepspeed_zeropp", "fsdp2", "fsdp2_reshard", "fsdp2_hsdp"),
}
_FAMILY = {plan: number for number, plans in enumerate(_FAMILIES.values()) for plan in plans}
TICK_MARK = {"color": "black", "markersize": 10, "markeredgewidth": 1.6}  # of a prediction


def color(plan: str) -> str:
    """Colour of a plan."""
    return PALETTE[_FAMILY[plan]]


def look(plan: str) -> dict[str, Any]:
    """Colour and marker of a plan."""
    return {"color": color(plan), "marker": MARKERS[_FAMILY[plan]]}


def families(axes: Axes, plans: Collection[str]) -> None:
    """A name in the legend for each family of which there is a plan."""
    for name, family in _FAMILIES.items():
        if set(family) & set(plans):
            axes.plot([], [], linestyle="", label=name, **look(family[0]))


def fill(plan: str) -> dict[str, Any]:
    """Look of a plan's bar."""
    return {"color": color(plan), "hatch": HATCHES[_FAMILY[plan]], "edgecolor": "white"}


def note(axes: Axes, text: str, x: float, y: float, place: Literal["above", "right"] = "above") -> None:
    """A small number beside a mark."""
    style = {"dx": 7, "va": "center"} if place == "right" else {"dy": 4, "ha": "center"}
    marks.note(axes, text, x, y, bbox=marks.CLEAR, **style)


def times(axes: Axes, named: Sequence[tuple[str, str, pd.DataFrame]]) -> None:
    """A row per (name, plan, runs): the median step with the range of its repeats, and the predicted one."""
    for y, (_, plan, runs) in enumerate(named):
        value, reach = marks.middle(runs[MEASURED])
        predicted = runs[PREDICTED].median()
        axes.hlines(y, predicted, value, color=color(plan), linewidth=1, linestyle=":")
        axes.errorbar(value, y, xerr=reach, capsize=3, markersize=6, **look(plan))
        axes.plot(predicted, y, "|", **TICK_MARK)
        note(axes, f"{value:.2f}", np.nanmax([value, value + reach[1][0], predicted]), y, "right")
    axes.set_xlabel("time of a step (s)")
    marks.rows(axes, [name for name, *_ in named])

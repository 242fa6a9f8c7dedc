"""Which plan is the fastest that fits? A cell per network and memory, or per number of ranks and model size."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from repro.report.figures.base import Drawing
from repro.report.figures.data import Data, series
from repro.report.figures.marks import ABOVE, grid
from repro.report.figures.scaling.marks import MACHINES, PLANS, batches, scenario
from repro.scaling.whatif import TIE

_LETTERS = {  # in cells: the same in every map
    "ddp": "D",
    "zero1": "1",
    "zero2": "2",
    "zero3": "3",
    "hpz": "hp",
    "qwz": "qw",
    "qgz": "qg",
    "zeropp": "++",
    "mics": "M",
    "hsdp": "HS",
    "hfsdp": "HF",
    "hierarchical": "h",
    "hierarchical_fp": "h16",
}
_COLORS = dict(zip(PLANS, colormaps["tab20"](np.linspace(0, 1, len(PLANS))), strict=True))


def scaling_networks(data: Data) -> Drawing:
    """Best plan of one model over the rate between nodes (across) and a rank's memory (up), a panel per machine."""
    found = data.runs("scaling_map", over="network_memory").sort_values(["hardware", "accumulation", "nodes"])
    found = found.drop_duplicates(["hardware", "accumulation"], keep="last")  # of most nodes: one map in a panel
    data.only(found)
    machines, counts = list(found.hardware.unique()), sorted(found.accumulation.unique())
    size = (max(5, 3.1 * len(machines) + 0.4), 3.1 * len(counts) + 0.3)
    figure, axes = plt.subplots(len(counts), len(machines), figsize=size, squeeze=False)
    for number, run in found.iterrows():
        panel = axes[counts.index(run.accumulation), machines.index(run.hardware)]
        factors, memories = _tiles(panel, series(found.loc[[number]]), "factor", "memory_gb")
        names = [f"{factor:g}" if factor >= 1 else f"1/{1 / factor:g}" for factor in factors]
        panel.set_xticks(range(len(factors)), names, fontsize=7.5, rotation=45)
        panel.set_yticks(range(len(memories)), memories, fontsize=7.5)
        panel.set_title(f"{MACHINES.get(run.hardware, run.hardware)},\n{batches(run.accumulation)}", fontsize=9)
        panel.set_xlabel("links between nodes, × their rate", fontsize=9)
    for panel in axes[:, 0]:
        panel.set_ylabel("memory per rank (GB)")
    _legend(figure, series(found))
    run = found.iloc[0]
    caption = f"{run.billions:g} billion parameters, {run.nodes} nodes, everything uncertain at its likely value. "
    caption += f"{_fastest(series(found))} Across: links between nodes at a multiple of their rate.{scenario(found)}"
    return Drawing(figure, "modelled", caption)


def scaling_models(data: Data) -> Drawing:
    """Best plan on a machine as it is, over the number of ranks (across) and the size of the model (up)."""
    found = data.runs("scaling_map", over="size_ranks").sort_values("hardware")
    data.only(found)
    figure, axes = grid(len(found), 2, (4.1, 3), (0.5, 0.3))
    for panel, (number, run) in zip(axes.flat, found.iterrows(), strict=False):
        ranks, parameters = _tiles(panel, series(found.loc[[number]]), "ranks", "parameters")
        panel.set_xticks(range(len(ranks)), [f"{count:g}" for count in ranks], fontsize=8, rotation=45)
        panel.set_yticks(range(len(parameters)), [f"{count / 1e9:.0f}" for count in parameters], fontsize=8)
        panel.set_title(MACHINES.get(run.hardware, run.hardware), fontsize=10)
        panel.set_xlabel("ranks")
    for panel in axes[:, 0]:
        panel.set_ylabel("billion parameters")
    _legend(figure, series(found))
    caption = f"{batches(found.accumulation.iloc[0])}, 2048 tokens a rank, everything uncertain at its likely value. "
    caption += f"{_fastest(series(found))} White: no plan fits. A model that fits may not fit on more ranks: a rank "
    caption += "holds whole rows of each matrix, so where rows do not divide well over the ranks, padding enlarges the "
    caption += "gathered layers."
    return Drawing(figure, "modelled", caption)


def _fastest(cells: pd.DataFrame) -> str:
    """In how many cells each plan is the fastest; what a cell says, and what it does not."""
    best = cells.plan[cells.plan.isin(list(PLANS))].value_counts()
    won = ", ".join(f"{PLANS[str(plan)]} in {count}" for plan, count in best.items())
    return (
        f"Of {best.sum()} cells in which a plan fits, the plan shown is {won}. Colour and letter of a cell: the fastest "
        f"plan, or the one that needs least memory of those within {100 * (TIE - 1):.0f} % of it. The records do not "
        "hold the next plan's time: it may be slower by a few per cent only."
    )


def _tiles(panel: Axes, cells: pd.DataFrame, x: str, y: str) -> tuple[list[float], list[float]]:
    """A colour and a letter per cell, nothing where no plan fits. Returns the values of both axes."""
    xs, ys = sorted(cells[x].unique()), sorted(cells[y].unique())
    for cell in cells[cells.plan.isin(list(PLANS))].to_dict("records"):
        across, up = xs.index(cell[x]), ys.index(cell[y])
        panel.add_patch(Rectangle((across - 0.5, up - 0.5), 1, 1, color=_COLORS[cell["plan"]]))
        panel.text(across, up, _LETTERS[cell["plan"]], ha="center", va="center", fontsize=7.5)
    panel.set(xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
    panel.grid(visible=False)
    return xs, ys


def _legend(figure: Figure, cells: pd.DataFrame) -> None:
    """Names of the plans that are best somewhere."""
    best = [plan for plan in PLANS if plan in set(cells.plan)]
    handles = [Rectangle((0, 0), 1, 1, color=_COLORS[plan]) for plan in best]
    names = [f"{_LETTERS[plan]}: {PLANS[plan]}" for plan in best]
    figure.legend(handles, names, ncols=5, **ABOVE)

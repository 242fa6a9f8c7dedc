"""Which plan is the fastest that fits? A cell per network and memory, or per number of ranks and model size."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from repro.report.figures.base import Data, Drawing, series
from repro.report.figures.scaling.marks import PLANS, batches

_LETTERS = {plan: chr(ord("A") + number) for number, plan in enumerate(PLANS)}
_COLORS = dict(zip(PLANS, colormaps["tab20"](np.linspace(0, 1, len(PLANS))), strict=True))


def scaling_networks(data: Data) -> Drawing:
    """Best plan of one model over the rate between nodes (across) and a rank's memory (up), a panel per machine."""
    found = data.runs("scaling_map", over="network_memory").sort_values(["hardware", "accumulation", "nodes"])
    found = found.drop_duplicates(["hardware", "accumulation"], keep="last")  # of most nodes: one map in a panel
    machines, counts = list(found.hardware.unique()), sorted(found.accumulation.unique())
    size = (3.1 * len(machines) + 1.6, 2.8 * len(counts))
    figure, axes = plt.subplots(len(counts), len(machines), figsize=size, squeeze=False)
    for number, run in found.iterrows():
        panel = axes[counts.index(run.accumulation), machines.index(run.hardware)]
        factors, memories = _tiles(panel, series(found.loc[[number]]), "factor", "memory_gb")
        names = [f"{factor:g}" if factor >= 1 else f"1/{1 / factor:g}" for factor in factors]
        panel.set_xticks(range(len(factors)), names, fontsize=7, rotation=45)
        panel.set_yticks(range(len(memories)), memories, fontsize=7)
        panel.set_title(f"{run.hardware}, {batches(run.accumulation)}", fontsize=8)
    for panel in axes[-1]:
        panel.set_xlabel("links between nodes, × their rate")
    for panel in axes[:, 0]:
        panel.set_ylabel("memory per rank (GB)")
    _legend(figure, series(found))
    run = found.iloc[0]
    return Drawing(figure, "modelled", f"{run.billions:g} billion parameters, {run.nodes} nodes, likely values.")


def scaling_models(data: Data) -> Drawing:
    """Best plan on a machine as it is, over the number of ranks (across) and the size of the model (up)."""
    found = data.runs("scaling_map", over="size_ranks").sort_values("hardware")
    figure, axes = plt.subplots(1, len(found), figsize=(3 * len(found) + 1.6, 3.3), squeeze=False)
    for panel, (number, run) in zip(axes[0], found.iterrows(), strict=True):
        ranks, parameters = _tiles(panel, series(found.loc[[number]]), "ranks", "parameters")
        panel.set_xticks(range(len(ranks)), [f"{count:g}" for count in ranks], fontsize=7, rotation=60)
        panel.set_yticks(range(len(parameters)), [f"{count / 1e9:.0f}" for count in parameters], fontsize=7)
        panel.set(title=run.hardware, xlabel="ranks")
    axes[0][0].set_ylabel("10⁹ parameters")
    _legend(figure, series(found))
    return Drawing(figure, "modelled", f"{batches(found.accumulation.iloc[0])}, 2048 tokens, likely values.")


def _tiles(panel: Axes, cells: pd.DataFrame, x: str, y: str) -> tuple[list[float], list[float]]:
    """A colour and a letter per cell, nothing where no plan fits. Returns the values of both axes."""
    xs, ys = sorted(cells[x].unique()), sorted(cells[y].unique())
    for cell in cells[cells.plan.isin(list(PLANS))].to_dict("records"):
        across, up = xs.index(cell[x]), ys.index(cell[y])
        panel.add_patch(Rectangle((across - 0.5, up - 0.5), 1, 1, color=_COLORS[cell["plan"]]))
        panel.text(across, up, _LETTERS[cell["plan"]], ha="center", va="center", fontsize=7)
    panel.set(xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
    panel.grid(visible=False)
    return xs, ys


def _legend(figure: Figure, cells: pd.DataFrame) -> None:
    """Names of the plans that are best somewhere."""
    used = [plan for plan in PLANS if plan in set(cells.plan)]
    handles = [Rectangle((0, 0), 1, 1, color=_COLORS[plan]) for plan in used]
    names = [f"{_LETTERS[plan]}: {PLANS[plan]}" for plan in used]
    figure.legend(handles, names, loc="outside right upper", fontsize=8)

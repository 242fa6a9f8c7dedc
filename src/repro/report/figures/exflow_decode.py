"""What each of ExFlow's changes gives over DeepSpeed-MoE: padding away, one all-to-all, placement; or all of it and K/V."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.report.figures import marks
from repro.report.figures.base import Data, Drawing, NothingToShow

STEPS = {  # (system, keys_values, placement): name; each step changes one thing of the one before
    ("deepspeed", "gathered", "contiguous"): "DeepSpeed",
    ("two_all_to_alls", "gathered", "contiguous"): "no padding",
    ("coherent", "shared", "contiguous"): "one\nall-to-all",
    ("coherent", "shared", "affinity"): "placed",
    ("coherent", "gathered", "affinity"): "K/V sent",
}
CHANGES = ["padding", "one all-to-all", "placement"]
POINT = ["experts", "ranks", "cluster_mbit_s"]


def gains(runs: pd.DataFrame, metric: str = "iteration_seconds") -> pd.DataFrame:
    """By model, ranks, rate and repeat: how many times shorter `metric` is, as natural logarithms. Columns: CHANGES, each
    against the step before, `all` of them, which is their sum, and `K/V sent` on top. Only repeats that have the first
    four steps are kept, so every number is of one repeat; a repeat without keys and values sent has nan there."""
    runs = runs.assign(ranks=runs.nodes * runs.packages * runs.gcds)
    table = runs.pivot_table(metric, [*POINT, "repeat"], ["system", "keys_values", "placement"])
    steps = -np.log(table.reindex(columns=pd.MultiIndex.from_tuples(STEPS))).dropna(subset=list(STEPS)[:4])
    changes = steps.diff(axis=1).set_axis(["first", *CHANGES, "K/V sent"], axis=1).drop(columns="first")
    return changes.assign(all=changes[CHANGES].sum(axis=1))


def exflow_gain(data: Data, *, metric: str = "iteration_seconds") -> Drawing:
    """How many times faster than DeepSpeed's layers each step to ExFlow is, a line per repeat, for every model and rate.

    `metric`: iteration_seconds, or routing_seconds for the exchanges alone.
    """
    runs = data.runs("moe_decode", weights="trained", requests=128)
    found = gains(runs, metric)
    if found.empty:
        raise NothingToShow("No repeat of moe_decode has DeepSpeed's layers and all three of ours.")
    groups = list(found.groupby(POINT))
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    fig, panels = plt.subplots(rows, columns, figsize=(3.6 * columns + 0.6, 3 * rows), squeeze=False, sharey=True)
    for axes, ((experts, ranks, rate), repeats) in zip(panels.flat, groups, strict=False):
        _steps(axes, range(4), repeats[CHANGES], 0, "-")
        _steps(axes, range(3, 5), repeats[["K/V sent"]].dropna(), 3, "--", start=repeats["all"])
        axes.set_title(f"{experts} experts, {ranks} ranks, {rate:g} Mbit/s", fontsize=9)
        axes.set_xticks(range(len(STEPS)), list(STEPS.values()), fontsize=7)
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        marks.log_axis(axes.yaxis, [0.1, 0.2, 0.5, 1, 2, 5, 10])
        axes.set_ylabel("times as fast as DeepSpeed")
    what = "An iteration" if metric == "iteration_seconds" else "What an iteration spends in exchanges"
    caption = (
        f"{what}: time with DeepSpeed's layers over time with ours, of the same repeat. Thin lines are repeats, the "
    )
    caption += (
        "thick one their mean on the logarithmic axis; × at a step is what this change alone gives, and the first "
    )
    caption += "three multiply to the whole. Dashed: new keys and values sent to all ranks too, which the paper's "
    caption += f"accounting leaves out. Network {', '.join(sorted(set(runs.fabric)))}."
    return Drawing(fig, ", ".join(sorted(set(runs.evidence))), caption)


def _steps(axes: Axes, at: range, changes: pd.DataFrame, index: int, line: str, start: pd.Series | None = None) -> None:
    """Each repeat's product of its first changes (logarithms, a column each), at `at`; `start`: before the first."""
    first = 0 if start is None else start.loc[changes.index].to_numpy()
    logs = np.column_stack([np.zeros(len(changes)) + first, changes]).cumsum(axis=1)
    look = marks.look(index)
    axes.plot(at, np.exp(logs).T, line, color=look["color"], linewidth=0.7, alpha=0.6, marker=".")
    if len(changes):
        mean = np.exp(logs.mean(axis=0))
        axes.plot(at, mean, line, linewidth=1.5, markersize=5, **look)
        for x, before, after in zip(at[1:], mean, mean[1:], strict=False):
            marks.note(axes, f"×{after / before:.2f}", x, after, 0, 8, ha="center")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.margins(x=0.1, y=0.15)

"""How well arithmetic on bytes and rates predicts a step."""

import matplotlib.pyplot as plt
import pandas as pd

from repro.experiments.zero_train import CHANGES
from repro.report.figures.base import Drawing
from repro.report.figures.data import Data, NothingToShow
from repro.report.figures.marks import log_axis, round_ticks
from repro.report.figures.zero.marks import families, look
from repro.report.figures.zero.runs import MEASURED, PREDICTED, Training, micro_batches

_BOTH = [PREDICTED, MEASURED]


def every_plan(training: Training, accumulation: int) -> pd.DataFrame:
    """Runs of all plans in the setting, changed hierarchical ones included, that have a predicted step."""
    free = dict.fromkeys((*CHANGES, "block"), ...)
    return training.like(accumulation=accumulation, **free).dropna(subset=_BOTH)


def medians(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per plan of `every_plan`: predicted and measured step (s)."""
    return runs.groupby(["plan", "block", *CHANGES], as_index=False)[_BOTH].median()


def zero_prediction(data: Data) -> Drawing:
    """Measured against predicted step of every run with a shaped network."""
    training = Training(data.runs("zero_train"))
    paired = training.runs.dropna(subset=[PREDICTED])
    if paired.empty:
        raise NothingToShow("No record of a zero_train run with a predicted step on a shaped network.")
    data.only(paired)
    fig, axes = plt.subplots(figsize=(6.4, 4.9))
    notes, others = [], paired
    for i, count in enumerate(training.batches):
        filled = "none" if i else "full"
        runs = every_plan(training, count)
        others, table = others.drop(runs.index), medians(runs)
        if table.empty:
            continue
        for plan, mine in table.groupby("plan"):
            style = look(plan) | {"markersize": 7, "linestyle": "none", "fillstyle": filled}
            axes.plot(mine[PREDICTED], mine[MEASURED], **style)
        axes.plot([], [], "o", color="black", fillstyle=filled, label=micro_batches(count))
        if len(table) == 1:  # has no rank
            continue
        rank = table[_BOTH].corr(method="spearman").iloc[0, 1]
        longer = table.loc[table[PREDICTED].idxmin(), MEASURED] / table[MEASURED].min() - 1
        notes.append(
            f"{micro_batches(count)}: {len(table)} plans, rank correlation {rank:.2f}; the plan predicted fastest "
            + ("is the fastest." if longer == 0 else f"takes {100 * longer:.0f} % longer than the fastest.")
        )
    families(axes, set(paired.plan))
    label = "single runs in other settings" if len(others) else None
    axes.plot(others[PREDICTED], others[MEASURED], ".", color="#999999", label=label, zorder=1)
    ends = [0.8 * paired[PREDICTED].min(), 1.25 * paired[MEASURED].max()]
    axes.plot(ends, ends, color="black", linewidth=1)
    axes.set(xlabel="predicted step: compute + bytes ÷ rates (s)", ylabel="measured step (s)")
    for axis in (axes.xaxis, axes.yaxis):
        log_axis(axis, round_ticks(*ends))
    axes.legend(fontsize=8)
    caption = (
        f"{training.size()}, {training.network}. Marks: medians of a plan's runs; line: measured as predicted. "
        + " ".join(notes)
    )
    return Drawing(fig, f"{training.evidence} against modelled", caption)

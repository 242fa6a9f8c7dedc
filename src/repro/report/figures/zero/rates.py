"""When does the hierarchical plan pay: gains over the rate of the network, and without levels."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.report.figures.base import HATCHES, PALETTE, Data, Drawing, NothingToShow
from repro.report.figures.zero.marks import color, look, note
from repro.report.figures.zero.runs import PLANS, Training, gains, micro_batches

_RIVALS = ("zero3", "zeropp")


def zero_rates(data: Data, *, plan: str = "hierarchical", rivals: Sequence[str] = _RIVALS) -> Drawing:
    """How many times faster `plan` is than `rivals`, over the rate between nodes (left); and how many times faster plans are
    than ZeRO-3 with levels and without (right). Dotted and ticks: predicted."""
    training = Training.of(data)
    if training.setting["fabric"] != "shaped":
        raise NothingToShow("No run on a network of given rates.")
    swept = training.like(cluster_mbit_s=..., accumulation=...)
    flat = training.like(package_ratio=1, node_ratio=1, cluster_mbit_s=...)
    text = ""
    if len(flat):
        rate = flat.groupby("cluster_mbit_s").plan.nunique()[::-1].idxmax()
        flat, text = flat[flat.cluster_mbit_s == rate], f"Right, without levels: {rate:g} Mbit/s on all links. "
    elif swept.cluster_mbit_s.nunique() < 2:
        raise NothingToShow("Runs with one rate and one ratio of levels only.")
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.9), width_ratios=[1.2, 1])
    _over_rates(left, swept, plan, rivals)
    _without_levels(right, training.like(), flat)
    caption = f"{training.size()}, {training.network}. Left: other rates at the same ratios. {text}"
    caption += "Dotted and ticks: predicted. Median over repeats."
    return Drawing(fig, f"{training.evidence}; dotted and ticks: modelled", caption)


def _over_rates(axes: Axes, swept: pd.DataFrame, plan: str, rivals: Sequence[str]) -> None:
    for (count, runs), filled in zip(swept.groupby("accumulation"), ("full", "none", "left"), strict=False):
        for rival in rivals:
            found = [(rate, *gains(at, rival, plan)) for rate, at in runs.groupby("cluster_mbit_s")]
            rates, values, predicted = np.array(found).T
            label = f"than {PLANS[rival]}, {micro_batches(count)}"
            axes.plot(rates, values, linewidth=1.5, fillstyle=filled, label=label, **look(rival))
            axes.plot(rates, predicted, linestyle=":", color=color(rival), linewidth=1)
    axes.plot([], [], ":", color="grey", label="predicted")
    axes.set_xscale("log", base=2)
    ticks = sorted(swept.cluster_mbit_s.unique())
    axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(xlabel="rate between nodes per rank (Mbit/s)", ylabel=f"{PLANS[plan]}: times faster", ylim=(0, None))
    axes.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1.01))


def _without_levels(axes: Axes, levels: pd.DataFrame, flat: pd.DataFrame) -> None:
    others = [plan for plan in ("zeropp", "hierarchical_fp", "hierarchical") if {plan, "zero3"} <= set(flat.plan)]
    for i, (runs, name) in enumerate(((levels, "16 : 4 : 1"), (flat, "without levels"))):
        for x, plan in enumerate(others):
            value, predicted = gains(runs, "zero3", plan)
            at, look_ = x + 0.24 * (i - 0.5), {"hatch": HATCHES[i], "edgecolor": "white"}
            axes.bar(at, value, 0.22, label=name if x == 0 else None, color=PALETTE[i + 3], **look_)
            axes.plot(at, predicted, "_", color="black", markersize=11, markeredgewidth=1.6)
            note(axes, f"{value:.2f}", at, np.nanmax([value, predicted]))
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xticks(range(len(others)), [PLANS[plan].replace(", ", ",\n") for plan in others])
    axes.set(ylabel="times faster than ZeRO-3", ylim=(0, 1.35 * axes.get_ylim()[1]))
    axes.set_xlim(-0.6, max(1, len(others)) - 0.4)
    if others:
        axes.legend(fontsize=8, title="rates of the levels", title_fontsize=8)
    else:
        axes.text(0, 0.5, "without levels: not run", ha="center", fontsize=8, color="grey")

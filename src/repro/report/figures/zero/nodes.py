"""How long a step takes by number of nodes, and in which order the plans come there."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from repro.claims.sample import Sample
from repro.report.figures import marks
from repro.report.figures.base import Drawing
from repro.report.figures.data import Data, NothingToShow, paper
from repro.report.figures.zero.marks import color, look, note
from repro.report.figures.zero.runs import (
    MEASURED,
    OWN,
    PLANS,
    PREDICTED,
    PlanName,
    Training,
    micro_batches,
    parameters,
    present,
    rates,
)
from repro.report.figures.zero.times import faster, paired


def zero_scaling(data: Data, *, plans: Sequence[PlanName] = ("zero3", "zeropp", "hierarchical")) -> Drawing:
    """Weak scaling of some plans: compute and the rest of a step over the number of nodes, and the efficiency against
    the smallest run with several nodes, measured and of bytes over rates alone."""
    training = Training(data.runs("zero_train"))
    grown = training.like(nodes=...)
    grown = grown[grown.plan.isin(plans)]
    medians = grown.groupby(["plan", "nodes"])[[MEASURED, "compute_seconds", PREDICTED]].median()
    scaled = [plan for plan in present(grown, plans) if len(medians.loc[plan]) > 1]
    if not scaled:
        raise NothingToShow("Runs on one number of nodes only.")
    data.only(grown[grown.plan.isin(scaled)])
    several = [plan for plan in scaled if (medians.loc[plan].index > 1).sum() > 1]  # one node needs no slow link
    shape = {"figsize": (10 if several else 6, 4.2), "width_ratios": [1.5, 1] if several else [1], "squeeze": False}
    fig, panels = plt.subplots(1, 1 + bool(several), **shape)
    _weak_scaling(panels[0, 0], medians, scaled)
    ranks = training.setting["packages"] * training.setting["gcds"]
    together = "" if training.setting["fabric"] == OWN else ", all on one machine"
    caption = f"{ranks} processes a node{together}, a GPT of {parameters(grown)}, {training.network}. "
    counts = grown[grown.plan.isin(scaled)].groupby(["plan", "nodes"]).size()
    caption += f"Bars: medians of {marks.span(counts)} runs; hatched: compute. "
    if several:
        samples = _efficiencies(panels[0, 1], data, grown[grown.nodes > 1], medians, several)
        told = [f"{PLANS[plan]} {marks.said(sample)}" for plan, sample in samples.items()]
        caption += "Right: step time on the fewest nodes ÷ on more; dots are pairs of runs of the same occasion, "
        caption += "marks their mean, bars its 95 % interval. Measured on the most nodes: "
        caption += f"{', '.join(told) or 'no pair'}"
        caption += "; of other plans no such pair was run." if 0 < len(told) < len(scaled) else "."
    return Drawing(fig, f"{training.evidence}; dotted: modelled; dashed: paper", caption)


def _efficiencies(
    axes: Axes, data: Data, runs: pd.DataFrame, medians: pd.DataFrame, plans: Sequence[str]
) -> dict[str, Sample]:
    """Efficiency over nodes, measured, of bytes over rates, and the paper's; the samples on the most nodes by plan."""
    found, unmeasured = {}, 0
    for plan in plans:
        if sample := _efficiency(axes, data, runs[runs.plan == plan], plan):
            found[plan] = sample
        bigger = medians.loc[plan][medians.loc[plan].index > 1]
        moving = bigger[PREDICTED] - bigger.compute_seconds
        least = moving.iloc[0] / moving
        axes.plot(least, ":", fillstyle="none", **look(plan))
        if plan not in found:  # the others are in the legend; lines end near each other
            unmeasured += 1
            dy = 7 if unmeasured % 2 else -8
            marks.note(axes, PLANS[plan], least.index[-1], least.iloc[-1], dx=7, dy=dy, va="center")
    axes.axhline(paper("ZT-2")[0].value, color="black", linestyle="--", linewidth=1, label="paper, to 384 GCDs")
    axes.plot([], [], ":", color="grey", marker="o", fillstyle="none", label="bytes ÷ rates alone")
    axes.set(xlabel="nodes", ylabel="efficiency", ylim=(0, max(1.1, axes.get_ylim()[1])))
    marks.log_axis(axes.xaxis, sorted(runs.nodes.unique()))
    axes.margins(x=0.2)
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2, frameon=False, columnspacing=1)
    return found


def _efficiency(axes: Axes, data: Data, runs: pd.DataFrame, plan: str) -> Sample | None:
    """Step of the fewest nodes over that of more, as the claims read it; returns the sample on the most nodes."""
    (fewest, first), *others = runs.groupby("nodes")
    samples = {nodes: paired(data, first, some) for nodes, some in others}
    found = {fewest: 1.0} | {n: marks.point(axes, n, s, **look(plan)) for n, s in samples.items() if s}
    axes.plot(list(found), list(found.values()), label=PLANS[plan] if len(found) > 1 else None, **look(plan))
    for nodes, value in list(found.items())[1:]:
        note(axes, f"{value:.2f}", nodes, value, "right")
    return samples[max(samples)] if samples else None


def _weak_scaling(axes: Axes, medians: pd.DataFrame, plans: list[str]) -> None:
    ticks, start, grey = {}, 0, {"color": "#999999", "hatch": "///", "edgecolor": "white"}
    for plan in plans:
        mine = medians.loc[plan]
        compute = mine.compute_seconds.fillna(0)
        for x, nodes in enumerate(mine.index, start):
            total = mine[MEASURED][nodes]
            axes.bar(x, compute[nodes], 0.8, **grey)
            axes.bar(x, total - compute[nodes], 0.8, bottom=compute[nodes], color=color(plan))
            note(axes, f"{total:.{2 if total < 10 else 1}f}", x, total)
            ticks[x] = f"{nodes}\n{PLANS[plan]}" if nodes == mine.index[len(mine) // 2] else f"{nodes}"
        start += len(mine) + 1
    axes.bar(0, 0, label="compute, measured alone", **grey)
    axes.bar(0, 0, color=color(plans[-1]), label="rest (in colour): communication, software")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set(ylabel="time of a step (s)", xlabel="nodes", ylim=(0, 1.1 * medians.loc[plans, MEASURED].max()))
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    axes.grid(axis="x", visible=False)


def zero_order(data: Data, *, plans: Sequence[PlanName] = ("zero3", "zeropp", "hierarchical")) -> Drawing:
    """How much faster each plan is than the one before it, and weak scaling, with several micro-batches a step and at the
    slowest rate between nodes that was run on several numbers of them."""
    training = Training(data.runs("zero_train"))
    runs = training.like(nodes=..., accumulation=training.batches[-1], cluster_mbit_s=...)
    runs = runs[runs.plan.isin(plans) & (runs.nodes > 1)]
    runs = runs[runs.groupby("cluster_mbit_s").nodes.transform("nunique") > 1]
    if runs.empty:
        raise NothingToShow("No rate between nodes with runs on several numbers of nodes.")
    runs = runs[runs.cluster_mbit_s == runs.cluster_mbit_s.min()]
    data.only(runs)
    gains, efficiencies = list(_order(data, runs, plans)), list(_left(data, runs, plans))
    if not gains or not efficiencies:
        raise NothingToShow("No pairs of runs of the same occasion.")
    fig, panels = plt.subplots(1, 2, figsize=(10, 0.36 * max(len(gains), len(efficiencies)) + 1.4))
    marks.dot_rows(panels[0], gains, ".3g")
    marks.dot_rows(panels[1], efficiencies, ".3g")
    panels[0].axvline(1, color="grey", linewidth=1)
    panels[0].set(xlabel="step of the one ÷ of the other (logarithmic)", xscale="log")
    low, high = panels[0].dataLim.intervalx
    panels[0].set_xlim(min(0.9, 0.9 * low), 1.7 * high)
    marks.log_axis(panels[0].xaxis, marks.round_ticks(*panels[0].get_xlim()))
    fewest, most = runs.nodes.min(), runs.nodes.max()
    panels[1].axvline(paper("ZT-2")[0].value, color="black", linestyle="--", linewidth=1)
    panels[1].set(xlabel=f"efficiency: step on {fewest} nodes ÷ on {most}", xlim=(0, 1.15))
    first = runs.iloc[0]
    network = rates(first) if first.fabric == "shaped" else training.network
    caption = f"{first.packages * first.gcds:g} processes a node, a GPT of {parameters(runs)}, "
    caption += f"{micro_batches(training.batches[-1])} per step; {network}. Dots: pairs of runs of the same "
    caption += (
        "occasion; marks: their mean, with its 95 % interval where there are as many occasions as a verdict takes."
    )
    named = {"ZT-1.k": "smallest gain on 2 nodes", "ZT-1.j": "on 4", "ZT-2.d": "efficiency of the hierarchical plan"}
    if told := marks.of_claims(data, named):
        caption += f" As the claims read them: {told}."
    return Drawing(fig, f"{training.evidence}; dashed: paper, to 384 GCDs", caption)


def _order(data: Data, runs: pd.DataFrame, plans: Sequence[str]) -> Iterator[marks.Row]:
    """Each plan over the one before it, by number of nodes."""
    for nodes, some in runs.groupby("nodes"):
        for slow, fast in pairwise(plans):
            if sample := faster(data, some, slow, fast):
                yield f"{PLANS[slow]} ÷ {PLANS[fast]}, {nodes} nodes", sample, look(fast)


def _left(data: Data, runs: pd.DataFrame, plans: Sequence[str]) -> Iterator[marks.Row]:
    """The efficiency of each plan on the most nodes."""
    for plan in present(runs, plans):
        mine = runs[runs.plan == plan]
        if sample := paired(data, mine[mine.nodes == runs.nodes.min()], mine[mine.nodes == runs.nodes.max()]):
            yield PLANS[plan], sample, look(plan)

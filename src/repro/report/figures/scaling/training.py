"""Training on Frontier, predicted: TFLOPS and efficiency, the paper's ratios, and what they hinge on."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from repro.experiments.common.names import NamedPlan
from repro.experiments.scaling_train import RATIOS
from repro.report.figures.base import PALETTE, Drawing
from repro.report.figures.data import Data, paper, series
from repro.report.figures.marks import ABOVE, grid, log_axis, of_claims, span
from repro.report.figures.scaling.marks import FRONTIER, PLANS, band, batches, in_words, scenario, style, whiskers
from repro.report.figures.zero.runs import HPZ


def frontier_runs(data: Data, **fields: object) -> pd.DataFrame:
    """Runs of scaling_train for Frontier and its scenario, of those whose point `fields` have these values."""
    found = data.runs("scaling_train", hardware=list(FRONTIER), **fields)
    alike = ["hardware", "model", "accumulation"]  # of these the run of the most ranks, and with the most draws
    largest = found.sort_values(["ranks", "draws"]).drop_duplicates(alike, keep="last")
    data.only(largest)
    return largest.sort_values(alike)


def _model(name: str) -> str:
    """`gpt-20b` → `a GPT of 20 billion parameters`."""
    return f"a GPT of {name.removeprefix('gpt-').removesuffix('b')} billion parameters"


def _title(run: pd.Series) -> str:
    return f"{FRONTIER[run.hardware]},\n{batches(run.accumulation)}"


def scaling_gcds(
    data: Data, *, model: str = "gpt-20b", plans: Sequence[NamedPlan] = ("zero3", "zeropp", "hierarchical")
) -> Drawing:
    """TFLOPS per GCD and efficiency against the fewest nodes that hold a plan, over the number of GCDs; with the fewest
    micro-batches and with the most."""
    found = frontier_runs(data, model=model)
    found = found[found.accumulation.isin([found.accumulation.min(), found.accumulation.max()])]
    data.only(found)
    shape = {"figsize": (max(5, 2.3 * len(found) + 0.8), 5.6), "squeeze": False, "sharey": "row"}
    figure, axes = plt.subplots(2, len(found), **shape)
    target, table = paper("ZT-2")[0].value, series(found)
    table = table[(table.kind == "ranks") & table.fits.astype(bool) & table.plan.isin(list(plans))]
    for (top, bottom), (_, run) in zip(axes.T, found.iterrows(), strict=True):
        rows = table[table.path == run.path]
        for index, plan in enumerate(plans):
            look = style(index) | {"linestyle": "-", "label": PLANS[plan]}
            band(top, rows[rows.plan == plan], "ranks", "tflops", **look)
            band(bottom, rows[rows.plan == plan], "ranks", "efficiency", **look)
        top.set_title(_title(run), fontsize=9)
        bottom.set_xlabel("GCDs")
        bottom.axhline(target, color="black", linestyle=":", linewidth=1, label=f"paper: {target}")
        for panel in (top, bottom):
            counts = sorted(rows.ranks.unique())
            log_axis(panel.xaxis, counts[::2] + counts[-1:] * (len(counts) % 2 == 0), fontsize=8)
    axes[0, 0].set_ylabel("TFLOPS per GCD")
    axes[1, 0].set_ylabel("efficiency against\nthe fewest nodes")
    handles = dict(zip(*axes[1, 0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), ncols=4, **ABOVE)
    caption = f"Of {_model(model)}, 2048 tokens a micro-batch. Lines: medians; bands: 95 % of what is uncertain "
    caption += "of machine and engine. A plan that does not fit in 64 GB is left out. Vertical axes do not begin at 0, "
    caption += "horizontal ones are logarithmic."
    named = {"ZT-2.b": "with 1 micro-batch", "ZT-2.e": "with 4"}
    if told := of_claims(data, named):
        caption += f" Efficiency of the hierarchical plan with 20 billion parameters on 384 GCDs: {told}."
    fewest = {PLANS[plan]: rows.ranks.min() for plan, rows in table.groupby("plan")}
    if len(set(fewest.values())) > 1:
        counted = ", ".join(f"{plan} {count:g}" for plan, count in fewest.items())
        caption += f" Efficiency is counted from the fewest GCDs that hold a plan ({counted}). For a plan that fits "
        caption += "on fewer it includes the loss from one node to two, for the others not."
    caption += scenario(found)
    return Drawing(figure, "modelled; dotted: paper", caption)


def scaling_ratios(data: Data) -> Drawing:
    """How many times as fast one plan is as another, by machine, model and batch, beside what the paper reports."""
    found = frontier_runs(data).reset_index(drop=True)
    rows = [
        f"{FRONTIER[run.hardware]}, {run.model.removeprefix('gpt-').upper()}, {batches(run.accumulation)}"
        for run in found.itertuples()
    ]
    published = {number.label: number.value for number in paper("ZT-1")}  # times as fast as ZeRO-3
    figure, axes = plt.subplots(1, len(RATIOS), figsize=(10, 0.32 * len(found) + 1.9), sharey=True)
    for panel, (name, plans) in zip(axes, RATIOS.items(), strict=True):
        fast, slow = (PLANS[plan] for plan in plans)
        for hardware, some in found.groupby("hardware"):
            look = style(list(FRONTIER).index(hardware))
            panel.errorbar(some[name], some.index, xerr=whiskers(some, name), capsize=3, **look)
        panel.axvline(1, color="black", linewidth=0.8)
        panel.axvline(published[fast] / published[slow], color="black", linestyle=":", linewidth=1.2)
        panel.plot(published[fast] / published[slow], -0.6, "s", color="black", clip_on=False)
        panel.set(title=f"{fast} ÷ {slow}", xlabel="times as fast", xscale="log")
        panel.grid(axis="y", visible=False)
        low, high = panel.get_xlim()
        log_axis(panel.xaxis, [tick for tick in (0.6, 0.8, 1, 1.5, 2, 3, 4) if low <= tick <= high])
    axes[0].set_yticks(range(len(rows)), rows, fontsize=8)
    axes[0].set_ylim(len(rows) - 0.4, -0.9)
    caption = f"{found.ranks.iloc[0]:g} GCDs on {found.nodes.iloc[0]} nodes; 10B, 20B: billion parameters. Marks: "
    caption += "medians; bars: 95 % of what is uncertain of machine and engine. Horizontal axes are logarithmic. "
    caption += f"The paper's {PLANS['hierarchical']} ÷ {PLANS['zero3']} is the product of its two other numbers."
    caption += scenario(found)
    return Drawing(figure, "modelled; black squares and dotted: paper", caption)


def scaling_changes(data: Data, *, model: str = "gpt-20b") -> Drawing:
    """TFLOPS of the hierarchical plan with one choice changed at a time; hollow where it does not fit."""
    found = frontier_runs(data, model=model)
    table = series(found).query("kind == 'levels'")
    figure, axes = grid(len(found), 2, (3.1, 3), (2.6, 0.2), sharey=True)
    gains, largest = dict[str, list[float]](), dict[str, list[float]]()
    for panel, (_, run) in zip(axes.flat, found.iterrows(), strict=False):
        rows = table[table.path == run.path].reset_index(drop=True)
        color = style(list(FRONTIER).index(run.hardware))["color"]
        for fits, some in rows.groupby("fits"):
            look = {"color": color, "mfc": color if fits else "white", "fmt": "o", "markersize": 5, "capsize": 2}
            panel.errorbar(some.tflops, some.index, xerr=whiskers(some, "tflops"), **look)
        panel.axvline(rows.tflops[0], color="black", linestyle=":", linewidth=1)
        best = rows.loc[rows.tflops.where(rows.fits).idxmax()]
        most = rows.loc[np.log(rows.tflops / rows.tflops[0]).abs().idxmax()]
        for told, row in ((gains, best), (largest, most)):
            told.setdefault(row.plan, []).append(row.tflops / rows.tflops[0])
        panel.set(xlabel="TFLOPS per GCD", xlim=(0, None))
        panel.set_title(_title(run).replace("\n", " "), fontsize=9)
        panel.set_yticks(range(len(rows)), rows.plan, fontsize=8)
        panel.grid(axis="y", visible=False)
    axes[0][0].invert_yaxis()
    hollow = ", hollow where the plan does not fit in memory" * (not table.fits.all())
    caption = f"Of {_model(model)} on {found.ranks.iloc[0]:g} GCDs. Marks: medians{hollow}; bars: 95 % of what "
    caption += "is uncertain. Dotted: the plan unchanged. All rows of a panel share their draws, so rows whose bars "
    caption += "overlap may still differ clearly; the records hold quantiles of rows, not of ratios of rows."
    caption += f" The change that matters most, by medians: {_over_panels(largest)}. The fastest of those that fit: "
    caption += f"{_over_panels(gains)}.{scenario(found)}"
    return Drawing(figure, "modelled", caption)


def _over_panels(ratios: Mapping[str, Sequence[float]]) -> str:
    """`16 bits everywhere, 0.93 to 0.94 times as fast in 2 panels; ...`."""
    told = []
    for plan, each in ratios.items():
        told.append(f"{plan}, {span(each, '.2f')} times as fast in {len(each)} panel{'s' * (len(each) > 1)}")
    return "; ".join(told)


def scaling_tornado(data: Data, *, model: str = "gpt-20b", accumulation: int = 1, parameters: int = 8) -> Drawing:
    """hierarchical ÷ ZeRO++ with one parameter or assumption at a time at the ends of its interval, the widest first."""
    found = frontier_runs(data, model=model, accumulation=accumulation)
    figure, axes = plt.subplots(1, len(found), figsize=(4 * len(found) + 0.5, 3.6), squeeze=False)
    likely, widest, shown = list[float](), list[str](), set[str]()
    for panel, (number, run) in zip(axes[0], found.iterrows(), strict=True):
        rows = series(found.loc[[number]]).query("kind == 'tornado'").nlargest(parameters, "swing")
        likely.append(rows.likely.iloc[0])
        shown |= set(rows.parameter)
        first = rows.iloc[0]
        widest.append(
            f"{in_words(first.parameter)}, {first.at_low:.2f} to {first.at_high:.2f} ({FRONTIER[run.hardware]})"
        )
        for end, color, hatch in (("low", PALETTE[0], ""), ("high", PALETTE[1], "///")):
            reach, look = rows[f"at_{end}"] - rows.likely, {"color": color, "hatch": hatch, "edgecolor": "white"}
            panel.barh(range(len(rows)), reach, left=rows.likely, label=f"parameter at its {end} end", **look)
        panel.axvline(likely[-1], color="black", linewidth=1)
        panel.set_yticks(range(len(rows)), [in_words(name) for name in rows.parameter], fontsize=8)
        panel.grid(axis="y", visible=False)
        panel.invert_yaxis()
        panel.set(title=FRONTIER[run.hardware], xlabel="hierarchical ÷ ZeRO++")
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, ncols=2, **ABOVE)
    caption = f"Of {_model(model)}, {batches(accumulation)}, {found.ranks.iloc[0]:g} GCDs. Bars: the predicted ratio "
    caption += "with one parameter at an end of its interval, all others at their likely values. Line: all likely "
    medians = " and ".join(f"{value:.3g}" for value in found.hierarchical_over_zeropp)
    caption += f"({' and '.join(f'{value:.3g}' for value in likely)}); the medians over all draws differ "
    caption += f"({medians})."
    if told := of_claims(data, {"ZT-1.e": FRONTIER["frontier"], "ZT-1.h": FRONTIER["frontier-rccl"]}):
        caption += f" The claims read the medians with 4 micro-batches: {told}."
    caption += f" Widest: {'; '.join(widest)}.{HPZ * ('secondary' in shown)}{scenario(found)}"
    return Drawing(figure, "modelled", caption)

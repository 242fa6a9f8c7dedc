"""Training on Frontier, predicted: TFLOPS and efficiency, the paper's ratios, and what they hinge on."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from repro.report.figures.base import PALETTE, Data, Drawing, NothingToShow, paper, series
from repro.report.figures.scaling.marks import FRONTIER, PLANS, PlanName, band, batches, plain_ticks, style, whiskers

_LOOKS = {
    "zero3": 0,
    "hpz": 1,
    "qwz": 1,
    "qgz": 1,
    "zeropp": 1,
    "hierarchical": 2,
    "hierarchical_fp": 3,
    "mics": 4,
    "hsdp": 4,
}
_RATIOS = {  # metric: title
    "hierarchical_over_zeropp": "hierarchical ÷ ZeRO++",
    "zeropp_over_zero3": "ZeRO++ ÷ ZeRO-3",
    "hierarchical_over_zero3": "hierarchical ÷ ZeRO-3",
}


def _runs(data: Data, **fields: object) -> pd.DataFrame:
    """Runs of scaling_train for Frontier and its scenario, of those whose point `fields` have these values."""
    found = data.runs("scaling_train")
    found = found[found.hardware.isin(list(FRONTIER))]
    for name, value in fields.items():
        found = found[found[name] == value]
    if found.empty:
        raise NothingToShow(f"No record of a scaling_train run for Frontier{f' with {fields}' if fields else ''}.")
    return found.sort_values(["hardware", "model", "accumulation"])


def _color(hardware: str) -> str:
    return PALETTE[list(FRONTIER).index(hardware)]


def scaling_gcds(
    data: Data, *, model: str = "gpt-20b", plans: Sequence[PlanName] = ("zero3", "zeropp", "hierarchical")
) -> Drawing:
    """TFLOPS per GCD and efficiency against one node, over the number of GCDs, of plans that fit into memory."""
    found = _runs(data, model=model)
    table = series(found)
    table = table[(table.kind == "ranks") & table.fits.astype(bool)]
    figure, axes = plt.subplots(2, len(found), figsize=(2.9 * len(found) + 0.8, 5.6), squeeze=False, sharey="row")
    for (top, bottom), run in zip(axes.T, found.itertuples(), strict=True):
        mine = table[(table.hardware == run.hardware) & (table.accumulation == run.accumulation)]
        for plan in plans:
            look = style(_LOOKS.get(plan, 5)) | {"linestyle": "-", "label": PLANS[plan]}
            band(top, mine[mine.plan == plan], "ranks", "tflops", **look)
            band(bottom, mine[mine.plan == plan], "ranks", "efficiency", **look)
        top.set_title(f"{FRONTIER[run.hardware]},\n{batches(run.accumulation)}", fontsize=9)
        bottom.set_xlabel("GCDs")
        _papers_efficiency(bottom)
        for panel in (top, bottom):
            panel.set_xscale("log", base=2)
            plain_ticks(panel.xaxis, sorted(mine.ranks.unique()), fontsize=7)
    axes[0, 0].set_ylabel("TFLOPS per GCD")
    axes[1, 0].set_ylabel("efficiency\nagainst one node")
    axes[0, 0].legend(fontsize=7)
    size = f"GPT of {model.removeprefix('gpt-').upper()} parameters, 2048 tokens a micro-batch"
    return Drawing(figure, "modelled", f"{size}; bands of 5 to 95 % of the machine's uncertain parameters.")


def _papers_efficiency(axes: Axes) -> None:
    target = paper("ZT-2")[0].value
    axes.axhline(target, color="black", linestyle=":", linewidth=1)
    where = ("axes fraction", "data")
    axes.annotate(f"paper: {target}", (1, target), xycoords=where, ha="right", va="bottom", fontsize=7)


def scaling_ratios(data: Data) -> Drawing:
    """How many times as fast one plan is as another, by machine, model and batch, beside what the paper reports."""
    found = _runs(data).reset_index(drop=True)
    rows = [
        f"{FRONTIER[run.hardware]}, {run.model.removeprefix('gpt-').upper()}, {batches(run.accumulation)}"
        for run in found.itertuples()
    ]
    published = _papers_ratios()
    figure, axes = plt.subplots(1, len(_RATIOS), figsize=(10, 0.32 * len(found) + 1.6), sharey=True)
    for panel, (name, title) in zip(axes, _RATIOS.items(), strict=True):
        for hardware, some in found.groupby("hardware"):
            look = style(list(FRONTIER).index(hardware))
            panel.errorbar(some[name], some.index, xerr=whiskers(some, name), capsize=3, **look)
        panel.axvline(1, color="black", linewidth=0.8)
        panel.axvline(published[name], color="black", linestyle=":", linewidth=1.2)
        panel.plot(published[name], -0.6, "s", color="black", clip_on=False)
        panel.set(title=title, xlabel="times as fast", xscale="log")
        low, high = panel.get_xlim()
        plain_ticks(panel.xaxis, [tick for tick in (0.6, 0.8, 1, 1.5, 2, 3, 4) if low <= tick <= high])
    axes[0].set_yticks(range(len(rows)), rows, fontsize=8)
    axes[0].invert_yaxis()
    caption = f"{found.ranks.iloc[0]:g} GCDs on {found.nodes.iloc[0]} nodes."
    return Drawing(figure, "modelled (bands), paper (squares)", caption)


def _papers_ratios() -> dict[str, float]:
    """From the paper's factors over ZeRO-3."""
    over_zero3 = {number.label: number.value for number in paper("ZT-1")}
    zeropp, hierarchical = over_zero3["ZeRO++"], over_zero3["hierarchical"]
    return {
        "zeropp_over_zero3": zeropp,
        "hierarchical_over_zero3": hierarchical,
        "hierarchical_over_zeropp": hierarchical / zeropp,
    }


def scaling_changes(data: Data, *, model: str = "gpt-20b") -> Drawing:
    """TFLOPS of the hierarchical plan with one choice changed at a time; hollow where it does not fit."""
    found = _runs(data, model=model)
    figure, axes = plt.subplots(1, len(found), figsize=(2.2 * len(found) + 2.4, 3.2), squeeze=False, sharey=True)
    for panel, (number, run) in zip(axes[0], found.iterrows(), strict=True):
        rows = series(found.loc[[number]])
        rows = rows[rows.kind == "levels"].reset_index(drop=True)
        color = _color(run.hardware)
        for fits, some in rows.groupby("fits"):
            look = {"color": color, "mfc": color if fits else "white", "fmt": "o", "markersize": 5, "capsize": 2}
            panel.errorbar(some.tflops, some.index, xerr=whiskers(some, "tflops"), **look)
        panel.axvline(rows.tflops[0], color="black", linestyle=":", linewidth=1)
        panel.set(xlabel="TFLOPS per GCD", xlim=(0, None))
        panel.set_title(f"{FRONTIER[run.hardware]},\n{batches(run.accumulation)}", fontsize=8)
    axes[0][0].set_yticks(range(len(rows)), rows.plan, fontsize=8)
    axes[0][0].invert_yaxis()
    caption = f"{model}, {found.ranks.iloc[0]:g} GCDs; bands of 5 to 95 %."
    return Drawing(figure, "modelled", caption)


def scaling_tornado(data: Data, *, model: str = "gpt-20b", accumulation: int = 1, parameters: int = 8) -> Drawing:
    """hierarchical ÷ ZeRO++ with one parameter at a time at the ends of its interval, the widest swings first."""
    found = _runs(data, model=model, accumulation=accumulation)
    figure, axes = plt.subplots(1, len(found), figsize=(4.6 * len(found) + 0.5, 3.6), squeeze=False)
    for panel, (number, run) in zip(axes[0], found.iterrows(), strict=True):
        rows = series(found.loc[[number]])
        rows = rows[rows.kind == "tornado"].sort_values("swing", ascending=False).head(parameters)
        for end, color, hatch in (("low", PALETTE[0], ""), ("high", PALETTE[1], "///")):
            reach, look = rows[f"at_{end}"] - rows.likely, {"color": color, "hatch": hatch, "edgecolor": "white"}
            panel.barh(range(len(rows)), reach, left=rows.likely, label=f"parameter at its {end} end", **look)
        panel.axvline(rows.likely.iloc[0], color="black", linewidth=1)
        panel.set_yticks(range(len(rows)), rows.parameter)
        panel.invert_yaxis()
        panel.set(title=FRONTIER[run.hardware], xlabel="hierarchical ÷ ZeRO++")
    axes[0][0].legend(fontsize=7)
    caption = f"{model}, {batches(accumulation)}, {found.ranks.iloc[0]:g} GCDs."
    return Drawing(figure, "modelled", caption)

"""What the step model takes for true: the overlap, fitted to published steps, and what would give the paper's numbers."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.report.figures.base import PALETTE, Drawing
from repro.report.figures.data import Data, series
from repro.report.figures.marks import log_axis, of_claims
from repro.report.figures.scaling.marks import PLANS, SLOW_RING, batches, in_words, style, whiskers
from repro.report.figures.zero.runs import HPZ
from repro.scaling.ladder import CHOICES, ENGINE_PRIORS, MACHINE_PRIORS, TARGETS

_TITLES = {
    "hierarchical_over_zeropp": f"{PLANS['hierarchical']} ÷ {PLANS['zeropp']}",
    "zeropp_over_zero3": f"{PLANS['zeropp']} ÷ {PLANS['zero3']}",
    "hierarchical_over_zero3": f"{PLANS['hierarchical']} ÷ {PLANS['zero3']}",
    "efficiency": "efficiency",
}


def _most_draws(data: Data, experiment: str) -> pd.DataFrame:
    """The series of the run with the most draws."""
    found = data.runs(experiment).nlargest(1, "draws")
    data.only(found)
    return series(found)


def scaling_overlap(data: Data) -> Drawing:
    """Predicted against published ratios of ZeRO++ to ZeRO-3 on 384 V100s, and the error over the overlap."""
    table = _most_draws(data, "scaling_validation")
    points, profile = (table[table.kind == kind] for kind in ("point", "profile"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
    for number, (fitted, some) in enumerate(points.groupby(points.fitted.astype(bool), sort=False)):
        reach = whiskers(some, "predicted")
        fill = "full" if fitted else "none"
        label = "fitted: 18B, 138B" if fitted else "not fitted: 49B, 91B"
        # Where both are of one number, the filled mark lies inside the hollow one.
        marks = {"markersize": 4 if fitted else 9, "capsize": 2 if fitted else 5, "zorder": 3 if fitted else 2}
        left.errorbar(some.ratio, some.predicted, yerr=reach, fillstyle=fill, label=label, **marks, **style(number))
    fitted = points[points.fitted.astype(bool)]
    left.plot(fitted.ratio, fitted.left_out, "x", color="black", markersize=5, label="left out, others fitted")
    ends = np.array([0.9, 2.9])
    left.plot(ends, ends, color="black", linewidth=1)
    left.fill_between(ends, ends / 1.1, ends * 1.1, color="grey", alpha=0.2)
    left.set(xlabel="published, ZeRO++ ÷ ZeRO-3", ylabel="predicted", xlim=(1.2, 2.4), ylim=ends)
    left.legend(fontsize=8, loc="upper left")
    run = table.iloc[0]
    for name, label, look in (("rms", "all else likely", "-"), ("rms_profile", "all else at its best", "--")):
        right.plot(profile.overlap, 100 * profile[name], look, color=PALETTE[0], label=label)
    right.axvspan(run.overlap_low, run.overlap_high, color=PALETTE[0], alpha=0.15, label="95 % interval")
    right.axvline(0.7, color="black", linestyle=":", label="assumed before: 0.7")
    right.set(xlabel="share of the compute that hides messages", ylabel="root mean square error (%)", ylim=(0, None))
    right.legend(fontsize=8, loc="upper left")
    caption = "Left: filled marks are fitted, hollow ones not; crosses: fitted without this number. Bars: what is "
    caption += "uncertain of the machine (95 %) and of the model itself. Line: predicted as published; grey: within "
    caption += "10 %. Right: error of the fitted numbers, over the overlap that is assumed."
    named = {"ZP-2.a": "of the fitted numbers", "ZP-2.b": "of each when left out", "ZP-2.c": "of those not fitted"}
    if told := of_claims(data, named):
        caption += f" Root mean square of the logarithmic errors, in %: {told}."
    return Drawing(figure, "modelled against published measurements", caption)


def scaling_assumptions(data: Data) -> Drawing:
    """The paper's four numbers over scenarios, and which assumptions the draws share that give all four."""
    table = _most_draws(data, "scaling_ladder")
    rungs = table[table.kind.isin(["cumulative", "single"])].sort_values("kind", kind="stable").reset_index(drop=True)
    figure = plt.figure(figsize=(10, 10))
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    panels = upper.subplots(1, len(TARGETS), sharey=True)
    for panel, (name, target) in zip(panels, TARGETS.items(), strict=True):
        _numbers(panel, rungs, name)
        reach = target.tolerance * (target.value if target.relative else 1)
        panel.axvspan(target.value - reach, target.value + reach, color="black", alpha=0.1)
        panel.axvline(target.value, color="black", linestyle=":", linewidth=1.2)
        panel.set_title(f"{_TITLES[name]}\npaper: {target.value:g}", fontsize=9)
    together = rungs.kind == "cumulative"
    names = [
        "+ " + text if also and i else text for i, (text, also) in enumerate(zip(rungs.change, together, strict=True))
    ]
    panels[0].set_yticks(range(len(rungs)), names, fontsize=8)
    panels[-1].set_xticks([0.9, 0.95, 1], ["0.9", "0.95", "1"], fontsize=8)
    panels[0].invert_yaxis()
    left, right = lower.subplots(1, 2, width_ratios=[1, 1.2])
    _choices(left, table[table.kind == "set"])
    _spans(right, table[table.kind == "draw"])
    run = table.iloc[0]
    caption = "Above: changes added one after the other (circles), then each alone (squares); filled: within the "
    caption += f"claim's tolerance (grey), hollow: not. Below: of {table.draws.iloc[0]:g} draws from wide priors "
    caption += f"{100 * run.share_all:.1f} % give all four numbers at once. {batches(1)}: {100 * run.share_all_1:.1f} "
    caption += f"%, 4: {100 * run.share_all_4:.1f} %, 16: {100 * run.share_all_16:.1f} %. Below right: 5, 50 and 95 % "
    caption += "quantiles of these draws, and of all. Axes of ratios are logarithmic. A row above has one micro-batch "
    caption += "per step unless it says more, and everything else at its likely value. So its numbers are neither "
    caption += "medians over draws nor those of the claims, with 4 micro-batches. The third "
    caption += f"number is the product of the first two.{SLOW_RING}{HPZ} Scales apart: the scale factors of quantised "
    caption += "values are messages of their own."
    return Drawing(figure, "modelled; dotted: paper", caption)


def _numbers(panel: Axes, rungs: pd.DataFrame, name: str) -> None:
    """A marker per scenario, filled where it reaches the paper's number."""
    for (kind, reached), some in rungs.groupby(["kind", rungs[f"reached_{name}"].astype(bool)]):
        look = style(0 if kind == "cumulative" else 1)
        panel.plot(some[name], some.index, fillstyle="full" if reached else "none", **look)
    panel.axhline((rungs.kind == "cumulative").sum() - 0.5, color="grey", linewidth=0.8)
    if name != "efficiency":
        panel.set_xscale("log")
        log_axis(panel.xaxis, [0.8, 1, 1.4, 2, 2.8], fontsize=8)


def _choices(panel: Axes, sets: pd.DataFrame) -> None:
    """Share of the draws with each choice that give all four numbers."""
    sets = sets.set_index("choice").loc[list(CHOICES)].reset_index()
    panel.barh(range(len(sets)), 100 * sets.share, color=PALETTE[0])
    names = [in_words(row.choice, str(row.value)) for row in sets.itertuples()]
    panel.set_yticks(range(len(sets)), names, fontsize=7.5)
    panel.grid(axis="y", visible=False)
    panel.invert_yaxis()
    panel.set(xlabel="draws that give all four (%)")


def _spans(panel: Axes, draws: pd.DataFrame) -> None:
    """Where in its prior each parameter lies, of the draws that give all four and of all: 5, 50 and 95 %."""
    wide = [name for name, prior in (ENGINE_PRIORS | MACHINE_PRIORS).items() if hasattr(prior, "log")]
    kinds = (("all draws", draws[draws.typical.astype(bool)]), ("all four numbers", draws[draws.reached.astype(bool)]))
    for number, (label, some) in enumerate(kinds):
        for row, name in enumerate(wide):
            prior = (ENGINE_PRIORS | MACHINE_PRIORS)[name]
            low, high, values = *prior.ends, some[name].astype(float)
            if prior.log:
                low, high, values = np.log(low), np.log(high), np.log(values)
            if len(values):
                ends, middle, top = np.quantile((values - low) / (high - low), [0.05, 0.5, 0.95])
                look = style(number) | {"label": label if not row else None, "capsize": 2}
                panel.errorbar(middle, row + 0.3 * number - 0.15, xerr=[[middle - ends], [top - middle]], **look)
    ticks = [f"{in_words(name)}\n{_prior(name)}" for name in wide]
    panel.set_yticks(range(len(wide)), ticks, fontsize=7.5)
    panel.grid(axis="y", visible=False)
    panel.set(xlabel="place in the prior (0: low end, 1: high end)", xlim=(0, 1))
    panel.invert_yaxis()
    panel.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)


def _prior(name: str) -> str:
    """A prior in words; latencies in microseconds."""
    prior = (ENGINE_PRIORS | MACHINE_PRIORS)[name]
    if not name.endswith("latency_s"):
        return str(prior)
    low, high = (1e6 * end for end in prior.ends)
    return f"{low:g} to {high:g} µs, {str(prior).rsplit(', ', 1)[1]}"

"""Figures of Flover's queue model: what the paper prints beside its prediction, and what another c gives."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy.stats import chi2

from repro.flover import paper
from repro.flover.queueing import cost
from repro.report.figures import marks
from repro.report.figures.base import LINE_STYLES, MARKERS, PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow, series

_PANELS = [  # figure of the paper, quantity, title, unit of the axis, its scale
    ("fig4a", "seconds", "v2 Fig. 4(a)", "until all are done (s)", "linear"),
    ("fig4c", "latency ÷ alone", "v2 Fig. 4(c)", "mean latency ÷ alone", "linear"),
    ("fig7", "seconds", "v1 Fig. 7", "until all are done (s)", "linear"),
    ("fig7", "baseline", "v1 Fig. 7, FasterTransformer", "until all are done (s)", "linear"),
    ("fig8", "iterations", "v1 Fig. 8, iterations", "iterations", "log"),
    ("fig8", "overlap", "v1 Fig. 8, overlap", "overlap (%)", "log"),
    ("fig8", "speedup", "v1 Fig. 8, speedup", "speedup over instances", "log"),
    ("reordering", "seconds", "memory shuffle, seconds", "until all are done (s)", "log"),
    ("reordering", "gain", "memory shuffle, gain", "gain of reordering", "linear"),
    ("reordering", "baseline", "memory shuffle, FasterTransformer", "its time ÷ Flover's", "linear"),
    ("progress", "seconds", "v2 progress, LLaMA-13B", "until all are done (s)", "linear"),
    ("progress", "baseline", "v2 progress, windows, at 37 s", "share of the work (%)", "linear"),
]
_AXES = {"fig8": "mean interval (ms)", "reordering": "longest answer (tokens)", "progress": ""}
_COLOURS = {model.name: number for number, model in enumerate(paper.MODELS.values())}
_COLOURS |= {f"{interval_ms} ms": number for number, interval_ms in enumerate(paper.V1_INTERVALS_MS)}
_COLOURS |= {"GPT-J in v1": 0, "v1 Fig. 9(b)": 5}
_LINES = {"with": 4, "batch 2": 3, "batch 4": 5}  # by what stands behind the comma in a curve's name
_SHORT = {"fig4a": "Fig. 4(a)", "fig7": "v1 Fig. 7", "progress": "progress"}  # names of figures
C = "c: the time each further request adds to an iteration, as a share of an iteration over one request."
_WORST = {  # claims: of which figure
    "FL-F4a.a": "Fig. 4(a)",
    "FL-F4c.b": "Fig. 4(c)",
    "FL-PROG.a": "progress",
    "FL-PROG.f": "its windows",
    "FL-F7": "v1 Fig. 7",
    "FL-F7.d": "its FasterTransformer",
    "FL-MS.f": "FasterTransformer in the memory shuffle",
}
_REST = {
    "FL-F8.a": "χ² of v1 Fig. 8's iterations",
    "FL-F8.b": "least factor by which its predicted speedup falls from one interval to the next",
    "FL-MS.b": "largest predicted gain of reordering",
}
_ERRORS = {  # figure, metric: name of the line
    ("fig4a", "rms_relative_error"): "v2 Fig. 4(a), seconds",
    ("fig4c", "rms_relative_error"): "v2 Fig. 4(c), at 8 and 16",
    ("progress", "rms_relative_error"): "v2 progress, seconds",
    ("fig7", "rms_relative_error"): "v1 Fig. 7, seconds",
    ("fig8", "rms_relative_error"): "v1 Fig. 8, iterations",
    ("fig8", "speedup_rms_error"): "v1 Fig. 8, speedups",
    ("reordering", "rms_relative_error"): "memory shuffles, seconds",
}


def flover_model(data: Data) -> Drawing:
    """v2 Fig. 4(a), 4(c) and progress, v1 Fig. 7, 8, and the memory shuffles: every printed number beside what the model predicts."""
    runs = data.runs("flover_queue")
    runs = runs[runs.figure.notna() & runs.batch_cost.isna()]
    if runs.empty:
        raise NothingToShow("No record of a figure of the paper at the c of Fig. 4(c).")
    data.only(runs)
    table = series(runs)
    shown = [each for each in _PANELS if len(_rows(table, *each[:2]))]
    fig, panels = marks.grid(len(shown), 3, (3.2, 3.1), (0.4, 0))
    for axes, (figure, quantity, title, label, scale) in zip(panels.flat, shown, strict=False):
        (_progress if figure == "progress" else _panel)(axes, _rows(table, figure, quantity), scale)
        axes.set(ylabel=label, xlabel=_AXES.get(figure, "requests"))
        _legend(axes, title)
    found = (each.rsplit(" ", 1) for each in runs.costs.iloc[0].split(", "))
    costs = ", ".join(f"{paper.MODELS[model].name} {float(value):.4f}" for model, value in found)
    caption = "Lines with hollow marks: predictions. They use T1, the time of a request alone, from Fig. 4(a) (v1: "
    caption += f"Fig. 7), and c from Fig. 4(c) at 32 requests: {costs}. {C} Crosses: printed (upright: with "
    caption += "reordering). v1, v2: versions of the paper. Logarithmic: all horizontal axes, and the vertical ones of "
    caption += "Fig. 8 and of the shuffle's seconds. Bands: a standard deviation over draws of arrivals or lengths. "
    caption += "Overlap: the share of all requests that an average iteration holds. FasterTransformer: an instance for "
    caption += "each request; those that run at once give answers at the slope of the totals in "
    caption += "v1 Fig. 7 at 500 ms (memory shuffle of v2: in Fig. 4(a)). Speedup: over these. Batch: rows of a "
    caption += "request; each costs c. Windows: batches, or instances, that run at once share the GPU evenly. "
    caption += "Memory shuffle: answers of random lengths, with reordering and without; the lines "
    caption += "coincide where reordering gains little; FasterTransformer is compared with Flover with reordering; "
    caption += "v1 Fig. 9(b) has 16 requests. Furthest off, predicted for printed: "
    caption += f"{'; '.join(_furthest(_rows(table, *each[:2]), each[2]) for each in shown)}."
    if told := marks.of_claims(data, _WORST):
        caption += f" Worst errors in %: {told}."
    if told := marks.of_claims(data, _REST):
        caption += f" {told}."
    return Drawing(fig, "modelled; crosses: paper", caption)


def _furthest(rows: pd.DataFrame, title: str) -> str:
    """Of one panel the printed number that the prediction misses most, by their ratio."""
    row = rows.loc[np.log(rows.predicted / rows.printed).abs().idxmax()]
    predicted, printed = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (row.predicted, row.printed))
    return f"{title} {predicted} for {printed}"


def _rows(table: pd.DataFrame, figure: str, quantity: str) -> pd.DataFrame:
    return table[(table.figure == figure) & (table.quantity == quantity)]


def _panel(axes: Axes, rows: pd.DataFrame, scale: str) -> None:
    for number, (curve, points) in enumerate(rows.groupby("curve", sort=False)):
        model, _, side = str(curve).partition(", ")
        color = PALETTE[_COLOURS.get(model, number % 6)]
        line = _LINES.get(side, _COLOURS.get(model, number % 6))  # the same model has the same colour everywhere
        look = {"color": color, "marker": MARKERS[line], "mfc": "none", "markersize": 4}
        axes.plot(points.x, points.predicted, linestyle=LINE_STYLES[line], label=curve, **look)
        band = points.predicted - points.sd, points.predicted + points.sd
        axes.fill_between(points.x, *band, color=color, alpha=0.2, linewidth=0)
        cross = {"marker": "+" if side == "with" else "x", "markersize": 5, "linestyle": ""}
        axes.plot(points.x, points.printed, color=color if rows.curve.nunique() > 1 else "black", **cross)
    if scale == "log":
        ends = 0.8 * rows[["predicted", "printed"]].min().min(), 1.25 * rows[["predicted", "printed"]].max().max()
        marks.log_axis(axes.yaxis, marks.round_ticks(*ends))
    places = sorted(rows.x.unique())
    marks.log_axis(axes.xaxis, _apart(places) if len(places) < 10 else [20, 100, 500, 2000])


def _progress(axes: Axes, rows: pd.DataFrame, scale: str) -> None:
    """Numbers without a common axis, with the error of each."""
    for at, row in enumerate(rows.itertuples()):
        axes.plot(at, row.predicted, MARKERS[0], color=PALETTE[_COLOURS["LLaMA-13B"]], mfc="none")
        axes.plot(at, row.printed, "x", color="black")
        marks.note(axes, f"{100 * (row.predicted / row.printed - 1):+.0f} %", at, row.predicted, 8, va="center")
    axes.set_xticks(range(len(rows)), rows.curve)
    axes.set(xlim=(-0.5, len(rows) - 0.3), yscale=scale)
    axes.margins(y=0.2)


def _apart(places: list[float]) -> list[float]:
    """Those of ascending places that can be labelled side by side on a logarithmic axis."""
    kept: list[float] = []
    for place in places:
        if not kept or place / kept[-1] > 1.4:
            kept.append(place)
    return kept


def _legend(axes: Axes, title: str) -> None:
    """Above the panel: inside it would cover lines. One curve needs no name."""
    handles, names = axes.get_legend_handles_labels()
    if len(handles) < 2:
        axes.set_title(title, fontsize=9)
    else:
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 2}
        small = {"title_fontsize": 9, "fontsize": 7.5, "frameon": False, "columnspacing": 1, "handlelength": 1.8}
        axes.legend(handles, names, title=title, **small, **place)


def flover_batch_cost(data: Data) -> Drawing:
    """What another c, the cost of a further request in an iteration, would predict: the c that each figure asks for."""
    runs = data.runs("flover_queue")
    runs = runs[runs.figure.notna() & runs.batch_cost.notna()].sort_values("batch_cost")
    if runs.empty:
        raise NothingToShow("No record of a figure of the paper at a c of one's own.")
    data.only(runs)
    fig, (totals, errors, right) = plt.subplots(1, 3, figsize=(10, 5))
    _ratios(totals, series(runs))
    looks = zip([*PALETTE, "black"], [*LINE_STYLES, "-"], [*MARKERS, "X"], strict=True)
    for ((figure, metric), name), (color, line, marker) in zip(_ERRORS.items(), looks, strict=True):
        rows = runs[runs.figure == figure]
        look = {"color": color, "linestyle": line, "marker": marker, "markersize": 4}
        errors.plot(rows.batch_cost, 100 * rows[metric], label=name, **look)
    errors.set(ylabel="root mean square error (%)", ylim=0)
    _legend(errors, "error of each figure")
    _chi_square(right, runs[runs.figure == "fig8"])
    found = [cost.batch_cost(model) for model in paper.MODELS]
    for axes in (totals, errors, right):
        axes.axvspan(min(found), max(found), color="grey", alpha=0.15, linewidth=0)
        axes.set_xlabel("c: a further request's cost", fontsize=9)
    caption = f"{C} Vertical band: c of the four models, as Fig. 4(c) gives it. Left: the last number of each curve "
    caption += "(v1 Fig. 7: one row every 500, 2,500 or 5,000 ms); a line crosses 1 at the c that its number needs. "
    caption += "Middle: errors over each figure's printed numbers that no prediction uses. Right: χ², the sum of "
    caption += "squared errors of 14 printed iteration counts, in standard deviations, if a printed one is of one "
    caption += "draw of arrivals or the mean of five. Horizontal band: where 90 % of such sums lie if the model is "
    caption += "right."
    return Drawing(fig, "modelled, compared with the paper", caption)


def _ratios(axes: Axes, table: pd.DataFrame) -> None:
    """Predicted ÷ printed, of the number at the most requests of each curve of seconds, over c."""
    seconds = table[(table.quantity == "seconds") & ~table.used & (table.figure != "reordering")]
    seconds = seconds[~seconds.curve.str.contains("batch")]
    last = seconds.sort_values(["figure", "x"]).groupby(["figure", "curve", "batch_cost"]).tail(1)
    for number, ((figure, curve), rows) in enumerate(last.groupby(["figure", "curve"], sort=False)):
        rows = rows.sort_values("batch_cost")
        line = {"color": PALETTE[number % 6], "linestyle": LINE_STYLES[number // 6], "marker": MARKERS[number % 6]}
        axes.plot(
            rows.batch_cost, rows.predicted / rows.printed, label=f"{_SHORT[figure]}: {curve}", markersize=4, **line
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(ylabel="seconds, predicted ÷ printed")
    _legend(axes, "last number of each curve")


def _chi_square(axes: Axes, rows: pd.DataFrame) -> None:
    """The sum of squared distances of the 14 iteration counts of Fig. 8, over c."""
    axes.plot(rows.batch_cost, rows.chi_square, "o-", color=PALETTE[0], label="one draw")
    axes.plot(rows.batch_cost, 5 * rows.chi_square, "s--", color=PALETTE[1], label="the mean of five")
    if len(rows):
        points = rows.points.iloc[0]
        axes.axhspan(*chi2.ppf([0.05, 0.95], points), color="grey", alpha=0.3, linewidth=0)
        axes.set_yscale("log")
        _legend(axes, f"v1 Fig. 8, {points:g} iteration counts:\na printed one is of")
    axes.set_ylabel("χ², logarithmic")

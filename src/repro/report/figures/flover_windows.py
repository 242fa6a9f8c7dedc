"""Dynamic batching with windows, and an instance per request, beside fused decoding."""

import math

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from repro.report.figures import marks
from repro.report.figures.base import PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow, paper
from repro.report.figures.flover import T1, by_engine, looks, of_one_model, setting

WINDOWS = (
    "Left: medians; whiskers: range of the runs; × fused: pairs of runs of the same occasion, where there are any. "
    "Right: latency ÷ that of a request alone in the same run; bars: mean over occasions; whiskers: its 95 % interval "
    "(the part above 0) where there are enough. Dots: the runs; no dots: one run. Hollow: paper, LLaMA-13B; on the "
    "left its ratio to fused decoding, times our fused median."
)


def flover_windows(data: Data, *, model: str | None = None) -> Drawing:
    """Equal requests served by dynamic batching or by instances, beside fused decoding; a row of panels per number."""
    serving = of_one_model(data.runs("flover_serving"), model).query(
        "workload == 'fixed' and interval_t1 > 0 and not predict"
    )
    groups = [runs for _, runs in serving.groupby("requests") if runs.name.nunique() > 1][::-1]
    if not groups:
        raise NothingToShow("No run of dynamic batching or instances.")
    data.only(*groups)
    heights = [runs.name.nunique() for runs in groups]
    size = (9.5, 0.42 * sum(heights) + 1.2 * len(groups))
    fig, panels = plt.subplots(len(groups), 2, figsize=size, squeeze=False, height_ratios=heights, width_ratios=[5, 4])
    for row, runs in zip(panels, groups, strict=True):
        _windows(*row, data, runs)
    caption = f"{serving.weights.iloc[0]}; {setting(serving.iloc[0])}. {T1} {WINDOWS}"
    return Drawing(fig, "measured; hollow diamonds: paper", caption)


def _windows_paper(run: pd.Series) -> tuple[float, float]:
    """The paper's total time over that of fused decoding, and latency of the first request over alone; nan: none."""
    if (run.engine, run.requests, run.window_t1) == ("dynamic", 32, 1.76):
        return paper("FL-PROG.d")[0].value, paper("FL-PROG.c")[0].value / 100
    if (run.engine, run.requests, run.instance_threads) == ("instances", 4, 0):
        return paper("FL-F4a.j")[0].value, math.nan
    return math.nan, math.nan


def _windows(left: Axes, right: Axes, data: Data, runs: pd.DataFrame) -> None:
    """Total time and latency of the first request, a bar per engine that served the same number of requests."""
    styles = {n: {"color": PALETTE[by_engine(n)[0]]} for n in looks(runs)}
    firsts = {n: runs[runs.name == n].iloc[0] for n in styles}
    fused = next((run for run in firsts.values() if run.engine == "fused"), None)
    ratios = (
        {}
        if fused is None
        else {n: data.ratio("flover_serving", "total_seconds", run, fused) for n, run in firsts.items()}
    )
    theirs = {name: _windows_paper(run) for name, run in firsts.items()}
    after = {name: f", {sample.value:.2f} × fused" for name, sample in ratios.items() if sample}
    after |= {n: f"{after[n]} (paper: {times:.4g})" for n, (times, _) in theirs.items() if times > 0 and n in after}
    seconds = {n: runs[runs.name == n].total_seconds for n in styles}
    marks.bars(left, seconds, "total time (s)", ".2f", after, **styles)
    how = {"per": "single_request_seconds"}
    latency = {n: data.of_point("flover_serving", "latency_first", run, **how) for n, run in firsts.items()}
    found = {n: sample or [math.nan] for n, sample in latency.items()}
    after = {n: f" (paper: {times:g})" for n, (_, times) in theirs.items() if times > 0}
    marks.bars(right, found, "latency of the first request ÷ alone", ".2f", after, **styles)
    ours = math.nan if fused is None else seconds[fused["name"]].median()
    below = [row + 0.33 for row in range(len(theirs))]  # beside the numbers, which stand in the middle of their rows
    left.plot([ours * times for times, _ in theirs.values()], below, **marks.PAPER)
    right.plot([times for _, times in theirs.values()], below, **marks.PAPER)
    left.margins(x=1.1)
    right.set_xlim(0, 1.3 * right.get_xlim()[1])
    left.tick_params(axis="y", labelsize=8)
    right.set_yticks([])
    left.set_title(f"{runs.requests.iloc[0]} requests: median and range", fontsize=9)
    right.set_title("mean and 95 % interval", fontsize=9)

"""Fused decoding beside the servers of others: their time and memory over ours, every run a mark."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from scipy.stats import gmean

from repro.flover import paper
from repro.report.figures import marks
from repro.report.figures.base import MARKERS, PALETTE, Drawing
from repro.report.figures.data import Data

SETTING = ["model", "dtype", "workload", "longest", "length_scale", "requests"]
NAMES = {
    "fused": "ours against itself (placebo)",
    "serial": "ours, one request after the other",
    "vllm_compiled": "vLLM",
    "vllm_zentorch_compiled": "vLLM with zentorch",
    "vllm_eager": "vLLM, not compiled",
    "vllm_zentorch_eager": "vLLM with zentorch, not compiled",
    "transformers_continuous": "transformers, continuous batching",
    "transformers_static": "transformers, static batches",
    "llama_cpp": "llama.cpp",
}
PAPER = "TensorRT-LLM, paper"
_PAPER_INTERVALS = {0: "all at once", 100: "every 100 ms", 500: "every 500 ms"}


def published() -> tuple[dict[str, dict[str, float]], float]:
    """The paper's TensorRT-LLM ÷ Flover at 32 requests: total times by answers (`fixed`, `uniform`) and arrivals; memory."""

    def ratios(which: str) -> dict[float | None, float]:
        theirs, ours = (paper.printed("FL-TRT", f"{server}, {which}") for server in ("TensorRT-LLM", "Flover"))
        return {x: value / ours[x] for x, value in theirs.items()}

    lengths = {"fixed": "32 requests, length 512", "uniform": "32 requests, random length"}
    times = {workload: ratios(which) for workload, which in lengths.items()}
    words = {each: {_PAPER_INTERVALS[ms]: ratio for ms, ratio in found.items()} for each, found in times.items()}
    return words, ratios("32 requests")[None]


def of_one_setting(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs of the model, dtype, lengths and number of requests that most engines served; with `time` and `memory`,
    theirs ÷ ours, and `arrivals` in words."""
    table = max((group for _, group in runs.groupby(SETTING)), key=lambda group: (group.engine.nunique(), len(group)))
    words = table.interval_t1.map(lambda t1: f"every {t1:g} T1" if t1 else "all at once")
    ratios = {
        "time": table.total_seconds / table.fused_total_seconds,
        "memory": table.peak_bytes / table.fused_peak_bytes,
    }
    return table.assign(arrivals=words, **ratios)


def flover_servers(data: Data, *, workload: str = "fixed") -> Drawing:
    """Total time and memory of other servers over those of fused decoding in the same record, on the same requests."""
    table = of_one_setting(data.runs("flover_peers", workload=workload))
    groups = table.sort_values("interval_t1").groupby(["engine", "arrivals"], sort=False)
    order = sorted(groups.groups, key=lambda key: list(NAMES).index(key[0]))
    data.only(table)
    paper_times, paper_memory = published()
    names = [f"{NAMES[engine]}, {arrivals}" for engine, arrivals in order]
    theirs = [f"{PAPER}, {words}" for words in paper_times[workload]]
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 0.3 * len(names + theirs) + 1.3), sharey=True)
    runs = {name: groups.get_group(key) for name, key in zip(names, order, strict=True)}
    looks = {
        words: {"marker": MARKERS[i % 6], "color": PALETTE[i % 6]} for i, words in enumerate(table.arrivals.unique())
    }
    for axes, metric in ((left, "time"), (right, "memory")):
        _each_run(axes, {name: mine[metric].dropna() for name, mine in runs.items()}, [looks[key[1]] for key in order])
    diamond = {"marker": "D", "color": "black", "mfc": "none", "linestyle": ""}
    left.plot(list(paper_times[workload].values()), range(len(names), len(names) + len(theirs)), **diamond)
    right.plot(paper_memory, len(names), **diamond)
    marks.note(right, "arrivals not said", paper_memory, len(names), 7, va="center")
    for axes, label in ((left, "their total time ÷ ours"), (right, "their memory ÷ ours")):
        marks.rows(axes, names + theirs, fontsize=8)
        axes.axvline(1, color="grey", linewidth=1)
        axes.set(xlabel=label, xscale="log")
    for axis in (left.xaxis, right.xaxis):
        low, high = axis.axes.get_xlim()
        narrow = [tick for tick in (0.8, 0.9, 1, 1.2, 1.5, 2, 3) if low <= tick <= high]
        marks.log_axis(axis, narrow if high < 4 * low else marks.round_ticks(low, high))
    run = table.iloc[0]
    caption = f"{run.weights}; {run.requests} requests, {run.threads} threads. A mark per run, a bar at their "
    caption += "geometric mean; ours: mean of a pass before and one after. Another server and machine than the "
    caption += "paper's."
    if table.arrivals.str.contains("T1").any():
        caption += " T1: the time of a request alone."
    return Drawing(fig, "measured; hollow diamonds: paper", caption)


def _each_run(axes: Axes, values: Mapping[str, pd.Series], looks: Sequence[dict[str, str]]) -> None:
    """A row per name: every value, their geometric mean as a bar and a number."""
    for y, (ratios, look) in enumerate(zip(values.values(), looks, strict=True)):
        if len(ratios):
            axes.plot(ratios, [y] * len(ratios), linestyle="", alpha=0.6, markersize=4, **look)
            mean = float(gmean(ratios))
            axes.plot([mean], [y], "|", color="black", markersize=12)
            marks.note(axes, f"{mean:.2f}", max(ratios), y, 7, va="center", fontsize=8)

"""Fused decoding beside the servers of others: their time and memory over ours, as the claims read them."""

import math

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from repro.flover import paper
from repro.report.figures import marks
from repro.report.figures.base import Drawing
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
    """Runs of the model, dtype, lengths and number of requests that most engines served; with `arrivals` in words."""
    table = max((group for _, group in runs.groupby(SETTING)), key=lambda group: (group.engine.nunique(), len(group)))
    return table.assign(arrivals=table.interval_t1.map(lambda t1: f"every {t1:g} T1" if t1 else "all at once"))


def flover_servers(data: Data, *, workload: str = "fixed") -> Drawing:
    """Total time and memory of other servers over those of fused decoding in the same record, on the same requests."""
    table = of_one_setting(data.runs("flover_peers", workload=workload))
    groups = table.sort_values("interval_t1").groupby(["engine", "arrivals"], sort=False)
    order = sorted(groups.groups, key=lambda key: list(NAMES).index(key[0]))
    data.only(table)
    paper_times, paper_memory = published()
    ours = {f"{NAMES[key[0]]}, {key[1]}, n = {len(mine)}": mine for key in order for mine in [groups.get_group(key)]}
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 0.3 * (len(ours) + 3) + 1.5), sharey=True)
    looks = {words: marks.look(i) for i, words in enumerate(table.arrivals.unique())}
    for axes, metric, theirs in (
        (left, "total_seconds", paper_times[workload]),
        (right, "peak_bytes", dict.fromkeys(paper_times[workload], math.nan) | {"arrivals not said": paper_memory}),
    ):
        rows: list[marks.Row] = []
        for name, runs in ours.items():
            run = runs.iloc[0]
            found = data.of_point("flover_peers", metric, run, per=f"fused_{metric}")
            rows.append((name, found or [math.nan], looks[run.arrivals]))
        rows += [(f"{PAPER}, {words}", [ratio], marks.PAPER) for words, ratio in theirs.items()]
        marks.dot_rows(axes, rows, ".3g")
        _ratio_axis(axes, "their total time ÷ ours" if axes is left else "their memory ÷ ours")
    run = table.iloc[0]
    caption = f"{run.weights}; {run.requests} requests, {run.threads} threads. Filled: each of n runs, their mean over "
    caption += "occasions and its 95 % interval, where there are enough. Fused decoding: mean of a pass before the "
    caption += "other server's and one after. Logarithmic axes; black line: equal. Servers and machine are not the "
    caption += "paper's."
    if table.arrivals.str.contains("T1").any():
        caption += " T1: the time of a request alone."
    return Drawing(fig, "measured; hollow diamonds: paper", caption)


def _ratio_axis(axes: Axes, label: str) -> None:
    """A logarithmic axis around 1."""
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xlabel=label, xscale="log")
    low, high = axes.get_xlim()
    low, high = min(low, 0.95), 1.1 * high  # room for numbers
    narrow = [tick for tick in (0.8, 0.9, 1, 1.2, 1.5, 2, 3) if low <= tick <= high]
    marks.log_axis(axes.xaxis, narrow if high < 4 * low else marks.round_ticks(low, high))
    axes.set_xlim(low, high)

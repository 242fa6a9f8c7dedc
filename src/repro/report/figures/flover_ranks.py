"""Flover over tensor-parallel ranks: throughput and latency, and what reordering and links between nodes change."""

from collections.abc import Iterable

import matplotlib.pyplot as plt
import pandas as pd

from repro.flover.paper import SHORTEST
from repro.report.figures import marks
from repro.report.figures.base import Drawing
from repro.report.figures.data import Data, NothingToShow, paper
from repro.report.figures.flover_layouts import reordering


def ranks_name(run: pd.Series) -> str:
    """Tensor-parallel ranks of a run of flover_parallel: how many, in how many nodes, with which KV layout."""
    nodes = "one node" if run.nodes == 1 else f"{run.nodes} nodes{_rate(run)}"
    layout = {"window": "", "fixed": ", no reordering"}.get(run.layout, f", {run.layout}")
    return f"{run.ranks} ranks, {nodes}{layout}"


def _rate(run: pd.Series) -> str:
    """Of the links between nodes, where they were shaped."""
    return f" at {run.cluster_mbit_s:g} Mbit/s" if run.fabric == "shaped" else ""


def flover_ranks(data: Data, *, longest: int | None = None) -> Drawing:
    """Throughput and latency of tensor-parallel decoding, in one node and several (None: `longest` of most runs), and
    what reordering and links between nodes change, beside the paper's."""
    parallel = data.runs("flover_parallel")
    runs = data.runs("flover_parallel", longest=longest or int(parallel.longest.mode()[0]))
    runs = runs.assign(ranks=runs.nodes * runs.packages * runs.gcds)
    runs = runs.sort_values(["ranks", "nodes", "cluster_mbit_s", "layout"], ascending=[True, True, False, False])
    names = runs.apply(ranks_name, axis=1)
    if names.nunique() < 2:
        raise NothingToShow("Ranks in one arrangement only.")
    data.only(runs)
    names += names.groupby(names).transform(lambda same: f", n = {len(same)}")
    ratios = list(_ranks_ratios(data, parallel))
    heights = [0.4 * names.nunique() + 0.3, 0.32 * len(ratios) + 0.3]
    fig = plt.figure(figsize=(9, sum(heights) + 1.3))
    panels = fig.subplot_mosaic([["tokens_per_s", "latency_p99"], ["ratios", "ratios"]], height_ratios=heights)
    metrics = {"tokens_per_s": "output tokens/s", "latency_p99": "99th percentile of latency (s)"}
    for metric, label in metrics.items():
        marks.bars(panels[metric], dict(list(runs[metric].groupby(names, sort=False))), label, ".3g")
    panels["latency_p99"].set_yticks([])
    marks.dot_rows(panels["ratios"], ratios, ".3g")
    panels["ratios"].axvline(1, color="grey", linewidth=1)
    panels["ratios"].set(xlabel="total time: without reordering ÷ with it; in two nodes ÷ in one")
    panels["ratios"].set_xlim(min(0.8, 0.95 * panels["ratios"].dataLim.xmin), 1.05 * panels["ratios"].get_xlim()[1])
    agree = (
        "in each iteration all ranks ran the same requests"
        if (parallel.ranks_agree == 1).all()
        else "ranks DISAGREED in a run"
    )
    run = runs.iloc[0]
    caption = f"Random weights, {run.layers} layers of width {run.width}; {run.requests} requests; {agree}. "
    caption += "Ranks share the cores of one machine. " if "emulated" in set(runs.evidence) else ""
    caption += f"Above: {_answers(run)}; medians, with range and values of n runs. "
    caption += "Below: pairs of runs of the same occasion, and their mean with its 95 % interval where there are "
    caption += "enough."
    return Drawing(fig, f"{', '.join(sorted(set(runs.evidence)))}; hollow diamonds: paper", caption)


def _answers(run: pd.Series) -> str:
    """Lengths of the answers of a run of flover_parallel."""
    low, high = (max(1, round(tokens * run.length_scale)) for tokens in (SHORTEST, run.longest))
    return f"answers of {low} to {high} tokens"


def printed_gains() -> list[float]:
    """The paper's gains of reordering over tensor-parallel ranks (v1 Fig. 10). Two pairs are what FL-TP.b compares."""
    seconds = {(p.label, p.x): p.value for claim in ("FL-MS.d", "FL-TP.b") for p in paper(claim)}
    slow = {key: value for key, value in seconds.items() if "without" in key[0]}
    return [value / seconds[label.replace("without", "with"), x] for (label, x), value in slow.items()]


def _ranks_ratios(data: Data, runs: pd.DataFrame) -> Iterable[marks.Row]:
    """What reordering gains on four ranks, and what two ranks lose in two nodes, as the claims read it; and the paper's."""
    four = runs[(runs.nodes == 1) & (runs.packages * runs.gcds == 4)]
    for _, some in four.groupby("longest"):
        if sample := reordering(data, "flover_parallel", some):
            name = f"reordering, 4 ranks, {_answers(some.iloc[0])}, n = {len(sample.values)}"
            yield name, sample, marks.look(0)
    gains = printed_gains()
    yield "paper: reordering, 4 ranks, answers up to 7,200 tokens", [max(gains)], marks.PAPER
    yield f"paper: reordering, 2 to 8 ranks, {len(gains)} settings, their median", gains, marks.PAPER
    two = runs[(runs.nodes * runs.packages * runs.gcds == 2) & (runs.layout == "window")]
    for _, some in two.groupby("longest"):
        apart, together = some[some.nodes == 2], some[some.nodes == 1]
        for _, slow in apart.drop_duplicates("cluster_mbit_s").iterrows() if len(together) else ():
            if sample := data.ratio("flover_parallel", "total_seconds", slow, together.iloc[0]):
                name = f"2 nodes{_rate(slow)}, 2 ranks, {_answers(slow)}, n = {len(sample.values)}"
                yield name, sample, marks.look(1)
    seconds = {p.label: p.value for p in paper("FL-TP.b")}
    inside, between = (seconds[f"TP2 {where}, with reordering"] for where in ("in a node", "between nodes"))
    yield "paper: 2 nodes, 2 ranks", [between / inside], marks.PAPER

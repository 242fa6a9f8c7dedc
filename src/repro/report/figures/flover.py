"""Figures of Flover as served here: policies on one workload, each request's way, widths, layouts and ranks.

Bars and points are medians, with range and values of repeats; comparisons are read as the claims read them.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.claims.sample import Sample
from repro.report.figures import base, marks
from repro.report.figures.base import HATCHES, LINE_STYLES, MARKERS, PALETTE, Data, Drawing, NothingToShow

ENGINES = ["fused", "serial", "static", "dynamic", "instances"]
LAYOUTS = {
    "window": "window (the paper's)",
    "fixed": "fixed (no reordering)",
    "last": "last into hole",
    "shift": "shift down",
    "paged": "paged",
}
WORKLOAD = ["workload", "requests", "time_scale", "length_scale", "max_prompt_tokens", "max_output_tokens"]
WORKLOAD += ["interval_s", "interval_t1", "trace_start"]
WIDTHS = [1, 2, 4, 8, 16, 32]
REPEATS = "Medians, ranges and values of repeats."
MODEL = "random-40m"  # that the claims read


# --- which runs can be compared ------------------------------------------------------------------------------------


def engine_name(run: pd.Series) -> str:
    """The engine with its settings, as a reader would call it."""
    words = [run.engine]
    if run.engine == "static":
        words.append(f"batches of {run.batch_size}")
    elif run.engine == "dynamic":
        words.append(f"window {run.window_t1:g} T1" if run.window_t1 else f"window {run.window_s:g} s")
    elif run.engine == "instances":
        each = " with a thread each" if run.instance_threads == 1 else ""
        words.append(f"{run.instances or run.requests} of them{each}")
    elif run.engine == "fused":
        admits = f"{run.admit_per_iteration} admissions" if run.admit_per_iteration > 1 else "one admission"
        words += [f"{run.max_slots} slots"] if run.max_slots != 32 else []
        words += [f"{admits} an iteration"] if run.admit_per_iteration else []
        words += [f"prompts by {run.prefill_tokens}"] if run.prefill_tokens else []
    return ", ".join(words + ([run["dtype"]] if run["dtype"] != "float32" else []))


def of_one_model(serving: pd.DataFrame, model: str | None = None) -> pd.DataFrame:
    """Runs of one model on one device (the CPU, where it served), with `name`, what the engine is called.

    None: the claims' model, else that of most runs. NothingToShow for a model without runs.
    """
    if model:
        serving = serving[serving.model == model]
    if serving.empty:
        raise NothingToShow(f"No record of a finished flover_serving run with model {model}.")
    if (serving.device == "cpu").any():
        serving = serving[serving.device == "cpu"]
    shown = MODEL if MODEL in set(serving.model) and not model else serving.model.mode()[0]
    serving = serving[serving.model == shown]
    return serving.assign(name=serving.apply(engine_name, axis=1))


def of_one_workload(serving: pd.DataFrame, workload: str) -> pd.DataFrame:
    """A comparison holds between runs of the same requests: of this workload (of any, where it was not run) those that
    most engines served."""
    found = serving[serving.workload == workload] if workload in set(serving.workload) else serving
    return max((runs for _, runs in found.groupby(WORKLOAD)), key=lambda runs: runs.name.nunique())


def _by_engine(name: str) -> tuple[int, str]:
    return ENGINES.index(name.split(",")[0]), name


def looks(runs: pd.DataFrame) -> dict[str, tuple[str, Any, str]]:
    """Colour, line style and hatch of every engine, by name in the order of the figures."""
    names = sorted(runs.name.unique(), key=_by_engine)
    return {n: (PALETTE[i % 6], LINE_STYLES[i % 6], HATCHES[i % 6]) for i, n in enumerate(names)}


def published_seconds() -> dict[str, dict[float, float]]:
    """The paper's fused decoding, one request every 500 ms: model → number of requests → total seconds."""
    found: dict[str, dict[float, float]] = {}
    for p in base.paper("FL-F4a"):
        if p.label.endswith(", Flover"):
            found.setdefault(p.label.removesuffix(", Flover"), {})[p.x] = p.value
    return found


def _bars(
    axes: Axes, values: Mapping[str, Iterable[float] | Sample], label: str, number: str = ",.4g", **styles: Any
) -> None:
    """A horizontal bar for each name, the first on top. `styles`: name → style, else one colour for all."""
    for y, (name, repeats) in enumerate(values.items()):
        marks.bar(axes, y, repeats, number, across=True, height=0.6, **styles.get(name, {"color": PALETTE[0]}))
    marks.rows(axes, list(values))
    axes.set(xlabel=label, ylim=(len(values) - 0.5, -0.5))
    axes.margins(x=0.3)


# --- policies on one workload --------------------------------------------------------------------------------------


def flover_latency(data: Data, *, workload: str = "fixed", model: str | None = None) -> Drawing:
    """Share of requests answered within a time, a curve for each run of each engine."""
    main = of_one_workload(of_one_model(data.runs("flover_serving"), model), workload)
    requests = base.series(main).assign(latency=lambda table: table.finish_s - table.arrival_s)
    fig, axes = plt.subplots(figsize=(7.5, 4))
    for name, (color, line, _) in looks(main).items():
        mine = requests[requests.name == name]
        label = f"{name}: median {mine.latency.median():.1f} s, p99 {mine.latency.quantile(0.99):.1f} s"
        how = {"per": "single_request_seconds"}
        if sample := data.of_point("flover_serving", "latency_mean", main[main.name == name].iloc[0], **how):
            label += f", mean ÷ alone {sample.value:.2f}"
        for i, (_, run) in enumerate(mine.groupby("path")):
            axes.ecdf(run.latency, label=None if i else label, color=color, linestyle=line, alpha=0.9)
    checked = main[main.tokens_checked == main.requests]  # these timed every request alone, others a sample
    alone = (checked if len(checked) else main).single_request_seconds.median()
    axes.axvline(alone, color="black", linestyle=":", linewidth=1)
    marks.note(axes, f"mean alone {alone:.2f} s", alone, 0.97, -3, fontsize=8, rotation=90, ha="right", va="top")
    axes.set(xlabel="time from arrival to the whole answer (s)", ylabel="share of requests", xlim=0, ylim=(0, 1.0))
    title = f"{main.requests.iloc[0]} requests, a curve per repeat; median and 99th percentile over all"
    fig.legend(loc="outside upper center", title=title, title_fontsize=9, fontsize=8)
    run = main.iloc[0]
    return Drawing(fig, "measured", f"{run.weights}; {run.threads} threads. {run.scales}.")


def flover_throughput(data: Data, *, workload: str = "fixed", model: str | None = None) -> Drawing:
    """Output tokens a second, total time, and the speedup over serial, beside the paper's."""
    serving = of_one_model(data.runs("flover_serving"), model)
    main = of_one_workload(serving, workload)
    fig, (left, center, right) = plt.subplots(1, 3, figsize=(9, 3.9), width_ratios=[1, 1, 1.2])
    styles = {n: {"color": c, "hatch": hatch, "edgecolor": "white"} for n, (c, _, hatch) in looks(main).items()}
    for axes, metric, label in ((left, "tokens_per_s", "output tokens/s"), (center, "total_seconds", "total time (s)")):
        _bars(axes, {n: main[main.name == n][metric] for n in styles}, label, **styles)
        axes.set_ylim(max(3, len(styles)) - 0.4, -0.6)
    left.set_yticks(range(len(styles)), [n.replace(", ", ",\n") for n in styles])
    center.set_yticks([])
    rows = [*_measured_speedups(data, main, serving), *_published_speedups()]
    for y, (_, ratios, style) in enumerate(rows):
        value = marks.point(right, y, ratios, across=True, **style)
        marks.note(right, f"{value:.1f}", value, y, 6, va="center", fontsize=8)
    right.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize=8)
    right.invert_yaxis()
    right.axvline(1, color="grey", linewidth=1)
    right.grid(axis="y", visible=False)
    right.set(xlabel="times as fast as the baseline (vs)", xlim=(0, 20))
    right.set_title(f"ours: {main.requests.iloc[0]} requests; paper: 32", fontsize=9)
    caption = f"Median, range and values of repeats, where there are several. {main.scales.iloc[0]}."
    caption += " Paper: Fig. 4(a) at 32 requests, FasterTransformer read from bars."
    return Drawing(fig, "measured; black diamonds: paper", caption)


Row = tuple[str, Iterable[float] | Sample, dict[str, Any]]  # label, ratios, style of its marker


def _measured_speedups(data: Data, main: pd.DataFrame, serving: pd.DataFrame) -> Iterable[Row]:
    """Over serial on the same requests, as the claims read it; where all requests are equal, serial takes n times a lone
    one."""
    serial = main[main.engine == "serial"]
    for name, (color, _, _) in looks(main).items() if len(serial) else ():
        if not name.startswith("serial"):
            ours = main[main.name == name].iloc[0]
            if sample := data.ratio("flover_serving", "total_seconds", serial.iloc[0], ours):
                yield f"{name}: vs serial", sample, {"color": color, "marker": "o"}
    equal = serving[serving.workload.isin(["fixed", "poisson"]) & (serving.requests == main.requests.iloc[0])]
    for name, runs in equal[equal.engine != "serial"].groupby("name"):
        ratio = runs.requests * runs.single_request_seconds / runs.total_seconds
        yield f"{name}: vs {main.requests.iloc[0]} × alone", ratio, {"color": PALETTE[4], "marker": "s"}


def _published_speedups() -> Iterable[Row]:
    """The paper's at 32 requests: over concurrent instances, and over 32 times its single request."""
    speedups = {p.label.removesuffix(", speedup"): p.value for p in base.paper("FL-F4a") if p.x == 32}
    for model, seconds in published_seconds().items():
        if model in speedups:
            style = {"color": "black", "marker": "D"}
            yield f"paper, {model}: vs instances", [speedups[model]], style | {"mfc": "white"}
            yield f"paper, {model}: vs 32 × alone", [32 * seconds[1] / seconds[32]], style


def flover_timeline(
    data: Data, *, workload: str = "fixed", model: str | None = None, dtype: str | None = None, engines: int = 5
) -> Drawing:
    """A row per request: when it waits, is prefilled and decodes, in the median run of each of the first `engines`."""
    main = of_one_workload(of_one_model(data.runs("flover_serving"), model), workload)
    dtype = dtype or main["dtype"].mode()[0]
    shown = {n: look for n, look in looks(main).items() if (main[main.name == n]["dtype"] == dtype).any()}
    shown = dict(list(shown.items())[:engines])
    if not shown:
        raise NothingToShow(f"No {dtype} run of a flover_serving point.")
    fig, panels = plt.subplots(len(shown), 1, figsize=(8, 2.3 * len(shown) + 0.6), sharex=True, squeeze=False)
    for axes, (name, (color, _, _)) in zip(panels[:, 0], shown.items(), strict=True):
        runs = main[main.name == name].sort_values("total_seconds")
        rows = base.series(runs.iloc[[len(runs) // 2]])
        thick = {"color": color, "linewidth": 3.2}
        axes.hlines(rows.request, rows.arrival_s, rows.admitted_s, color="#999999", linewidth=1, label="waits")
        axes.hlines(rows.request, rows.admitted_s, rows.first_token_s, alpha=0.35, label="prefill", **thick)
        axes.hlines(rows.request, rows.first_token_s, rows.finish_s, label="decodes", **thick)
        axes.plot(rows.arrival_s, rows.request, "|", color="black", markersize=5, label="arrival")
        axes.plot(rows.first_token_s, rows.request, "o", mfc="white", color="black", markersize=3, label="first token")
        axes.plot(rows.finish_s, rows.request, "D", color="black", markersize=2.5, label="answer complete")
        axes.set(ylabel="request", title=f"{name}: all done after {rows.finish_s.max():.1f} s")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    panels[-1, 0].set(xlabel="time (s)", xlim=(0, 1.02 * main[main.name.isin(shown)].total_seconds.max()))
    fig.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=8)
    return Drawing(fig, "measured", f"Of each engine the repeat with the median total time. {main.scales.iloc[0]}.")


def flover_requests(data: Data) -> Drawing:
    """Total time, and times sooner than one after the other, over equal requests; every model and device."""
    equal = data.runs("flover_serving").query("interval_t1 > 0 and workload == 'fixed' and not predict")
    fused = equal.query("engine == 'fused' and layout == 'window'")
    counts = np.array(sorted(fused.requests.unique()))
    if len(counts) < 2:
        raise NothingToShow("Only one number of requests was run.")
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
    kinds = equal.query("engine in ['fused', 'instances'] and instance_threads == 0")
    kinds = kinds.groupby(["engine", "model", "device", "dtype"])
    drawn = [(kind, runs) for kind, runs in kinds if runs.requests.nunique() > 1]
    for i, ((engine, model, device, dtype), runs) in enumerate(drawn):
        label = f"{engine}, {model}, {dtype}, {'GPU' if device == 'cuda' else 'CPU'}"
        times = runs.total_seconds / runs.single_request_seconds
        for axes, values in ((left, times), (right, runs.requests / times)):
            groups = values.groupby(runs.requests)
            found = {n: (each.median(), each.min(), each.max()) for n, each in groups}
            medians, lows, highs = zip(*found.values(), strict=True)
            line = {"color": PALETTE[i % 6], "linestyle": LINE_STYLES[i % 6], "marker": "."}
            axes.plot(list(found), medians, label=label, **line)
            axes.fill_between(list(found), lows, highs, color=PALETTE[i % 6], alpha=0.2)
    free = 1 + fused.interval_t1.median() * (counts - 1)
    left.plot(counts, free, ":", color="grey", label="if a row cost nothing")
    for i, (model, seconds) in enumerate(published_seconds().items()):
        style = {"color": "black", "marker": MARKERS[i], "mfc": "none", "linestyle": "none", "markersize": 5}
        ratios = [n * seconds[1] / value for n, value in seconds.items()]
        right.plot(list(seconds), ratios, label=f"paper, {model}", **style)
    for axes, label in ((left, "total time ÷ T1"), (right, "times sooner than one after the other")):
        marks.log_axis(axes.xaxis, WIDTHS)
        marks.log_axis(axes.yaxis, WIDTHS[:-1])
        axes.set(xlabel="requests", ylabel=label)
        axes.legend(fontsize=8)
    return Drawing(fig, "measured; hollow: paper", f"{fused.scales.iloc[0]}. Paper: Fig. 4(a). {REPEATS}")


WINDOWS = (
    "T1: the time of a request alone. Left: medians and values; × fused: pairs of one occasion. Right: each run's latency "
    "over its own T1, mean over occasions."
)


def flover_windows(data: Data, *, model: str | None = None) -> Drawing:
    """Equal requests served by dynamic batching or by instances, beside fused decoding; a row of panels per number."""
    serving = of_one_model(data.runs("flover_serving"), model).query("interval_t1 > 0 and not predict")
    groups = [runs for _, runs in serving.groupby("requests") if runs.name.nunique() > 1][::-1]
    if not groups:
        raise NothingToShow("No run of dynamic batching or instances.")
    heights = [runs.name.nunique() for runs in groups]
    size = (9, 0.42 * sum(heights) + 1.2 * len(groups))
    fig, panels = plt.subplots(len(groups), 2, figsize=size, squeeze=False, height_ratios=heights)
    for row, runs in zip(panels, groups, strict=True):
        styles = {n: {"color": PALETTE[_by_engine(n)[0]]} for n in looks(runs)}
        firsts = {n: runs[runs.name == n].iloc[0] for n in styles}
        _bars(row[0], {n: runs[runs.name == n].total_seconds for n in styles}, "total time (s)", ".2f", **styles)
        fused = next((run for run in firsts.values() if run.engine == "fused"), None)
        for y, run in enumerate(firsts.values() if fused is not None else ()):
            if sample := data.ratio("flover_serving", "total_seconds", run, fused):
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9}
                marks.note(row[0], f"{sample.value:.2f} × fused", 0, y, 6, va="center", bbox=box, zorder=6)
        how = {"per": "single_request_seconds"}
        latency = {n: data.of_point("flover_serving", "latency_first", run, **how) for n, run in firsts.items()}
        found = {n: sample or [math.nan] for n, sample in latency.items()}
        _bars(row[1], found, "latency of the first request ÷ alone", ".2f", **styles)
        for axes in row:
            axes.margins(x=0.3)
        row[0].tick_params(axis="y", labelsize=8)
        row[1].set_yticks([])
        row[0].set_title(f"{runs.requests.iloc[0]} requests", fontsize=9)
    return Drawing(fig, "measured", f"{serving.weights.iloc[0]}; {serving.scales.iloc[0]}. {WINDOWS}")


# --- layouts and ranks ---------------------------------------------------------------------------------------------


def flover_layouts(data: Data, *, longest: int | None = None, model: str | None = None) -> Drawing:
    """What closing a slot costs and saves under each layout of the KV cache, with random lengths up to `longest` (None:
    that of most runs)."""
    uniform = of_one_model(data.runs("flover_serving", workload="uniform"), model)
    longest = longest or int(uniform.longest.mode()[0])
    runs = of_one_model(data.runs("flover_serving", workload="uniform", longest=longest), model)
    there = {layout: name for layout, name in LAYOUTS.items() if layout in set(runs.layout)}
    if len(there) < 2:
        raise NothingToShow("Only one layout was run.")
    fig, panels = plt.subplots(1, 3, figsize=(9, 0.45 * len(there) + 1.3), sharey=True)
    metrics = [("moved_bytes", 1e-6, "KV moved (MB)"), ("waste_fraction", 100, "dead rows (%)")]
    metrics += [("tokens_per_s", 1, "output tokens/s")]
    for axes, (metric, factor, label) in zip(panels, metrics, strict=True):
        _bars(axes, {name: factor * runs[runs.layout == layout][metric] for layout, name in there.items()}, label)
    run = runs.iloc[0]
    caption = f"{run.weights}; {run.requests} requests, {run.scales}. {REPEATS}"
    return Drawing(fig, "measured", f"{caption} {_reordering(data, 'flover_serving', runs)}".strip())


def _reordering(data: Data, experiment: str, runs: pd.DataFrame) -> str:
    """What reordering gains over dead rows, as the claims read it."""
    sides = [runs[runs.layout == layout] for layout in ("fixed", "window")]
    if any(side.empty for side in sides):
        return ""
    sample = data.ratio(experiment, "total_seconds", *(side.iloc[0] for side in sides))
    return f"Reordering makes it {marks.said(sample)} times as fast." if sample else ""


def ranks_name(run: pd.Series) -> str:
    """Tensor-parallel ranks of a run of flover_parallel: how many, in how many nodes, with which KV layout."""
    nodes = "one node" if run.nodes == 1 else f"{run.nodes} nodes at {run.cluster_mbit_s:g} Mbit/s"
    return f"{run.ranks} ranks, {nodes}{'' if run.layout == 'window' else f', {run.layout}'}"


def flover_ranks(data: Data, *, longest: int | None = None) -> Drawing:
    """Throughput and latency of tensor-parallel decoding, in one node and several. None: `longest` of most runs."""
    parallel = data.runs("flover_parallel")
    runs = data.runs("flover_parallel", longest=longest or int(parallel.longest.mode()[0]))
    runs = runs.assign(ranks=runs.nodes * runs.packages * runs.gcds)
    runs = runs.sort_values(["ranks", "nodes", "cluster_mbit_s", "layout"], ascending=[True, True, False, False])
    names = runs.apply(ranks_name, axis=1)
    fig, panels = plt.subplots(1, 2, figsize=(9, 0.4 * names.nunique() + 1.2), sharey=True)
    metrics = {"tokens_per_s": "output tokens/s", "latency_p99": "99th percentile of latency (s)"}
    for axes, (metric, label) in zip(panels, metrics.items(), strict=True):
        _bars(axes, dict(list(runs[metric].groupby(names, sort=False))), label)
    agree = "all ranks fused alike" if (parallel.ranks_agree == 1).all() else "ranks DISAGREED in a run"
    run = runs.iloc[0]
    caption = f"Random weights, {run.layers} layers of width {run.width}; {run.requests} requests; {agree}. {REPEATS}"
    caption += "".join(f" {text}" for text in _ranks_claims(data, parallel) if text)
    return Drawing(fig, "emulated" if (runs.evidence == "emulated").all() else "measured", caption)


def _ranks_claims(data: Data, runs: pd.DataFrame) -> Iterable[str]:
    """What reordering gains on four ranks, and what two ranks lose in two nodes, as the claims read it."""
    four = runs[(runs.nodes == 1) & (runs.packages * runs.gcds == 4)]
    for longest, some in four.groupby("longest"):
        if told := _reordering(data, "flover_parallel", some):
            yield f"4 ranks, answers up to {longest} tokens: {told[0].lower()}{told[1:]}"
    two = runs[(runs.nodes * runs.packages * runs.gcds == 2) & (runs.layout == "window")]
    for longest, some in two.groupby("longest"):
        apart, together = some[some.nodes == 2], some[some.nodes == 1]
        for _, slow in apart.drop_duplicates("cluster_mbit_s").iterrows() if len(together) else ():
            if sample := data.ratio("flover_parallel", "total_seconds", slow, together.iloc[0]):
                yield f"2 ranks in two nodes take {marks.said(sample)} times as long, answers up to {longest} tokens."

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
from repro.records import statistics
from repro.report.figures import marks
from repro.report.figures.base import HATCHES, LINE_STYLES, MARKERS, PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow, paper, series

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
REPEATS = "Medians, with range and values of the runs."
T1 = "T1: the time of a request alone."
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
    most engines served, the most requests of several."""
    found = serving[serving.workload == workload] if workload in set(serving.workload) else serving
    return max(
        (runs for _, runs in found.groupby(WORKLOAD)), key=lambda runs: (runs.name.nunique(), runs.requests.max())
    )


def _by_engine(name: str) -> tuple[int, str]:
    return ENGINES.index(name.split(",")[0]), name


def looks(runs: pd.DataFrame) -> dict[str, tuple[str, Any, str]]:
    """Colour, line style and hatch of every engine, by name in the order of the figures."""
    names = sorted(runs.name.unique(), key=_by_engine)
    return {n: (PALETTE[i % 6], LINE_STYLES[i % 6], HATCHES[i % 6]) for i, n in enumerate(names)}


def published_seconds() -> dict[str, dict[float, float]]:
    """The paper's fused decoding, one request every 500 ms: model → number of requests → total seconds."""
    found: dict[str, dict[float, float]] = {}
    for p in paper("FL-F4a"):
        if p.label.endswith(", Flover"):
            found.setdefault(p.label.removesuffix(", Flover"), {})[p.x] = p.value
    return found


def _bars(
    axes: Axes,
    values: Mapping[str, Iterable[float] | Sample],
    label: str,
    number: str = ",.4g",
    after: Mapping[str, str] | None = None,
    **styles: Any,
) -> None:
    """A horizontal bar for each name, the first on top.

    `styles`: name → style, else one colour for all; `after`: name → words behind its number."""
    for y, (name, repeats) in enumerate(values.items()):
        style = {"color": PALETTE[0], **styles.get(name, {}), "after": (after or {}).get(name, "")}
        marks.bar(axes, y, repeats, number, across=True, height=0.6, **style)
    marks.rows(axes, list(values))
    axes.set(xlabel=label, ylim=(len(values) - 0.5, -0.5))
    axes.margins(x=0.3)


# --- policies on one workload --------------------------------------------------------------------------------------


def flover_latency(data: Data, *, workload: str = "fixed", model: str | None = None) -> Drawing:
    """Share of requests answered within a time, a curve for each run of each engine."""
    main = of_one_workload(of_one_model(data.runs("flover_serving"), model), workload)
    data.only(main)
    requests = series(main).assign(latency=lambda table: table.finish_s - table.arrival_s)
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
    axes.axvline(alone, color="black", linestyle=":", linewidth=1, label=f"a request alone, mean: {alone:.2f} s")
    axes.set(xlabel="time from arrival to the whole answer (s)", ylabel="share of requests", xlim=0, ylim=(0, 1.0))
    fig.legend(loc="outside upper center", fontsize=8, frameon=False)
    run = main.iloc[0]
    caption = f"{run.weights}; {run.threads} threads. {run.requests} requests, {run.scales}. A curve per run; in the "
    caption += "legend the median and 99th percentile (p99) of all requests, and, as the claim reads it, the mean "
    caption += f"latency over the mean latency alone in the same run. {_t1(main)}"
    return Drawing(fig, "measured", caption.strip())


def _t1(runs: pd.DataFrame) -> str:
    """What T1 is, where an engine's name has it."""
    return T1 if runs.name.str.contains("T1").any() else ""


def flover_throughput(data: Data, *, workload: str = "fixed", model: str | None = None) -> Drawing:
    """Output tokens a second, total time, and the speedup over serial, beside the paper's."""
    serving = of_one_model(data.runs("flover_serving"), model)
    main = of_one_workload(serving, workload)
    if main.name.nunique() < 2:
        raise NothingToShow("One engine only was run, which has nothing to be compared with.")
    data.only(main)
    fig, (left, center, right) = plt.subplots(1, 3, figsize=(9.5, 4), width_ratios=[1, 1, 1.2])
    styles = {n: {"color": c, "hatch": hatch, "edgecolor": "white"} for n, (c, _, hatch) in looks(main).items()}
    panels = (left, "tokens_per_s", "output tokens/s", ",.0f"), (center, "total_seconds", "total time (s)", ".2f")
    for axes, metric, label, number in panels:
        _bars(axes, {n: main[main.name == n][metric] for n in styles}, label, number, **styles)
        axes.margins(x=0.4)
        axes.set_ylim(max(3, len(styles)) - 0.4, -0.6)
    left.set_yticks(range(len(styles)), [n.replace(", ", ",\n") for n in styles], fontsize=8)
    center.set_yticks([])
    rows = [*_measured_speedups(data, main, serving), *_published_speedups()]
    for y, (_, ratios, style) in enumerate(rows):
        value = marks.point(right, y, ratios, across=True, **style)
        far = [*ratios.values, ratios.interval[1]] if isinstance(ratios, Sample) else ratios
        end = max(value, *(each for each in far if math.isfinite(each)))
        marks.note(right, f"{value:.1f}", end, y, 6, va="center", bbox=marks.CLEAR)
    right.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize=8)
    right.invert_yaxis()
    right.axvline(1, color="grey", linewidth=1)
    right.grid(axis="y", visible=False)
    right.set(xlabel="times as fast", xlim=(0, 21))
    run = main.iloc[0]
    caption = f"{run.weights}; {run.requests} requests, {run.scales}. {REPEATS} vs serial: pairs of runs of one "
    caption += "occasion, where there are; vs n × alone: the requests one after the other, by the time of one alone "
    caption += "in the same run. Paper: Fig. 4(a) at 32 requests; hollow diamonds: against FasterTransformer's "
    caption += f"instances, read from bars. {_t1(main)}"
    return Drawing(fig, "measured; black diamonds: paper", caption.strip())


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
    speedups = {p.label.removesuffix(", speedup"): p.value for p in paper("FL-F4a") if p.x == 32}
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
    order = {name: main[main.name == name].sort_values("total_seconds") for name in shown}
    median = {name: runs.iloc[[len(runs) // 2]] for name, runs in order.items()}
    data.only(*median.values())
    fig, panels = plt.subplots(len(shown), 1, figsize=(8, 2.1 * len(shown) + 0.6), sharex=True, squeeze=False)
    for axes, (name, (color, _, _)) in zip(panels[:, 0], shown.items(), strict=True):
        rows = series(median[name])
        thick = {"color": color, "linewidth": 3.2}
        axes.hlines(rows.request, rows.arrival_s, rows.admitted_s, color="#999999", linewidth=1, label="waits")
        axes.hlines(rows.request, rows.admitted_s, rows.first_token_s, alpha=0.35, label="prefill", **thick)
        axes.hlines(rows.request, rows.first_token_s, rows.finish_s, label="decodes", **thick)
        axes.plot(rows.arrival_s, rows.request, "|", color="black", markersize=5, label="arrival")
        axes.plot(rows.first_token_s, rows.request, "o", mfc="white", color="black", markersize=3, label="first token")
        axes.plot(rows.finish_s, rows.request, "D", color="black", markersize=2.5, label="answer complete")
        axes.set(ylabel="request", title=f"{name}: all done after {rows.finish_s.max():.1f} s")
        axes.margins(y=0.08)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    panels[-1, 0].set(xlabel="time (s)", xlim=(0, 1.02 * main[main.name.isin(shown)].total_seconds.max()))
    handles = panels[0, 0].get_legend_handles_labels()
    fig.legend(*handles, loc="outside upper center", ncols=6, fontsize=8, frameon=False)
    run = main.iloc[0]
    caption = f"{run.weights}; {run.requests} requests, {run.scales}. Of each engine the run with the median total "
    caption += f"time. {_t1(main)}"
    return Drawing(fig, "measured", caption.strip())


def flover_requests(data: Data) -> Drawing:
    """Total time, and times sooner than one after the other, over equal requests; every model and device."""
    equal = data.runs("flover_serving").query("interval_t1 > 0 and workload == 'fixed' and not predict")
    kinds = ["engine", "weights", "device", "dtype"]
    equal = equal.query("engine in ['fused', 'instances'] and instance_threads == 0 and layout == 'window'")
    drawn = [(kind, runs) for kind, runs in equal.groupby(kinds) if runs.requests.nunique() > 1]
    if not drawn:
        raise NothingToShow("Only one number of requests was run.")
    data.only(*(runs for _, runs in drawn))
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.4))
    for i, ((engine, weights, device, _), runs) in enumerate(drawn):
        label = f"{engine}, {weights}{', on a GPU' if device == 'cuda' else ''}"
        times = runs.total_seconds / alone(runs)
        for axes, values in ((left, times), (right, runs.requests / times)):
            groups = values.groupby(runs.requests)
            found = {n: (each.median(), each.min(), each.max()) for n, each in groups}
            medians, lows, highs = zip(*found.values(), strict=True)
            line = {"color": PALETTE[i % 6], "linestyle": LINE_STYLES[i % 6], "marker": "."}
            axes.plot(list(found), medians, label=label if axes is left else None, **line)
            axes.fill_between(list(found), lows, highs, color=PALETTE[i % 6], alpha=0.2)
    counts = np.array(sorted(equal.requests.unique()))
    free = 1 + equal.interval_t1.median() * (counts - 1)
    left.plot(counts, free, ":", color="grey", label="left: if a further request cost nothing")
    for i, (model, seconds) in enumerate(published_seconds().items()):
        style = {"color": "black", "marker": MARKERS[i], "mfc": "none", "linestyle": "none", "markersize": 5}
        ratios = [n * seconds[1] / value for n, value in seconds.items()]
        right.plot(list(seconds), ratios, label=f"right: paper, {model}", **style)
    for axes, label in ((left, "total time ÷ T1"), (right, "n × T1 ÷ total time")):
        marks.log_axis(axes.xaxis, WIDTHS)
        marks.log_axis(axes.yaxis, [width for width in WIDTHS if width <= axes.get_ylim()[1]])
        axes.set(xlabel="n requests", ylabel=label)
    fig.legend(loc="outside upper center", fontsize=8, ncols=3, frameon=False)
    caption = f"{equal.scales.iloc[0][:1].upper()}{equal.scales.iloc[0][1:]}. {T1} Ours: the median over the runs of "
    caption += "the occasion. Lines: medians; bands: all runs; where a line has no band there is one run a point. "
    caption += "Hollow: the paper's Fig. 4(a)."
    return Drawing(fig, "measured; hollow: paper", caption)


def alone(runs: pd.DataFrame) -> pd.Series:
    """T1 of each run: the median over all runs of its occasion, since one run times few requests alone."""
    occasion = pd.Series(statistics.occasions(list(runs.start)), index=runs.index)
    return runs.single_request_seconds.groupby(occasion).transform("median")


WINDOWS = (
    "Left: medians and values; × fused: pairs of runs of one occasion, where there are. Right: each run's latency "
    "over that of "
    "a request alone in the same run; bars: mean over occasions, whiskers: its 95 % interval, cut at 0."
)


def flover_windows(data: Data, *, model: str | None = None) -> Drawing:
    """Equal requests served by dynamic batching or by instances, beside fused decoding; a row of panels per number."""
    serving = of_one_model(data.runs("flover_serving"), model).query("interval_t1 > 0 and not predict")
    groups = [runs for _, runs in serving.groupby("requests") if runs.name.nunique() > 1][::-1]
    if not groups:
        raise NothingToShow("No run of dynamic batching or instances.")
    data.only(*groups)
    heights = [runs.name.nunique() for runs in groups]
    size = (9.5, 0.42 * sum(heights) + 1.2 * len(groups))
    fig, panels = plt.subplots(len(groups), 2, figsize=size, squeeze=False, height_ratios=heights)
    for row, runs in zip(panels, groups, strict=True):
        _windows(*row, data, runs)
    caption = f"{serving.weights.iloc[0]}; {serving.scales.iloc[0]}. {T1} {WINDOWS}"
    return Drawing(fig, "measured", caption)


def _windows(left: Axes, right: Axes, data: Data, runs: pd.DataFrame) -> None:
    """Total time and latency of the first request, a bar per engine that served the same number of requests."""
    styles = {n: {"color": PALETTE[_by_engine(n)[0]]} for n in looks(runs)}
    firsts = {n: runs[runs.name == n].iloc[0] for n in styles}
    fused = next((run for run in firsts.values() if run.engine == "fused"), None)
    ratios = (
        {}
        if fused is None
        else {n: data.ratio("flover_serving", "total_seconds", run, fused) for n, run in firsts.items()}
    )
    after = {name: f", {sample.value:.2f} × fused" for name, sample in ratios.items() if sample}
    _bars(left, {n: runs[runs.name == n].total_seconds for n in styles}, "total time (s)", ".2f", after, **styles)
    how = {"per": "single_request_seconds"}
    latency = {n: data.of_point("flover_serving", "latency_first", run, **how) for n, run in firsts.items()}
    found = {n: sample or [math.nan] for n, sample in latency.items()}
    _bars(right, found, "latency of the first request ÷ alone", ".2f", **styles)
    left.margins(x=0.45)
    right.set_xlim(0, 1.15 * right.get_xlim()[1])
    left.tick_params(axis="y", labelsize=8)
    right.set_yticks([])
    left.set_title(f"{runs.requests.iloc[0]} requests", fontsize=9)


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
    runs = runs[runs.layout.isin(list(there))]
    data.only(runs)
    fig, panels = plt.subplots(1, 3, figsize=(9, 0.45 * len(there) + 1.3), sharey=True)
    metrics = [("moved_bytes", 1e-6, "KV moved (MB)", ".1f"), ("waste_fraction", 100, "dead rows (%)", ".1f")]
    metrics += [("tokens_per_s", 1, "output tokens/s", ",.0f")]
    for axes, (metric, factor, label, number) in zip(panels, metrics, strict=True):
        found = {name: factor * runs[runs.layout == layout][metric] for layout, name in there.items()}
        _bars(axes, found, label, number)
    run = runs.iloc[0]
    caption = f"{run.weights}; {run.requests} requests, {run.scales}. Dead rows: share of the rows of all iterations "
    caption += f"whose request is done already. {REPEATS}"
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
    layout = {"window": "", "fixed": ", no reordering"}.get(run.layout, f", {run.layout}")
    return f"{run.ranks} ranks, {nodes}{layout}"


def flover_ranks(data: Data, *, longest: int | None = None) -> Drawing:
    """Throughput and latency of tensor-parallel decoding, in one node and several. None: `longest` of most runs."""
    parallel = data.runs("flover_parallel")
    runs = data.runs("flover_parallel", longest=longest or int(parallel.longest.mode()[0]))
    runs = runs.assign(ranks=runs.nodes * runs.packages * runs.gcds)
    runs = runs.sort_values(["ranks", "nodes", "cluster_mbit_s", "layout"], ascending=[True, True, False, False])
    names = runs.apply(ranks_name, axis=1)
    if names.nunique() < 2:
        raise NothingToShow("Ranks in one arrangement only.")
    data.only(runs)
    fig, panels = plt.subplots(1, 2, figsize=(9, 0.4 * names.nunique() + 1.2), sharey=True)
    metrics = {"tokens_per_s": "output tokens/s", "latency_p99": "99th percentile of latency (s)"}
    for axes, (metric, label) in zip(panels, metrics.items(), strict=True):
        _bars(axes, dict(list(runs[metric].groupby(names, sort=False))), label)
    agree = "all ranks fused alike" if (parallel.ranks_agree == 1).all() else "ranks DISAGREED in a run"
    run = runs.iloc[0]
    caption = f"Random weights, {run.layers} layers of width {run.width}; {run.requests} requests; {agree}. Ranks "
    caption += f"share the cores of one machine. {REPEATS}"
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

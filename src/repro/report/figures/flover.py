"""Figures of Flover as served here: policies on one workload, each request's way, and widths.

Bars and points are medians, with range and values of repeats; comparisons are read as the claims read them.
"""

import re
from collections.abc import Iterable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from repro.flover.paper import MODELS, printed
from repro.records import statistics
from repro.report.figures import marks
from repro.report.figures.base import HATCHES, LINE_STYLES, MARKERS, PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow, paper, series

ENGINES = ["fused", "serial", "static", "dynamic", "instances"]
WORKLOAD = ["workload", "requests", "time_scale", "length_scale", "max_prompt_tokens", "max_output_tokens"]
WORKLOAD += ["interval_s", "interval_t1", "trace_start", "longest"]
WIDTHS = [1, 2, 4, 8, 16, 32]
REPEATS = "Medians, with range and values of the runs; no range: one run."
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
        words += [f"layout {run.layout}"] if run.layout != "window" else []
    return ", ".join(words + ([run["dtype"]] if run["dtype"] != "float32" else []))


def of_usual_model(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs of the claims' model, where there are any, else of that with most runs."""
    return runs[runs.model == (MODEL if MODEL in set(runs.model) else runs.model.mode()[0])]


def of_one_model(serving: pd.DataFrame, model: str | None = None) -> pd.DataFrame:
    """Runs of one model on one device (the CPU, where it served), with `name`, what the engine is called: a dtype that all
    have is not in it. None: the claims' model, else that of most runs. NothingToShow for a model without runs.
    """
    if model:
        serving = serving[serving.model == model]
    if serving.empty:
        raise NothingToShow(f"No record of a finished flover_serving run with model {model}.")
    if (serving.device == "cpu").any():
        serving = serving[serving.device == "cpu"]
    serving = of_usual_model(serving)
    names = serving.apply(engine_name, axis=1)
    if serving["dtype"].nunique() == 1:
        names = names.str.removesuffix(f", {serving['dtype'].iloc[0]}")
    return serving.assign(name=names)


def of_one_workload(serving: pd.DataFrame, workload: str) -> pd.DataFrame:
    """A comparison holds between runs of the same requests: of this workload (of any, where it was not run) those that
    most engines served, the most requests of several."""
    found = serving[serving.workload == workload] if workload in set(serving.workload) else serving
    return max(
        (runs for _, runs in found.groupby(WORKLOAD)), key=lambda runs: (runs.name.nunique(), runs.requests.max())
    )


def by_engine(name: str) -> tuple[int, str]:
    return ENGINES.index(name.split(",")[0]), name


def looks(runs: pd.DataFrame) -> dict[str, tuple[str, Any, str]]:
    """Colour, line style and hatch of every engine, by name in the order of the figures."""
    names = sorted(runs.name.unique(), key=by_engine)
    return {n: (PALETTE[i % 6], LINE_STYLES[i % 6], HATCHES[i % 6]) for i, n in enumerate(names)}


_SCALED = re.compile(r"of (\d+)(?: to (\d+), drawn uniformly,)? x (\S+) tokens")


def setting(run: pd.Series) -> str:
    """Arrivals and lengths of a run's requests: the `scales` of its record, with lengths in tokens instead of factors."""

    def tokens(found: re.Match[str]) -> str:
        ends = [str(max(1, round(int(end) * float(found[3])))) for end in found.groups()[:2] if end]
        return f"of {' to '.join(ends)} tokens" + (", drawn uniformly" if len(ends) > 1 else "")

    return _SCALED.sub(tokens, str(run.scales).replace("a lone request", "a lone request's time"))


def published_seconds() -> dict[str, dict[float | None, float]]:
    """The paper's fused decoding, one request every 500 ms: model → number of requests → total seconds."""
    return {model.name: printed("FL-F4a", f"{model.name}, Flover") for model in MODELS.values()}


# --- policies on one workload --------------------------------------------------------------------------------------


def flover_latency(data: Data, *, workload: str = "fixed", model: str | None = None) -> Drawing:
    """Share of requests answered within a time, a curve for each run of each engine."""
    main = of_one_workload(of_one_model(data.runs("flover_serving"), model), workload)
    data.only(main)
    requests = series(main).assign(latency=lambda table: table.finish_s - table.arrival_s)
    fig, axes = plt.subplots(figsize=(7.5, 5))
    for name, (color, line, _) in looks(main).items():
        mine = requests[requests.name == name]
        label = f"{name}: median {mine.latency.median():.2f} s, p99 {mine.latency.quantile(0.99):.2f} s"
        how = {"per": "single_request_seconds"}
        if sample := data.of_point("flover_serving", "latency_mean", main[main.name == name].iloc[0], **how):
            label += f", mean ÷ alone {sample.value:.2f}"
        for i, (_, run) in enumerate(mine.groupby("path")):
            axes.ecdf(run.latency, label=None if i else label, color=color, linestyle=line, alpha=0.9)
    checked = main[main.tokens_checked == main.requests]  # these timed every request alone, others a sample
    alone = (checked if len(checked) else main).single_request_seconds.median()
    axes.axvline(alone, color="black", linestyle=":", linewidth=1, label=f"a request alone, mean: {alone:.2f} s")
    if paper_line := bool((main.workload == "fixed").all()):
        most = max(p.value for p in paper("FL-F4c"))
        words = f"paper, mean latency at 32 requests: at most {most:g} × alone"
        axes.axvline(most * alone, color="black", linestyle="--", linewidth=1, label=words)
    axes.set(xlabel="time from arrival to the whole answer (s), logarithmic", ylabel="share of requests", xscale="log")
    axes.set_ylim(0, 1)
    marks.log_axis(axes.xaxis, marks.round_ticks(*axes.get_xlim()))
    fig.legend(**marks.ABOVE)
    run = main.iloc[0]
    caption = f"{run.weights}; {run.threads} threads. {run.requests} requests, {setting(run)}. One curve per run. "
    caption += "Legend: median and 99th percentile (p99) of all requests; mean ÷ alone, as the claim reads it: mean "
    caption += f"latency ÷ mean latency of requests alone in the same run. {_t1(main)}"
    return Drawing(fig, f"measured{'; dashed, black: paper' if paper_line else ''}", caption.strip())


def _t1(runs: pd.DataFrame) -> str:
    """What T1 is, where an engine's name has it."""
    return T1 if runs.name.str.contains("T1").any() else ""


def flover_throughput(data: Data, *, workload: str = "fixed", model: str | None = None) -> Drawing:
    """Output tokens a second, total time, and the speedup over serial, beside the paper's."""
    main = of_one_workload(of_one_model(data.runs("flover_serving"), model), workload)
    if main.name.nunique() < 2:
        raise NothingToShow("One engine only was run, which has nothing to be compared with.")
    data.only(main)
    fig, (left, center, right) = plt.subplots(1, 3, figsize=(9.5, 4), width_ratios=[1, 1, 1.2])
    styles = {n: {"color": c, "hatch": hatch, "edgecolor": "white"} for n, (c, _, hatch) in looks(main).items()}
    panels = (left, "tokens_per_s", "output tokens/s", ",.0f"), (center, "total_seconds", "total time (s)", ".2f")
    for axes, metric, label, number in panels:
        marks.bars(axes, {n: main[main.name == n][metric] for n in styles}, label, number, **styles)
        axes.margins(x=0.4)
        axes.set_ylim(max(3, len(styles)) - 0.4, -0.6)
    left.set_yticks(range(len(styles)), [n.replace(", ", ",\n") for n in styles], fontsize=8)
    center.set_yticks([])
    rows = [*_measured_speedups(data, main), *_published_speedups()]
    marks.dot_rows(right, rows, ".1f")
    right.axvline(1, color="grey", linewidth=1)
    right.set(xlabel="times as fast", xlim=(0, max(21, 1.1 * right.get_xlim()[1])))
    run = main.iloc[0]
    caption = f"{run.weights}; {run.requests} requests, {setting(run)}. {REPEATS} Circles, vs serial: mean over pairs "
    caption += "of runs of the same occasion, with its 95 % interval, where there are enough pairs. Squares, vs n × "
    caption += "alone: against n times the time of a request alone in the same run. Paper: Fig. 4(a) at 32 requests; "
    caption += f"hollow: against FasterTransformer's instances, as that figure prints it. {_t1(main)}"
    return Drawing(fig, "measured; diamonds: paper", caption.strip())


def _measured_speedups(data: Data, main: pd.DataFrame) -> Iterable[marks.Row]:
    """Over serial on the same requests, as the claims read it; where all requests are equal, serial takes n times a lone
    one."""
    serial, colors = main[main.engine == "serial"], {name: color for name, (color, _, _) in looks(main).items()}
    for name, color in colors.items() if len(serial) else ():
        if not name.startswith("serial"):
            ours = main[main.name == name].iloc[0]
            if sample := data.ratio("flover_serving", "total_seconds", serial.iloc[0], ours):
                yield f"{name}: vs serial", sample, {"color": color, "marker": "o"}
    equal = main[main.workload.isin(["fixed", "poisson"])]
    for name, runs in equal[equal.engine != "serial"].groupby("name"):
        ratio = runs.requests * runs.single_request_seconds / runs.total_seconds
        style = {"color": colors[name], "marker": "s"}
        yield f"{name}: vs {main.requests.iloc[0]} × alone", ratio, style


def _published_speedups() -> Iterable[marks.Row]:
    """The paper's at 32 requests: over concurrent instances, and over 32 times its single request."""
    for model, seconds in published_seconds().items():
        yield f"paper, {model}: vs instances", [printed("FL-F4a", f"{model}, speedup")[32]], marks.PAPER
        yield f"paper, {model}: vs 32 × alone", [32 * seconds[1] / seconds[32]], marks.PAPER | {"mfc": "black"}


def flover_timeline(
    data: Data, *, workload: str = "fixed", model: str | None = None, dtype: str | None = None, engines: int = 6
) -> Drawing:
    """A row per request: when it waits, is prefilled and decodes, in the median run of each of the first `engines`."""
    main = of_one_workload(of_one_model(data.runs("flover_serving"), model), workload)
    dtype = dtype or main["dtype"].mode()[0]
    shown = [name for name in looks(main) if (main[main.name == name]["dtype"] == dtype).any()][:engines]
    if not shown:
        raise NothingToShow(f"No {dtype} run of a flover_serving point.")
    order = {name: main[main.name == name].sort_values("total_seconds") for name in shown}
    median = {name: runs.iloc[[len(runs) // 2]] for name, runs in order.items()}
    data.only(*median.values())
    fig, panels = plt.subplots(len(shown), 1, figsize=(8, 1.8 * len(shown) + 0.8), sharex=True, squeeze=False)
    tables = {name: series(run) for name, run in median.items()}
    end = 1.02 * max(rows.finish_s.max() for rows in tables.values())
    prefill = max((rows.first_token_s - rows.admitted_s).max() for rows in tables.values())
    for axes, (name, rows) in zip(panels[:, 0], tables.items(), strict=True):
        axes.hlines(rows.request, rows.arrival_s, rows.admitted_s, color="#999999", linewidth=1, label="waits")
        for color, label, *ends in (
            (1, "prefill", "admitted_s", "first_token_s"),
            (0, "decodes", "first_token_s", "finish_s"),
        ):
            spans = rows[ends[0]], rows[ends[1]]
            axes.hlines(rows.request, *spans, color=PALETTE[color], linewidth=3.2, label=label)
        axes.plot(rows.arrival_s, rows.request, "|", color="black", markersize=5, label="arrival")
        axes.plot(rows.first_token_s, rows.request, "o", mfc="white", color="black", markersize=3, label="first token")
        axes.plot(rows.finish_s, rows.request, "D", color="black", markersize=2.5, label="answer complete")
        axes.set(ylabel="request", title=f"{name}: all done after {rows.finish_s.max():.2f} s")
        axes.margins(y=0.08)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    panels[-1, 0].set(xlabel="time (s)", xlim=(0, end))
    handles = panels[0, 0].get_legend_handles_labels()
    fig.legend(*handles, ncols=6, **marks.ABOVE)
    run = main.iloc[0]
    caption = f"{run.weights}; {run.requests} requests, {setting(run)}. Drawn: each engine's run with the median total "
    caption += f"time. Prefill, from admission to the first token, takes at most {prefill:.2g} s. {_t1(main)}"
    return Drawing(fig, "measured", caption.strip())


def flover_requests(data: Data) -> Drawing:
    """Total time, and how many times sooner than n lone requests' time, over equal requests; every model and device."""
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
            line = ("-", "--", "-.", ":")[i % 4]
            marks.points(axes, values.groupby(runs.requests), line, label if axes is left else "", **marks.look(i))
    counts = np.array(sorted(equal.requests.unique()))
    free = 1 + equal.interval_t1.median() * (counts - 1)
    left.plot(counts, free, ":", color="grey", label="left: if a further request cost nothing")
    for i, (model, seconds) in enumerate(published_seconds().items()):
        style = {"color": "black", "marker": MARKERS[i], "mfc": "none", "linestyle": "none", "markersize": 5}
        ratios = [n * seconds[1] / value for n, value in seconds.items()]
        right.plot(list(seconds), ratios, label=f"right: paper, {model}", **style)
    for axes, label in ((left, "total time ÷ T1, logarithmic"), (right, "n × T1 ÷ total time, logarithmic")):
        marks.log_axis(axes.xaxis, WIDTHS)
        marks.log_axis(axes.yaxis, [width for width in WIDTHS if width <= axes.get_ylim()[1]])
        axes.set(xlabel="n requests, logarithmic", ylabel=label)
    fig.legend(ncols=3, **marks.ABOVE)
    settings: dict[str, list[str]] = {}
    gains = []
    for (engine, weights, device, _), runs in drawn:
        where = "on a GPU" if device == "cuda" else "on a CPU"
        settings.setdefault(setting(runs.iloc[0]), []).append(where)
        if engine == "fused":
            most = runs.requests.max()
            gain = (runs.requests * alone(runs) / runs.total_seconds)[runs.requests == most].median()
            gains.append(f"{gain:.1f} times as fast as n × T1 ({weights}, {where}, {most} requests)")
    told = [f"{' and '.join(dict.fromkeys(places))}: {words}" for words, places in settings.items()]
    words = "; ".join(told) if len(told) > 1 else next(iter(settings))
    caption = f"{words[:1].upper()}{words[1:]}. {T1} Our T1 is the median over the runs of an occasion. {REPEATS} "
    caption += "Hollow: the paper's Fig. 4(a)." + (f" Fused: {'; '.join(gains)}." if gains else "")
    caption += " Serial runs are not drawn here: see the figures on throughput and on a GPU."
    return Drawing(fig, "measured; hollow: paper", caption)


def alone(runs: pd.DataFrame) -> pd.Series:
    """T1 of each run: the median over all runs of its occasion, since one run times few requests alone."""
    occasion = pd.Series(statistics.occasions(list(runs.start)), index=runs.index)
    return runs.single_request_seconds.groupby(occasion).transform("median")

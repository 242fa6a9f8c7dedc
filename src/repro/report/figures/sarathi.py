"""Figures of SARATHI; their story is `notebooks/sarathi.ipynb`."""

import math

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from repro.experiments.sarathi_bubbles import CHOICES
from repro.flover.scheduler import Scheduler
from repro.report.figures import marks
from repro.report.figures.base import HATCHES, PALETTE, Drawing
from repro.report.figures.data import Data, paper, series
from repro.report.figures.flover import MODEL, of_usual_model
from repro.report.figures.scaling.marks import whiskers

POLICIES = {
    "request_level": "request-level batches",
    "iteration_level": "whole prompts",
    "chunked": "chunks",
    "bounded": f"budgeted passes, wait up to {Scheduler.token_gap_s:g} s",
}
TIMES = {
    "seconds": "total time (s)",
    "ttft_mean": "mean time to first token (s)",
    "gap_longest": "longest wait for a token (s)",
}
SETTING = ["model", "dtype", "chunk", "prompt_tokens", "output_tokens", "requests", "slots"]
LENGTHS = "{prompt_tokens} + {output_tokens} tokens, chunk of {chunk}"


def _settings(runs: pd.DataFrame, fields: list[str], words: str) -> list[tuple[str, pd.DataFrame]]:
    """Name and runs of every setting, the claims' model first. `words`: a name's format, of the fields."""
    groups = runs.assign(other=runs.model != MODEL).groupby(["other", *fields])
    found = [(mine, mine.iloc[0]) for _, mine in groups]
    return [(f"{_model(run)}: {words.format(**run[fields])}, n = {len(mine)}", mine) for mine, run in found]


def _model(run: pd.Series) -> str:
    """The model of a run, without what its weights are."""
    return str(run.weights).rsplit(", ", 1)[0].removesuffix("-Instruct")


def _ratios(
    axes: Axes, data: Data, settings: list[tuple[str, pd.DataFrame]], metrics: tuple[str, str], claim: str
) -> None:
    """One metric over the other in every setting, as the claim reads it, and the paper's."""
    rows: list[marks.Row] = []
    for name, mine in settings:
        found = data.of_point("sarathi_prefill", metrics[0], mine.iloc[0], per=metrics[1])
        rows.append((name, found or [math.nan], marks.look(2)))
    rows.append(("paper, LLaMA-13B on an A6000: up to", [paper(claim)[0].value], marks.PAPER))
    marks.dot_rows(axes, rows, ".3g")
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xlim(0, 1.1 * axes.get_xlim()[1])


def sarathi_piggyback(data: Data) -> Drawing:
    """A token decoded alone and beside a chunk, a row per setting; beside it the ratio, and the paper's."""
    runs = data.runs("sarathi_prefill", measures="piggyback")
    runs = runs[runs.prompt_tokens == runs.prompt_tokens.mode()[0]]
    data.only(runs)
    settings = _settings(runs, ["model", "dtype", "chunk", "decodes"], "{decodes} decode, chunk of {chunk}")
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 0.3 * len(settings) + 2), sharey=True)
    named = {"token_alone_s": "in a pass that only decodes", "token_beside_s": "beside a chunk"}
    for number, (metric, label) in enumerate(named.items()):
        for at, (_, mine) in enumerate(settings):
            look = marks.look(number) | ({} if at else {"label": label})
            marks.point(left, at, 1000 * mine[metric], across=True, **look)
    _ratios(right, data, settings, ("token_alone_s", "token_beside_s"), "SA-1")
    right.set_xlabel("a token alone ÷ beside a chunk")
    left.grid(axis="y", visible=False)
    left.tick_params(axis="y", labelsize=8)
    times = 1000 * runs[list(named)]
    low, high = times.min().min(), times.max().max()
    if high > 20 * low > 0:
        left.set_xlabel("ms per token, logarithmic")
        marks.log_axis(left.xaxis, marks.round_ticks(low, high))
    else:
        left.set(xlabel="ms per token", xlim=(0, None))
    fig.legend(ncols=2, **marks.ABOVE)
    run = runs.iloc[0]
    caption = f"{'; '.join(runs.weights.unique())}. {run.threads} threads, {run.prompt_tokens} tokens stored for each "
    caption += "row that decodes. Left: medians of n runs, with range and values. Right: each run, their mean and, "
    caption += "where there are enough, its 95 % interval."
    return Drawing(fig, "measured; hollow diamond: paper", caption)


def sarathi_throughput(data: Data) -> Drawing:
    """Until all are done, mean time to first token and longest wait for a next one, by policy; below, for every setting,
    how many times as fast chunks are, and the paper's."""
    runs = data.runs("sarathi_prefill", measures="throughput")
    main = max((mine for _, mine in of_usual_model(runs).groupby(SETTING)), key=len)
    settings = _settings(runs, SETTING, LENGTHS)
    heights = [2, 0.3 * len(settings) + 0.5]
    fig = plt.figure(figsize=(10, sum(heights) + 1.6))
    panels = fig.subplot_mosaic([list(TIMES), ["ratios"] * 3], height_ratios=heights)
    for metric, label in TIMES.items():
        _by_policy(panels[metric], main, metric, label)
    marks.rows(panels["seconds"], list(POLICIES.values()), fontsize=8)
    marks.note(panels["gap_longest"], "none: handed back whole", 0, [*POLICIES].index("request_level"), 3, va="center")
    _ratios(panels["ratios"], data, settings, ("request_level_seconds", "chunked_seconds"), "SA-2")
    panels["ratios"].set_xlabel("time until all are done: request-level batches ÷ chunks")
    run = main.iloc[0]
    caption = f"{'; '.join(runs.weights.unique())}. {run.threads} threads, {run.requests} requests arrive at once, "
    caption += f"{run.slots} are served at a time. Tokens: prompt + answer. Above: {LENGTHS.format(**run[SETTING])}; "
    caption += "medians, with range and values of the runs. Budgeted passes take as many prompt tokens as keep "
    caption += f"waits below {Scheduler.token_gap_s:g} s. All requests are equal and arrive at once, so under whole prompts no prompt delays a "
    caption += "request that decodes: the longest waits here do not show what chunks save there. Below: each of n "
    caption += "runs, their mean and, where there are enough, its 95 % interval. Queue "
    caption += "model, predicted total time against measured, in %: "
    errors = {name: 100 * main[f"{policy}_error_seconds"].median() for policy, name in POLICIES.items()}
    caption += "; ".join(f"{name}: {round(error, 1) + 0.0:+.1f}" for name, error in errors.items())  # + 0.0: no -0.0
    if means := marks.of_claims(data, {"SA-4.a": "chunks", "SA-4.b": "budgeted passes"}):
        caption += f" (medians; means over the occasions: {means})"
    return Drawing(fig, "measured; hollow diamond: paper", f"{caption}.")


def _by_policy(axes: Axes, runs: pd.DataFrame, metric: str, label: str) -> None:
    for at, policy in enumerate(POLICIES):
        if len(values := runs[f"{policy}_{metric}"].dropna()):
            look = {"color": PALETTE[at], "hatch": HATCHES[at]}
            marks.bar(axes, at, values, ".3g", across=True, height=0.6, **look)
    axes.set(xlabel=label, ylim=(len(POLICIES) - 0.4, -0.6), yticks=[])
    axes.margins(x=0.3)


def sarathi_pipeline(data: Data) -> Drawing:
    """Share of the stages' time that is bubbles, with whole prompts and with chunks: of all draws, and of those with
    each value of a choice."""
    runs = data.runs("sarathi_bubbles", **dict.fromkeys(CHOICES, 0))
    run = runs.sort_values(["stages", "draws"]).iloc[-1:]
    data.only(run)
    table = pd.concat([run.assign(varied=""), series(run)], ignore_index=True)
    words = {"prompt_per_output": "prompt ÷ answer", "chunk": "chunk", "requests": "requests:"}
    names = [f"{words[row.varied]} {row.value:g}" if row.varied else "all draws" for row in table.itertuples()]
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.5, 0.42 * len(names) + 1.4), sharey=True)
    for number, (policy, label) in enumerate((("whole", "whole prompts"), ("chunked", "chunks"))):
        places = [at + 0.38 * number - 0.19 for at in range(len(names))]
        share = f"{policy}_bubble_fraction"
        look = {"color": PALETTE[number], "hatch": HATCHES[number], "label": label, "capsize": 2}
        left.barh(places, 100 * table[share], xerr=100 * whiskers(table, share), height=0.36, **look)
    for number, (metric, label) in enumerate((("bubble_reduction", "bubbles"), ("speedup", "time until all are done"))):
        places = [at + 0.24 * number - 0.12 for at in range(len(names))]
        look = {"linestyle": "", "label": label, "capsize": 2, **marks.look(number)}
        right.errorbar(table[metric], places, xerr=whiskers(table, metric), **look)
    theirs = [paper(claim)[0].value for claim in ("SA-3.a", "SA-3.b")]
    for number, value in enumerate(theirs):
        right.axvline(value, color=PALETTE[number], linestyle=":")
    marks.rows(left, names)
    left.set(xlabel="bubbles, % of the stages' time", ylim=(len(names) - 0.5, -0.5))
    right.set(xlabel="seconds, whole prompts ÷ chunks (logarithmic)", xscale="log")
    marks.log_axis(right.xaxis, marks.round_ticks(*right.get_xlim()))
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    caption = f"{run.iloc[0].setting}. Medians, with 95 % of the draws: of all, as the claims read them, and of those "
    caption += "with one value of a choice, the others drawn. "
    caption += "Left: bubbles as a share of a run's own time. Right: seconds ÷ seconds; bubbles fall by more there "
    caption += "than their shares do, since the whole run is shorter too."
    if told := _bands(data):
        caption += f" All draws, whole ÷ chunks: {told}."
    found = table[["bubble_reduction", "speedup"]].to_numpy()
    if less := [name for name, ours in zip(names, found, strict=True) if (ours < theirs).any()]:
        caption += f" The median of one or both ratios is below the paper's in: {'; '.join(less)}."
    return Drawing(fig, "modelled; dotted: paper", caption)


def _bands(data: Data) -> str:
    """What the claims read of the pipeline, each with its band."""
    samples = {name: data.of_claim(claim) for claim, name in (("SA-3.a", "bubbles"), ("SA-3.b", "time"))}
    told = {name: (sample.value, *sample.interval) for name, sample in samples.items() if sample}
    return ", ".join(f"{name} {value:.3g} [{low:.3g}, {high:.3g}]" for name, (value, low, high) in told.items())

"""Figures of SARATHI; their story is `notebooks/sarathi.ipynb`."""

import matplotlib.pyplot as plt
import pandas as pd

from repro.report.figures import marks
from repro.report.figures.base import HATCHES, PALETTE, Drawing
from repro.report.figures.data import Data, paper, series

POLICIES = {
    "request_level": "batches of requests",
    "iteration_level": "whole prompts",
    "chunked": "chunks",
    "bounded": "chunks, bounded wait",
}
SETTING = ["model", "dtype", "chunk", "prompt_tokens", "output_tokens", "requests", "slots"]
CLAIMED = "random-40m"  # the model that the claims read


def _of_one_model(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs of the claims' model, where there are any, else of that with most runs."""
    return runs[runs.model == (CLAIMED if CLAIMED in set(runs.model) else runs.model.mode()[0])]


def sarathi_piggyback(data: Data) -> Drawing:
    """A token decoded alone and beside a chunk, over the number of rows that decode; beside it the ratio, and the
    paper's."""
    runs = _of_one_model(data.runs("sarathi_prefill", measures="piggyback"))
    runs = runs[runs.chunk == runs.chunk.mode()[0]].sort_values("decodes")
    data.only(runs)
    places = {decodes: at for at, decodes in enumerate(sorted(runs.decodes.unique()))}
    fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3.1))
    named = {"token_alone_s": "in a pass that only decodes", "token_beside_s": "beside a chunk"}
    for number, (metric, label) in enumerate(named.items()):
        groups = [(places[decodes], 1000 * mine[metric]) for decodes, mine in runs.groupby("decodes")]
        marks.points(left, groups, label=label, **marks.look(number))
    ratios = runs.assign(ratio=runs.token_alone_s / runs.token_beside_s).groupby("decodes").ratio
    marks.points(right, [(places[decodes], mine) for decodes, mine in ratios], label="ours", **marks.look(2))
    right.axhline(paper("SA-1")[0].value, color="black", linestyle=":", label="paper, up to")
    right.axhline(1, color="grey", linewidth=1)
    for axes, label in ((left, "a token (ms)"), (right, "alone ÷ beside a chunk")):
        axes.set_xticks(list(places.values()), [str(decodes) for decodes in places])
        axes.set(xlabel="requests that decode", ylabel=label, ylim=(0, None))
        axes.margins(x=0.1)
        axes.legend(frameon=False, fontsize=8)
    run = runs.iloc[0]
    caption = f"{run.weights}, {run.threads} threads; {run.prompt_tokens} stored tokens, chunks of {run.chunk}. Medians, with "
    caption += "range and values of the runs."
    if claim := data.of_claim("SA-1"):
        caption += f" As the claim reads it: {marks.said(claim)}."
    return Drawing(fig, "measured; dotted: paper", caption)


def sarathi_throughput(data: Data) -> Drawing:
    """Until all are done, mean time to first token and longest wait for a next one, by policy."""
    runs = _of_one_model(data.runs("sarathi_prefill", measures="throughput"))
    runs = max((mine for _, mine in runs.groupby(SETTING)), key=len)
    data.only(runs)
    panels = {"seconds": "all are done after (s)", "ttft_mean": "mean time to first token (s)"}
    panels["gap_longest"] = "longest wait for a next token (s)"
    fig, axes = plt.subplots(1, 3, figsize=(9.5, 2.4), sharey=True)
    for panel, (metric, label) in zip(axes, panels.items(), strict=True):
        for at, policy in enumerate(POLICIES):
            values = runs[f"{policy}_{metric}"].dropna()
            if len(values):
                look = {"color": PALETTE[at], "hatch": HATCHES[at]}
                marks.bar(panel, at, values, ".3g", across=True, height=0.6, **look)
        panel.set(xlabel=label, ylim=(len(POLICIES) - 0.5, -0.5))
        panel.margins(x=0.3)
    marks.rows(axes[0], list(POLICIES.values()))
    run = runs.iloc[0]
    caption = (
        f"{run.weights}, {run.threads} threads; {run.requests} requests of {run.prompt_tokens} and {run.output_tokens} "
    )
    caption += f"tokens at once, {run.slots} run; chunks of {run.chunk}. Answers of batches of requests are handed back whole. "
    errors = ", ".join(
        f"{name} {100 * runs[f'{policy}_error_seconds'].median():+.0f}" for policy, name in POLICIES.items()
    )
    caption += f"Medians, with range and values of the runs. Queue model, predicted total time against measured, in %: {errors}."
    if claim := data.of_claim("SA-2"):
        caption += f" Batches of requests ÷ chunks as the claim reads it: {marks.said(claim)}; paper, up to "
        caption += f"{paper('SA-2')[0].value:g}."
    return Drawing(fig, "measured", caption)


def sarathi_pipeline(data: Data) -> Drawing:
    """Share of the stages' time that is bubbles, with whole prompts and with chunks, for other requests and chunks."""
    runs = data.runs("sarathi_bubbles")
    run = runs.sort_values(["stages", "draws"]).iloc[-1:]
    data.only(run)
    table = series(run)
    words = {"prompt_per_output": "prompt ÷ answer", "chunk": "chunk"}
    names = [f"{words[row.varied]} {row.value:g}" for row in table.itertuples()]
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.5, 0.42 * len(names) + 1.4), sharey=True)
    for number, (policy, label) in enumerate((("whole", "whole prompts"), ("chunked", "chunks"))):
        places = [at + 0.38 * number - 0.19 for at in range(len(names))]
        shares = 100 * table[f"{policy}_bubble_fraction"]
        left.barh(places, shares, height=0.36, color=PALETTE[number], hatch=HATCHES[number], label=label)
    for number, metric in enumerate(("bubble_reduction", "speedup")):
        label = "bubbles" if metric == "bubble_reduction" else "time until all are done"
        right.plot(table[metric], range(len(names)), linestyle="", label=label, **marks.look(number))
    for number, claim in enumerate(("SA-3.a", "SA-3.b")):
        right.axvline(paper(claim)[0].value, color=PALETTE[number], linestyle=":")
    marks.rows(left, names)
    left.set(xlabel="bubbles, % of the stages' time", ylim=(len(names) - 0.5, -0.5))
    right.set(xlabel="whole prompts ÷ chunks", xlim=(0, None))
    left.legend(frameon=False, fontsize=8)
    right.legend(frameon=False, fontsize=8, loc="lower right")
    bands = marks.of_claims(data, {"SA-3.a": "bubbles", "SA-3.b": "time"})
    caption = f"{run.iloc[0].setting}. One parameter varied at a time. Dotted: paper."
    caption += f" With all draws of the machine, whole ÷ chunks: {bands}." if bands else ""
    return Drawing(fig, "modelled; dotted: paper", caption)

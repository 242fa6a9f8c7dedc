"""Figures of ExFlow: what a layer's expert tells about the next, what a placement saves and what it costs.

A method of placement has one colour and one marker.
"""

from contextlib import suppress
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy.optimize import linear_sum_assignment

from repro.claims.sample import Sample
from repro.records.record import RecordError
from repro.report.figures import marks
from repro.report.figures.base import PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow, paper, series

TRACE = "gptoss20b"
MODELS = {  # trace: the model that was routed
    "gptoss20b": "gpt-oss-20b",
    **{f"gpt_moe_{experts}e": f"GPT-MoE, {experts} experts" for experts in (8, 16, 32, 64)},
    "gpt_moe_16e_shakespeare": "GPT-MoE, 16 experts, trained on Shakespeare only",
}
TEXTS = {"mmlu": "MMLU", "gpqa": "GPQA", "mmlu_pro": "MMLU-Pro", "sorry_bench": "SORRY-Bench", "all": "all texts"}
METHODS = {  # method of exflow.place: its name, its look
    "contiguous": ("rank order (DeepSpeed-MoE)", marks.look(5)),
    "random": ("random", marks.look(4)),
    "exflow": ("paper's integer program", marks.look(1)),
    "exflow-direct": ("paper's program, all GPUs at once", marks.look(3)),
    "affinity": ("our search, same objective", marks.look(0)),
}
# Placements by and for all texts, without a limit on load or extra time for the bound; in one node, by all tokens.
PLAIN = {"train_domain": "all", "test_domain": "all", "max_load_limit": 0, "bound_s": 0}
SEQUENCES = {"sampled": "sequences", "runs": 3, "columns": ("crossings", "transitions")}
BY_SEQUENCES = (
    "Dots: seeds. Marks: all seeds together. Bars cover two 95 % intervals, one over other sequences of the "
    "same kind and one over other seeds."
)
ONE_NODE = {**PLAIN, "gpus_per_node": 0, "train_tokens": 0}


def exflow_routing(data: Data, *, trace: str = TRACE, other: str = "gpt_moe_64e", domain: str = "all") -> Drawing:
    """P(next expert | this expert) of one pair of layers, and the mutual information of every pair; of trace `other` too."""
    shown = {trace: _most_tokens(data, trace, domain)}
    with suppress(NothingToShow):
        shown[other] = _most_tokens(data, other, domain)
    data.only(*shown.values())
    runs = shown[trace]
    table = series(runs)
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 4.1), width_ratios=[1, 1.15])

    cells = table[(table.kind == "routing") & (table.path == runs.path.iloc[0])]
    matrix = cells.pivot(index="from_expert", columns="to_expert", values="probability").to_numpy()
    order = linear_sum_assignment(matrix, maximize=True)[1]
    image = left.imshow(matrix[:, order], cmap="viridis", vmin=0, aspect="equal", interpolation="nearest")
    layer = int(cells.layer.iloc[0])
    left.set(xlabel=f"expert of layer {layer + 1} (sorted)", ylabel=f"expert of layer {layer}")
    left.set_title(
        f"{MODELS.get(trace, trace)}: P(next expert | this one);\nuniform would be {1 / len(matrix):.3f}", fontsize=9
    )
    left.grid(visible=False)
    fig.colorbar(image, ax=left, shrink=0.8)

    for index, (each, some) in enumerate(shown.items()):
        _information(right, data, some, each, domain, index)
    pairs = table[table.kind == "pair"].groupby("layer")
    right.set(xlabel="layer (and the next one)", ylabel="mutual information (bits)", ylim=(0, None))
    right.legend(loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8, frameon=False)
    caption = f"{runs.routing.iloc[0]}, {runs.tokens_used.iloc[0]:,} tokens. The mutual information of two layers "
    caption += f"is on average {100 * pairs.share.median().mean():.0f} % of the next layer's entropy. Dotted, at the "
    caption += "bottom: tokens shuffled within each layer. Legend: bias-corrected information ÷ "
    caption += "that of shuffled tokens, with its 95 % interval."
    return Drawing(fig, "measured", caption)


def _most_tokens(data: Data, trace: str, domain: str) -> pd.DataFrame:
    """Runs of a trace on texts of a domain, with the most tokens."""
    runs = data.runs("exflow_affinity", trace=trace, domain=domain).astype({"tokens_used": int})
    return runs[runs.tokens_used == runs.tokens_used.max()]


def _information(axes: Axes, data: Data, runs: pd.DataFrame, trace: str, domain: str, index: int) -> None:
    """Mutual information over layers, and of shuffled tokens."""
    pairs = series(runs).query("kind == 'pair'").groupby("layer")
    how = {"per": "mutual_information_shuffled", "sampled": "sequences"}
    how["columns"] = ("information", "shuffled_information")
    asked = {"trace": trace, "domain": domain, "tokens": 0}
    sample = data.sample("exflow_affinity", "unbiased_mutual_information", asked, **how)
    times = f", {marks.said(sample).split(' (')[0]} times shuffled" if sample else ""
    label = f"{MODELS.get(trace, trace)}{times}"
    axes.plot(pairs.bits.median(), label=label, markersize=4, **marks.look(index))
    axes.plot(pairs.shuffled_bits.median(), ":", color=PALETTE[index])


def by_method(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame, dict[str, str]]]:
    """Every method of the table: its name (with the time limit that cut it), its runs, its look."""
    found = []
    for method, (name, style) in METHODS.items():
        runs = table[table.method == method]
        cut = runs.time_limit_s[runs.time_limited == "yes"].max()
        if len(runs):
            found.append((name if np.isnan(cut) else f"{name} ({cut:g} s limit hit)", runs, style))
    return found


def exflow_hops(data: Data, *, trace: str = TRACE, others: tuple[str, ...] = ("gpt_moe_64e", "gpt_moe_8e")) -> Drawing:
    """Transitions that cross GPUs under each placement, and how many fewer than by rank order; also of traces `others`."""
    runs = data.runs("exflow_placement", **ONE_NODE)
    flat = runs[runs.trace == trace]
    if not {"contiguous"} < set(flat.method):
        raise NothingToShow(f"No record of rank order and another placement of {trace}.")
    data.only(flat, runs[runs.trace.isin(others) & runs.method.isin(["affinity", "contiguous"])])
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 4.3), width_ratios=[1.25, 1])
    _crossings(left, data, trace, flat)
    _reductions(right, data, flat, [runs[runs.trace == each] for each in others if each != trace])
    fig.legend(ncols=3, **marks.ABOVE)
    caption = f"{flat.routing.iloc[0]}. {BY_SEQUENCES} Black bars: a lower bound for any placement, on the tokens that "
    caption += f"the placement was computed from. Paper: Fig. 8 as told by secondary notes.{_programs(flat)}"
    over = {"over": {"method": "contiguous"}}
    if theirs := by_sequences(data, trace, method="exflow", gpus=4, form="reduction", **over):
        caption += " The claims use our search. On 4 GPUs the paper's integer program saves "
        caption += f"{marks.said(theirs)} within its time limit."
    if node := data.of_claim("EX-F8.c"):
        caption += (
            f" With 64 experts on 16 GPUs in nodes of 4 a token stays on its node {marks.said(node)} times as often "
        )
        caption += "as by rank order."
    random = [data.of_claim(claim) for claim in ("EX-ILP.a", "EX-ILP.b")]
    if all(random):
        caption += (
            f" Of a random placement's crossings our search saves {marks.said(random[0])} with 8 experts on 4 GPUs, "
        )
        caption += f"and {marks.said(random[1])} on 8."
    return Drawing(fig, "measured; white diamonds: paper (another model)", caption)


def _programs(runs: pd.DataFrame) -> str:
    """What is said of the paper's program where it was solved both ways."""
    if not {"exflow", "exflow-direct"} <= set(runs.method):
        return ""
    return (
        " The paper's integer program is solved by repeated halving, as in the published solver, or for all GPUs at "
        "once. A solver out of time returns its best placement so far, which may be no better than rank order."
    )


def by_sequences(data: Data, trace: str, **where: Any) -> Sample | None:
    """Share of transitions that cross GPUs, with the interval that other held-out sequences would give, as the claims take
    it. `where`: of the runs; with `over` and `form` as well: against other runs."""
    how = {name: where.pop(name) for name in ("over", "form", "complement") if name in where}
    asked = {"trace": trace, **ONE_NODE, "time_limit_s": {}, **where}
    try:
        return data.sample("exflow_placement", "crossing_fraction", asked, **SEQUENCES, **how)
    except (RecordError, ValueError):  # runs without a series of sequences, or that never cross
        return data.sample("exflow_placement", "crossing_fraction", asked, sampled="seeds", **how)


def _crossings(axes: Axes, data: Data, trace: str, flat: pd.DataFrame) -> None:
    methods, sizes = by_method(flat), sorted(flat.gpus.unique())
    sides = {"contiguous": (4, "right"), "random": (-2, "left"), "exflow": (4, "right"), "exflow-direct": (-2, "left")}
    for i, (name, runs, style) in enumerate(methods):
        axes.plot([], [], linestyle="", label=name, **style)
        dx, side = sides.get(runs.method.iloc[0], (0, "center"))
        for gpus in sorted(set(runs.gpus)):
            x = sizes.index(gpus) + (i - (len(methods) - 1) / 2) * 0.75 / len(methods)
            if sample := by_sequences(data, trace, method=runs.method.iloc[0], gpus=gpus):
                value = marks.point(axes, x, sample, markersize=6, **style)
                above = runs.method.iloc[0] != "exflow"  # its number would lie on its neighbours' marks
                marks.note(axes, f"{value:.2f}", x, value, dx, 7 if above else -14, ha=side)
    bounds, at = flat.groupby("gpus").bound.median(), np.arange(len(sizes))
    axes.hlines(bounds, at - 0.42, at + 0.42, color="black", linewidth=2.5, label="proven bound (training)")
    axes.set_xticks(at, sizes)
    axes.set(xlabel="GPUs that share a layer's experts", ylabel="transitions that cross GPUs", ylim=(0, 1.05))
    axes.grid(axis="x", visible=False)


def _reductions(axes: Axes, data: Data, flat: pd.DataFrame, others: list[pd.DataFrame]) -> None:
    drawn = [(runs, style, "") for _, runs, style in by_method(flat)[1:]]
    for other, marker in zip(others, "XP", strict=False):
        if len(ours := other[other.method == "affinity"]):
            name = f"our search, {MODELS.get(other.trace.iloc[0], other.trace.iloc[0])}"
            drawn.append((ours, {"color": PALETTE[2], "marker": marker}, name))
    for runs, style, name in drawn:
        asked = {"method": runs.method.iloc[0], "over": {"method": "contiguous"}, "form": "reduction"}
        sizes = sorted(set(runs.gpus))
        samples = {gpus: by_sequences(data, runs.trace.iloc[0], gpus=gpus, **asked) for gpus in sizes}
        fewer = {gpus: marks.point(axes, gpus, s, **style) for gpus, s in samples.items() if s}
        axes.plot(list(fewer), list(fewer.values()), linewidth=1, label=name or None, **style)
    published = paper("EX-F8")
    style = {"color": "black", "marker": "D", "mfc": "white", "linestyle": ":", "linewidth": 1}
    name = f"paper, {published[0].label.split(',')[0]}, as told"
    axes.plot([p.x for p in published], [abs(p.value) / 100 for p in published], label=name, **style)
    marks.log_axis(axes.xaxis, [2, 4, 8, 16, 32])
    axes.set(xlabel="GPUs", ylabel="share saved over rank order", ylim=(-0.08, None))
    axes.axhline(0, color="grey", linewidth=0.8)


_SIDES = {"contiguous": (-13, -9), "random": (-3, -15), "exflow-direct": (-4, 8)}  # of numbers at marks that lie close


def exflow_load(data: Data, *, trace: str = TRACE) -> Drawing:
    """Hops against the load of a layer's busiest GPU, also of placements under a limit on load."""
    limited = data.runs("exflow_placement", trace=trace).query("max_load_limit > 0").sort_values("max_load_limit")
    flat = data.runs("exflow_placement", trace=trace, **ONE_NODE)
    data.only(flat, limited)
    fig, axes = plt.subplots(figsize=(7, 4.4))
    for name, runs, style in by_method(flat):
        axes.plot(runs.max_load, runs.hops_per_token, linestyle="", markersize=4, alpha=0.4, mec="none", **style)
        medians = runs.groupby("gpus")[["max_load", "hops_per_token"]].median()
        axes.plot(medians.max_load, medians.hops_per_token, linewidth=1, markersize=8, label=name, **style)
        side = _SIDES.get(runs.method.iloc[0], (5, -12))
        for gpus, load, hops in medians.itertuples():
            marks.note(axes, f"{gpus}", load, hops, *side, color=style["color"])
    for gpus, runs in limited.groupby("gpus"):
        name = f"our search with a limit on load, {gpus} GPUs"
        axes.plot(runs.max_load, runs.hops_per_token, "--", label=name, markersize=6, **marks.look(2))
        for run in runs.iloc[[0, -1]].itertuples():  # between them, numbers would lie on each other
            marks.note(axes, f"≤ {run.max_load_limit:g}", run.max_load, run.hops_per_token, -6, 7, color=PALETTE[2])
    transitions = round((flat.hops_per_token / flat.crossing_fraction).median())
    axes.set(xlim=(1, None), ylim=(0, transitions), ylabel=f"hops per token ({transitions} transitions)")
    axes.set_xlabel("load of a layer's busiest GPU ÷ even share")
    fig.legend(ncols=2, **marks.ABOVE)
    caption = f"{flat.routing.iloc[0]}. Small marks: seeds; large: medians. Numbers at the marks: GPUs that share a "
    caption += f"layer's experts.{_programs(flat)}"
    eight = flat[flat.gpus == 8].groupby("method")[["hops_per_token", "max_load"]].median()
    if {"contiguous", "affinity"} <= set(eight.index):
        (hops, load), (fewer, more) = eight.loc["contiguous"], eight.loc["affinity"]
        caption += f" On 8 GPUs our search saves {100 * (1 - fewer / hops):.0f} % of the hops of rank order, and takes the busiest "
        caption += f"GPU's load from {load:.2f} to {more:.2f} times an even share."
    if len(limited):
        caption += " ≤: the limit on every GPU's load, on the tokens that the placement was computed from."
    return Drawing(fig, "measured", caption)


def exflow_copies(data: Data, *, trace: str = TRACE) -> Drawing:
    """What copies of experts save in hops and load (top-1), and the GPUs that a whole token visits (top-4)."""
    one, several = (data.runs("exflow_serving", trace=trace, top_k=top_k) for top_k in (1, 4))
    fig, (hops, load, visits) = plt.subplots(1, 3, figsize=(10, 4), width_ratios=[1, 1, 1.35])
    kinds = [(method, aim) for method in ("contiguous", "affinity") for aim in ("hops", "load")]
    for index, (method, aim) in enumerate(kinds):
        runs = one[(one.method == method) & ((one.copies_for == aim) | (one.extra_slots == 0))].groupby("extra_slots")
        name = f"{METHODS[method][0].split(',')[0]}, copies for {aim}"
        marks.points(hops, runs.hops_per_token, label=name, markersize=5, **marks.look(index))
        marks.points(load, runs.max_load, markersize=5, **marks.look(index))
    hops.set(ylabel="hops per token", ylim=(0, None))
    load.set(ylabel="busiest GPU ÷ even share", ylim=(1, None))
    for axes in (hops, load):
        axes.set(xlabel="slots for copies\nper GPU and layer", xticks=sorted(one.extra_slots.unique()))
    placed = [("contiguous", "hops"), ("affinity", "hops"), ("affinity", "new_gpus"), ("affinity", "gpus")]
    for x, (method, objective) in enumerate(placed):
        runs = several[(several.method == method) & (several.objective == objective)]
        for shift, column, fill in ((-0.2, "gpus_visited", "none"), (0.2, "new_gpus", PALETTE[0])):
            if len(runs):
                marks.bar(visits, x + shift, runs[column], ".2f", width=0.38, color=fill, edgecolor=PALETTE[0])
    names = ["rank order", "our search,\nby pairs", "for fewest\nnew GPUs", "for fewest\nGPUs visited"]
    visits.set_xticks(range(len(placed)), names, fontsize=7.5)
    visits.set(ylabel="GPUs per token and layer")
    for fill, name in (("none", "GPUs that a token visits"), (PALETTE[0], "of which it was not on before")):
        visits.bar(0, 0, color=fill, edgecolor=PALETTE[0], label=name)
    visits.margins(y=0.12)
    visits.grid(axis="x", visible=False)
    fig.legend(ncols=2, **marks.ABOVE)
    caption = f"{one.routing.iloc[0]}. Right: all four experts of a token; open bars: the GPUs that it visits, "
    caption += f"filled bars: those that it was not on in the layer before. {one.gpus.iloc[0]} GPUs in nodes of "
    seeds = one.seed.nunique()
    caption += f"{one.gpus_per_node.iloc[0]}, counted on recorded routing. "
    caption += f"Medians, with range and values of {seeds} seeds." if seeds > 1 else "One seed."
    searched, most = one[one.method == "affinity"], one.extra_slots.max()
    for aim, column, what in (("hops", "hops_per_token", "the hops"), ("load", "max_load", "the busiest GPU's load")):
        none, many = (searched[searched.extra_slots == slots] for slots in (0, most))
        left = many[many.copies_for == aim][column].median() / none[column].median()
        if not np.isnan(left):
            caption += f" Our search, {most} copy slots a GPU for {aim}: {100 * left:.0f} % of {what} without copies."
    return Drawing(fig, "measured", caption)

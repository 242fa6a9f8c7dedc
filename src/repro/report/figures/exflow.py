"""Figures of ExFlow: what a layer's expert tells about the next, what a placement saves and costs, what decoding gains.

A method of placement has one colour and one marker. Points are medians, with their interval over several seeds.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy.optimize import linear_sum_assignment

from repro.report.figures import base, marks
from repro.report.figures.base import HATCHES, PALETTE, Data, Drawing, NothingToShow

TRACE = "gptoss20b"
METHODS = {  # method of exflow.place: its name, its look
    "contiguous": ("rank order (DeepSpeed-MoE)", marks.look(5)),
    "random": ("random", marks.look(4)),
    "exflow": ("paper's integer program", marks.look(1)),
    "exflow-direct": ("paper's program, all GPUs at once", marks.look(3)),
    "affinity": ("our search, same objective", marks.look(0)),
}
# Placements by and for all texts, without a limit on load or extra time for the bound; in one node, by all tokens.
PLAIN = {"train_domain": "all", "test_domain": "all", "max_load_limit": 0, "bound_s": 0}
ONE_NODE = {**PLAIN, "gpus_per_node": 0, "train_tokens": 0}
SYSTEMS = {  # (system, keys_values, placement): name
    ("deepspeed", "gathered", "contiguous"): "DeepSpeed,\ntwo",
    ("two_all_to_alls", "gathered", "contiguous"): "two",
    ("coherent", "shared", "contiguous"): "one,\nids only",
    ("coherent", "shared", "affinity"): "one, ids only,\nplaced",
    ("coherent", "gathered", "affinity"): "one, K/V sent,\nplaced",
}
PARTS = {  # of an iteration: the metrics of moe_decode that belong to it
    "attention": ["seconds_attention"],
    "gate, experts, head": ["seconds_gate", "seconds_expert", "seconds_head", "seconds_other"],
    "all-to-all": ["seconds_all_to_all", "seconds_all_to_all_parts"],
    "all-gather of ids": ["seconds_all_gather"],
    "all-gather of K/V": ["seconds_all_gather_kv"],
}
ABOVE = {"loc": "outside upper center", "fontsize": 8}


def exflow_routing(data: Data, *, trace: str = TRACE, domain: str = "all") -> Drawing:
    """P(next expert | this expert) of one pair of layers, and the mutual information of every pair."""
    runs = data.runs("exflow_affinity", trace=trace, domain=domain).astype({"tokens_used": int})
    runs = runs[runs.tokens_used == runs.tokens_used.max()]
    table = base.series(runs)
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.9), width_ratios=[1, 1.15])

    cells = table[(table.kind == "routing") & (table.path == runs.path.iloc[0])]
    matrix = cells.pivot(index="from_expert", columns="to_expert", values="probability").to_numpy()
    order = linear_sum_assignment(matrix, maximize=True)[1]
    image = left.imshow(matrix[:, order], cmap="viridis", vmin=0, aspect="equal", interpolation="nearest")
    layer = int(cells.layer.iloc[0])
    left.set(xlabel=f"expert of layer {layer + 1} (sorted)", ylabel=f"expert of layer {layer}")
    left.set_title(f"P(next | this), uniform would be {1 / len(matrix):.3f}", fontsize=9)
    left.grid(visible=False)
    fig.colorbar(image, ax=left, shrink=0.8)

    pairs = table[table.kind == "pair"].groupby("layer")
    for column, name, index in (("bits", "trace", 0), ("shuffled_bits", "shuffled control", 5)):
        values = pairs[column].median()
        right.plot(values, label=f"{name}: mean {values.mean():.3g} bits", markersize=4, **marks.look(index))
    right.set(xlabel="layer j (pair j, j+1)", ylabel="mutual information (bits)", ylim=(0, None))
    right.set_title(f"on average {pairs.share.median().mean():.0%} of the next layer's entropy", fontsize=9)
    right.legend(loc="center right", fontsize=8)
    return Drawing(fig, "measured", f"{runs.routing.iloc[0]}, {runs.tokens_used.iloc[0]:,} tokens.")


# --- hops and load -------------------------------------------------------------------------------------------------


def by_method(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame, dict[str, str]]]:
    """Every method of the table: its name (with the time limit that cut it), its runs, its look."""
    found = []
    for method, (name, style) in METHODS.items():
        runs = table[table.method == method]
        cut = runs.time_limit_s[runs.time_limited == "yes"].max()
        if len(runs):
            found.append((name if np.isnan(cut) else f"{name} ({cut:g} s limit hit)", runs, style))
    return found


def exflow_hops(data: Data, *, trace: str = TRACE, other: str = "gpt_moe_64e") -> Drawing:
    """Transitions that cross GPUs under each placement, and how many fewer than by rank order; also of trace `other`."""
    runs = data.runs("exflow_placement", **ONE_NODE)
    flat = runs[runs.trace == trace]
    if not {"contiguous"} < set(flat.method):
        raise NothingToShow(f"No record of rank order and another placement of {trace}.")
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 4.3), width_ratios=[1.25, 1])
    _crossings(left, flat)
    _reductions(right, flat, runs[runs.trace == other])
    fig.legend(ncols=3, **ABOVE)
    caption = f"{flat.routing.iloc[0]}. Median, range and values of seeds, where there are several."
    caption += " Paper: Fig. 8 as told by secondary notes."
    return Drawing(fig, "measured; black diamonds: paper (another model)", caption)


def _crossings(axes: Axes, flat: pd.DataFrame) -> None:
    methods, sizes = by_method(flat), sorted(flat.gpus.unique())
    sides = {"contiguous": (4, "right"), "random": (-2, "left"), "exflow": (4, "right"), "exflow-direct": (-2, "left")}
    for i, (name, runs, style) in enumerate(methods):
        axes.plot([], [], linestyle="", label=name, **style)
        dx, side = sides.get(runs.method.iloc[0], (0, "center"))
        for gpus, values in runs.groupby("gpus").crossing_fraction:
            x = sizes.index(gpus) + (i - (len(methods) - 1) / 2) * 0.75 / len(methods)
            value = marks.point(axes, x, values, markersize=6, **style)
            marks.note(axes, f"{value:.2f}", x, value, dx, 7, ha=side)
    bounds, at = flat.groupby("gpus").bound.median(), np.arange(len(sizes))
    axes.hlines(bounds, at - 0.42, at + 0.42, color="black", linewidth=2.5, label="proven bound (training)")
    axes.set_xticks(at, sizes)
    axes.set(xlabel="GPUs that share a layer's experts", ylabel="transitions that cross GPUs", ylim=(0, 1.05))
    axes.grid(axis="x", visible=False)


def reduction(runs: pd.DataFrame, rank_order: pd.DataFrame) -> pd.Series:
    """Crossings against rank order in percent, over GPUs; paired by seed, which fixes the held-out sequences."""
    crossing, reference = (table.set_index(["gpus", "seed"]).crossing_fraction for table in (runs, rank_order))
    return (100 * (crossing / reference - 1)).dropna()


def _reductions(axes: Axes, flat: pd.DataFrame, other: pd.DataFrame) -> None:
    for _, runs, style in by_method(flat)[1:]:
        change = reduction(runs, flat[flat.method == "contiguous"])
        marks.points(axes, change.groupby("gpus"), linewidth=1, **style)
    ours, rank_order = (other[other.method == method] for method in ("affinity", "contiguous"))
    if len(ours) and len(rank_order):
        name = f"our search, {other.routing.iloc[0].split(' top-')[0]}"
        style = {"label": name, "linewidth": 1, "color": PALETTE[2], "marker": "v"}
        marks.points(axes, reduction(ours, rank_order).groupby("gpus"), **style)
    published = base.paper("EX-F8")
    style = {"color": "black", "marker": "D", "mfc": "white", "linestyle": ":", "linewidth": 1}
    name = f"paper, {published[0].label.split(',')[0]}"
    axes.plot([p.x for p in published], [p.value for p in published], label=name, **style)
    marks.log_axis(axes.xaxis, [2, 4, 8, 16, 32])
    axes.set(xlabel="GPUs", ylabel="crossings against rank order (%)", ylim=(None, 5))
    axes.axhline(0, color="grey", linewidth=0.8)


def exflow_load(data: Data, *, trace: str = TRACE) -> Drawing:
    """Hops against the load of a layer's busiest GPU, also of placements under a limit on load."""
    flat = data.runs("exflow_placement", trace=trace, **ONE_NODE)
    fig, axes = plt.subplots(figsize=(7, 4.4))
    for name, runs, style in by_method(flat):
        axes.plot(runs.max_load, runs.hops_per_token, linestyle="", markersize=4, alpha=0.4, mec="none", **style)
        medians = runs.groupby("gpus")[["max_load", "hops_per_token"]].median()
        axes.plot(medians.max_load, medians.hops_per_token, linewidth=1, markersize=8, label=name, **style)
        for gpus, load, hops in medians.itertuples():
            marks.note(axes, f"{gpus}", load, hops, 5, -12, fontsize=8, color=style["color"])
    limited = data.runs("exflow_placement", trace=trace).query("max_load_limit > 0").sort_values("max_load_limit")
    for gpus, runs in limited.groupby("gpus"):
        name = f"our search with a limit on load, {gpus} GPUs"
        axes.plot(runs.max_load, runs.hops_per_token, "--", label=name, markersize=6, **marks.look(2))
        for run in runs.itertuples():
            marks.note(axes, f"≤ {run.max_load_limit:g}", run.max_load, run.hops_per_token, 4, 5, color=PALETTE[2])
    transitions = round((flat.hops_per_token / flat.crossing_fraction).median())
    axes.set(xlim=(1, None), ylim=(0, transitions), ylabel=f"hops per token ({transitions} transitions)")
    axes.set_xlabel("load of a layer's busiest GPU ÷ even share")
    axes.set_title("numbers at the marks: GPUs", fontsize=9)
    fig.legend(ncols=2, **ABOVE)
    return Drawing(fig, "measured", f"{flat.routing.iloc[0]}. Small marks: seeds; large: medians.")


def exflow_copies(data: Data, *, trace: str = TRACE) -> Drawing:
    """What copies of experts save in hops and load (top-1), and the GPUs that a whole token visits (top-4)."""
    one, several = (data.runs("exflow_serving", trace=trace, top_k=top_k) for top_k in (1, 4))
    fig, (hops, load, visits) = plt.subplots(1, 3, figsize=(11, 4), width_ratios=[1, 1, 1.25])
    kinds = [(method, aim) for method in ("contiguous", "affinity") for aim in ("hops", "load")]
    for index, (method, aim) in enumerate(kinds):
        runs = one[(one.method == method) & ((one.copies_for == aim) | (one.extra_slots == 0))].groupby("extra_slots")
        name = f"{METHODS[method][0].split(',')[0]}, copies for {aim}"
        marks.points(hops, runs.hops_per_token, label=name, markersize=5, **marks.look(index))
        marks.points(load, runs.max_load, markersize=5, **marks.look(index))
    hops.set(ylabel="hops per token", ylim=(0, None))
    load.set(ylabel="busiest GPU's load ÷ even share", ylim=(1, None))
    for axes in (hops, load):
        axes.set(xlabel="slots for copies, per GPU and layer", xticks=sorted(one.extra_slots.unique()))
    placed = [("contiguous", "hops"), ("affinity", "hops"), ("affinity", "new_gpus"), ("affinity", "gpus")]
    for x, (method, objective) in enumerate(placed):
        runs = several[(several.method == method) & (several.objective == objective)]
        for shift, column, fill in ((-0.2, "gpus_visited", "none"), (0.2, "new_gpus", PALETTE[0])):
            if len(runs):
                marks.bar(visits, x + shift, runs[column], ".2f", width=0.38, color=fill, edgecolor=PALETTE[0])
    names = ["rank order", "our search,\npairs", "whole tokens,\nnew GPUs", "whole tokens,\nall GPUs"]
    visits.set_xticks(range(len(placed)), names, fontsize=7)
    visits.set(ylabel="GPUs per token and layer, top-4")
    visits.set_title("open: visited; filled: not on before", fontsize=9)
    visits.grid(axis="x", visible=False)
    fig.legend(ncols=2, **ABOVE)
    caption = f"{one.routing.iloc[0]}, right top-4. {one.gpus.iloc[0]} GPUs in nodes of {one.gpus_per_node.iloc[0]},"
    caption += " counted, not run. Medians over seeds, interval where there are several."
    return Drawing(fig, "measured", caption)


# --- fewer tokens, other texts -------------------------------------------------------------------------------------


def counted(runs: pd.DataFrame) -> pd.DataFrame:
    """With `tokens`: how many each placement was computed from (all: their median over seeds). Only numbers of GPUs for
    which fewer than all were tried."""
    runs = runs[runs.gpus.isin(runs.gpus[runs.train_tokens > 0])]
    everything = runs.tokens_used[runs.train_tokens == 0].astype(int).median()
    return runs.assign(tokens=runs.train_tokens.where(runs.train_tokens > 0, everything))


def exflow_tokens(data: Data, *, trace: str = TRACE) -> Drawing:
    """Crossings of a placement over the tokens it was computed from: on these tokens, and on held-out sequences."""
    placements = data.runs("exflow_placement", trace=trace, gpus_per_node=0, **PLAIN)
    few = counted(placements[placements.method == "affinity"])
    if few.empty:
        raise NothingToShow("No run with fewer training tokens.")
    fig, axes = plt.subplots(figsize=(7, 4))
    axes.axvspan(1000, 3000, color="#bbbbbb", alpha=0.4, label="enough, says the paper")
    for i, (gpus, runs) in enumerate(few.groupby("gpus")):
        tokens = runs.groupby("tokens")
        held_out = {**marks.look(i), "label": f"{gpus} GPUs, held-out sequences", "markersize": 5}
        own = held_out | {"label": f"{gpus} GPUs, the tokens placed by", "marker": marks.look(i + 1)["marker"]}
        marks.points(axes, tokens.crossing_fraction, **held_out)
        marks.points(axes, tokens.train_crossing_fraction, "--", **own)
        rank_order = placements.query("method == 'contiguous' and train_tokens == 0 and gpus == @gpus")
        crossing = rank_order.crossing_fraction.median()
        axes.axhline(crossing, color=PALETTE[5], linestyle=":", label=f"rank order, {gpus} GPUs: {crossing:.2f}")
    axes.set_xscale("log")
    axes.set(xlabel="tokens that the placement was computed from", ylabel="transitions that cross GPUs", ylim=(0, None))
    fig.legend(ncols=2, **ABOVE)
    caption = f"{few.routing.iloc[0]}. Our search; median, range and values of seeds."
    return Drawing(fig, "measured; grey band: paper", caption)


HOMES = {TRACE: "mmlu", "gpt_moe_16e": "shakespeare", "gpt_moe_16e_shakespeare": "shakespeare"}


def exflow_domains(data: Data, *, homes: dict[str, str] = HOMES, gpus: int = 4) -> Drawing:
    """Share of transitions that stay on their GPU: of other texts, over that of the text which experts were placed by.

    `homes`: trace → the text to place by.
    """
    runs = data.runs("exflow_placement", method="affinity", gpus=gpus)
    stay = 1 - runs.set_index(["trace", "train_domain", "test_domain", "seed"]).crossing_fraction
    shown = {trace: stay[trace, home] for trace, home in homes.items() if (trace, home, home) in stay.index}
    if not shown:
        raise NothingToShow("No run on single domains.")
    widths = [table.index.get_level_values("test_domain").nunique() for table in shown.values()]
    fig, panels = plt.subplots(1, len(shown), figsize=(11, 3.4), squeeze=False, width_ratios=widths)
    for axes, (trace, table) in zip(panels[0], shown.items(), strict=True):
        home = homes[trace]
        kept = (table / table[home]).dropna()  # paired by seed
        order = [home, *sorted(set(kept.index.get_level_values("test_domain")) - {home})]
        axes.axhspan(0.989, 1.005, color="#bbbbbb", alpha=0.6, label="paper, C4, Dolma, Yelp")
        for x, domain in enumerate(order):
            value = marks.point(axes, x, kept[domain], **marks.look(0))
            marks.note(axes, f"{value:.3f}\n({table[domain].median():.2f} stay)", x, value, 6, 4)
        axes.set_xticks(range(len(order)), order)
        axes.set_xlim(-0.4, len(order) - 0.3)
        axes.set_ylabel(f"share that stays ÷ that on {home}", fontsize=8)
        axes.set_title(f"{trace},\nplaced by {home}, {gpus} GPUs", fontsize=8)
        axes.margins(y=0.25)
        axes.legend(fontsize=7, loc="lower left")
    return Drawing(fig, "measured; grey band: paper", "Held-out sequences; median, range and values of seeds.")


# --- training and decoding of small GPT-MoEs -------------------------------------------------------------------------


def exflow_training(data: Data, *, text: str = "both") -> Drawing:
    """Affinity and the busiest expert's load over training, of the longest runs on `text`."""
    runs = data.runs("moe_train", text=text)
    runs = runs[runs.iterations == runs.iterations.max()]
    table = base.series(runs).query("domain == @text and iteration > 0")
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.9), width_ratios=[1.4, 1])
    for index, (experts, mine) in enumerate(table.groupby("experts")):
        medians = mine.groupby("iteration")[["stay", "stay_shuffled", "busiest"]].median()
        left.plot(medians.stay, label=f"{experts} experts", markersize=4, **marks.look(index))
        left.plot(medians.stay_shuffled, ":", color=PALETTE[index])
        right.plot(medians.busiest, markersize=4, **marks.look(index))
    for axes, name in ((left, "share that stays (one expert a GPU)"), (right, "busiest expert ÷ even share")):
        axes.axvspan(1, 200, color="#bbbbbb", alpha=0.25)
        axes.axvspan(200, 2000, color="#dddddd", alpha=0.25)
        axes.set(xlabel="iteration", ylabel=name, xscale="log", xlim=(8, None))
    left.set_ylim(0, None)
    left.plot([], [], ":", color="black", label="tokens shuffled")
    fig.legend(ncols=5, **ABOVE)
    sizes = ", ".join(f"{size / 1e6:.1f}" for size in runs.groupby("experts").parameters.first())
    caption = f"{sizes} million parameters. Grey: iterations 0-200 and 200-2,000 of the paper's Fig. 12."
    return Drawing(fig, "measured", f"{caption} Medians over seeds.")


def exflow_decode(data: Data, *, experts: int = 16, requests: int = 128, cluster_mbit_s: float = 25) -> Drawing:
    """Parts of an iteration, throughput and bytes of each system that decodes one model with trained weights."""
    same = {"experts": experts, "requests": requests, "cluster_mbit_s": cluster_mbit_s}
    runs = data.runs("moe_decode", weights="trained", **same)
    systems = dict(list(runs.groupby(["system", "keys_values", "placement"])))
    shown = [kind for kind in SYSTEMS if kind in systems]
    if not shown:
        raise NothingToShow(f"No record of one of the systems with {experts} experts.")
    fig, (left, center, right) = plt.subplots(1, 3, figsize=(11, 4.2), width_ratios=[1.5, 1, 1])
    bottom = np.zeros(len(shown))
    for index, (name, metrics) in enumerate(PARTS.items()):
        present = runs.columns.intersection(metrics)
        heights = [1e3 * systems[kind][present].median().sum() for kind in shown]
        style = {"color": PALETTE[index], "hatch": HATCHES[index], "edgecolor": "white"}
        left.bar(range(len(shown)), heights, bottom=bottom, label=name, **style)
        bottom += heights
    for x, kind in enumerate(shown):
        marks.bar(center, x, systems[kind].tokens_per_s, ",.0f", color=PALETTE[0])
        marks.bar(right, x, 1e-6 * systems[kind].bytes, ".1f", color=PALETTE[0])
    for axes, name in ((left, "ms per iteration"), (center, "tokens/s"), (right, "MB sent per iteration, all ranks")):
        axes.set_xticks(range(len(shown)), [SYSTEMS[kind] for kind in shown], fontsize=7, rotation=30)
        axes.set_ylabel(name)
        axes.grid(axis="x", visible=False)
    fig.legend(ncols=5, **ABOVE)
    ranks = (runs.nodes * runs.packages * runs.gcds).iloc[0]
    caption = f"{experts} experts, {ranks} ranks, network {runs.fabric.iloc[0]}."
    caption += " Medians over repeats, range and values where there are several."
    return Drawing(fig, ", ".join(sorted(set(runs.evidence))), caption)

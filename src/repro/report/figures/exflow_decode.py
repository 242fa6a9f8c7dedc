"""Training and decoding of small GPT-MoEs, and what each of ExFlow's changes gives over DeepSpeed-MoE: padding away, one
all-to-all, placement; or all of it and K/V."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.claims.sample import Sample
from repro.report.figures import marks
from repro.report.figures.base import HATCHES, PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow, paper, series

KIND = ("system", "keys_values", "placement")  # what tells the systems of the figures apart
_PLACED, _SENT = 3, 4  # which of the steps is all that ExFlow does, without and with keys and values
# From one to the next of SYSTEMS: "no padding" also replaces DeepSpeed's gate, "one all-to-all" also shares K/V.
STEPS = ("DeepSpeed", "no\npadding,\nour gate", "one\nall-to-all", "placed", "K/V\nsent")
SYSTEMS = {
    ("deepspeed", "gathered", "contiguous"): "DeepSpeed's layers",
    ("two_all_to_alls", "gathered", "contiguous"): "two all-to-alls,\nnothing padded",
    ("coherent", "shared", "contiguous"): "one all-to-all,\nids only",
    ("coherent", "shared", "affinity"): "one all-to-all,\nids only, placed",
    ("coherent", "gathered", "affinity"): "one all-to-all,\nK/V sent, placed",
}
BEYOND = {  # not of the paper: what servers do, and ours
    ("two_all_to_alls", "gathered", "eplb"): "two all-to-alls, EPLB's copies (beyond the paper)",
    ("two_all_to_alls", "gathered", "joint"): "two all-to-alls, our copies (beyond the paper)",
    ("coherent", "shared", "eplb"): "one all-to-all, ids only, EPLB's copies (beyond the paper)",
    ("coherent", "shared", "joint"): "one all-to-all, ids only, our copies (beyond the paper)",
}
PARTS = {  # of an iteration: the metrics of moe_decode that belong to it
    "attention": ["seconds_attention"],
    "gate, experts, head": ["seconds_gate", "seconds_expert", "seconds_head", "seconds_other"],
    "all-to-all": ["seconds_all_to_all", "seconds_all_to_all_parts"],
    "all-gather of ids": ["seconds_all_gather"],
    "all-gather of K/V": ["seconds_all_gather_kv"],
}
SHAPE = ["nodes", "packages", "gcds"]
SETTING = ["weights", "experts", *SHAPE, "cluster_mbit_s"]  # of a panel
SAME = {"requests": 128}
LARGER = "a larger model, on a GPU"
CLAIMED = {"small models, on a CPU": ("EX-F12.a", "EX-F12.b"), LARGER: ("EX-F12.c", "EX-F12.d")}  # early, late
_PAPER = {16: "EX-E2E.b", 32: "EX-E2E.c", 8: "EX-E2E.d"}  # throughput over DeepSpeed-MoE's, by experts


def exflow_training(data: Data, *, text: str = "both") -> Drawing:
    """Affinity and the busiest expert's load over training: of the seeds that the claims read, and of the longest runs on
    `text`."""
    known = data.runs("moe_train", text=text)
    claimed = {name: _claimed(data, known, claims) for name, claims in CLAIMED.items()}
    others = known.drop(claimed[LARGER].index)
    runs = others[others.iterations == others.iterations.max()]
    if (longest := max([*runs.iterations, *claimed[LARGER].iterations])) < 200:
        raise NothingToShow(f"The longest run has {longest} iterations: too few for a curve.")
    data.only(runs, *claimed.values())
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 4.6), width_ratios=[1.4, 1])
    for index, (experts, mine) in enumerate(_curves(runs, text).groupby("experts")):
        medians = mine.groupby("iteration")[["stay", "stay_shuffled", "busiest"]].median()
        left.plot(medians.stay, label=f"{experts} experts", markersize=3, alpha=0.6, **marks.look(index))
        left.plot(medians.stay_shuffled, ":", color=PALETTE[index], alpha=0.6)
        right.plot(medians.busiest, markersize=3, alpha=0.6, **marks.look(index))
    for (name, mine), line in zip(claimed.items(), ("-", "--"), strict=True):
        style = {"color": "black", "linestyle": line, "linewidth": 1.8}
        for _, seed in _curves(mine, text).groupby("seed"):
            left.plot(seed.iteration, seed.stay, **style)
            right.plot(seed.iteration, seed.busiest, **style)
        if len(mine):
            left.plot([], [], label=name, **style)
    for axes, name in ((left, "share that stays (one expert a GPU)"), (right, "busiest expert ÷ even share")):
        axes.axvspan(1, 200, color="#bbbbbb", alpha=0.25)
        axes.axvspan(200, 2000, color="#dddddd", alpha=0.25)
        axes.set(xlabel="iteration (log scale)", ylabel=name, xscale="log", xlim=(8, None))
    left.set_ylim(0, None)
    left.plot([], [], ":", color="black", label="tokens shuffled")
    fig.legend(ncols=4, **marks.ABOVE)
    caption = [_of_others(runs), "Grey: iterations 0-200 and 200-2,000 of the paper's Fig. 12."]
    caption += [_of_claimed(data, name, mine) for name, mine in claimed.items() if len(mine)]
    return Drawing(fig, "measured", " ".join(filter(None, caption)))


def _claimed(data: Data, known: pd.DataFrame, claims: tuple[str, ...]) -> pd.DataFrame:
    """Those of `known` that these claims read; none where one of them has no value."""
    samples = [data.of_claim(claim) for claim in claims]
    return known[known.path.isin([path for sample in samples if all(samples) for path in sample.runs])]


def _of_claimed(data: Data, name: str, runs: pd.DataFrame) -> str:
    early, late = (marks.said(sample) for claim in CLAIMED[name] if (sample := data.of_claim(claim)))
    seeds = ", ".join(map(str, sorted(set(runs.seed))))
    stays = _curves(runs, runs.text.iloc[0]).groupby("iteration").stay.mean()
    return (
        f"Black, {name}: {runs.parameters.iloc[0] / 1e6:.3g} million parameters, {runs.experts.iloc[0]} experts, seeds "
        f"{seeds}. After 200 iterations the share that stays is {early} times that after 2,000; at the end it is "
        f"{late} times that after 2,000. No claim covers its start: its mean over seeds is {stays.iloc[0]:.2g} "
        f"after {stays.index[0]:g} iterations, and at most {stays.max():.2g} (after {stays.idxmax():g})."
    )


def _of_others(runs: pd.DataFrame) -> str:
    if not len(runs):
        return ""
    sizes = ", ".join(f"{size / 1e6:.1f}" for size in runs.groupby("experts").parameters.first())
    seeds = runs.groupby("experts").seed.nunique().max()
    return (
        f"In colours: {sizes} million parameters, {f'medians of up to {seeds} seeds' if seeds > 1 else 'one run each'}."
    )


def _curves(runs: pd.DataFrame, text: str) -> pd.DataFrame:
    """Points of the runs' curves, on the text that they were trained on."""
    return series(runs).query("domain == @text and iteration > 0") if len(runs) else runs


def exflow_decode(data: Data, *, experts: int = 16, requests: int = 128, cluster_mbit_s: float = 25) -> Drawing:
    """Parts of an iteration, throughput and bytes of each system that decodes one model with trained weights, on the shape
    of machine that most systems ran on."""
    same = {"experts": experts, "requests": requests, "cluster_mbit_s": cluster_mbit_s}
    same |= _shape(data.runs("moe_decode", weights="trained", **same))
    runs = data.runs("moe_decode", weights="trained", **same)
    systems = dict(list(runs.groupby([*KIND])))
    shown = [kind for kind in SYSTEMS if kind in systems]
    data.only(*(systems[kind] for kind in shown))
    fig, (left, center, right) = plt.subplots(1, 3, figsize=(10, 0.55 * len(shown) + 1.6), width_ratios=[1.5, 1, 1])
    bottom = np.zeros(len(shown))
    for index, (name, metrics) in enumerate(PARTS.items()):
        present = runs.columns.intersection(metrics)
        heights = [1e3 * systems[kind][present].median().sum() for kind in shown]
        style = {"color": PALETTE[index], "hatch": HATCHES[index], "edgecolor": "white"}
        left.barh(range(len(shown)), heights, left=bottom, label=name, **style)
        bottom += heights
    for y, kind in enumerate(shown):
        marks.bar(center, y, systems[kind].tokens_per_s, ",.0f", across=True, color="#999999")  # of no part's colour
        marks.bar(right, y, 1e-6 * systems[kind].bytes, ".1f", across=True, color="#999999")
    for axes, name in ((left, "ms per iteration"), (center, "tokens/s"), (right, "MB sent per iteration")):
        marks.rows(axes, [SYSTEMS[kind] for kind in shown] if axes is left else [""] * len(shown), fontsize=8)
        axes.set_xlabel(name)
    for axes in (center, right):
        axes.margins(x=0.28)
    fig.legend(ncols=5, **marks.ABOVE)
    ranks = same["nodes"] * same["packages"] * same["gcds"]
    caption = f"{experts} experts, {ranks} processes on one machine, network {runs.fabric.iloc[0]}. Medians, with "
    caption += "range and values of the runs. Left: iterations in which all ranks synchronise before each exchange; "
    caption += "they take longer than those of the throughput, whose ranks run freely. K/V: keys and values. "
    caption += f"{_less_routing(data, same)}"
    return Drawing(fig, ", ".join(sorted(set(runs.evidence))), caption.strip())


def _shape(runs: pd.DataFrame) -> dict[str, int]:
    """Nodes, packages and GCDs that most systems of the figure ran on; of equals the most."""
    kinds = pd.Series(list(zip(*(runs[name] for name in KIND), strict=True)), runs.index)
    counts = kinds[kinds.isin(SYSTEMS)].groupby([runs[name] for name in SHAPE]).nunique()
    if counts.empty:
        raise NothingToShow("No record of one of the systems of this figure.")
    return dict(zip(SHAPE, counts[::-1].idxmax(), strict=True))


def _less_routing(data: Data, same: dict[str, Any]) -> str:
    """Time of exchanges saved by one all-to-all and placement, as the claims read it."""
    first, unpadded, *_, placed, sent = [dict(zip(KIND, kind, strict=True)) for kind in SYSTEMS]
    asked = {"placed, ids only, against DeepSpeed's": (placed, first), "against two all-to-alls": (placed, unpadded)}
    asked["placed, K/V sent, against DeepSpeed's"] = (sent, first)
    told = []
    for name, (ours, over) in asked.items():
        how = {"over": over, "form": "reduction", "sampled": "occasions"}
        if sample := data.sample("moe_decode", "routing_seconds", {**same, **ours}, **how):
            longer = " (below 0: they take longer)" if sample.value < 0 else ""
            told.append(f"{name}: {marks.said(sample)}{longer}")
    faster = data.sample("moe_decode", "tokens_per_s", {**same, **placed}, over=unpadded, sampled="occasions")
    words = f" Throughput placed, ids only ÷ with two all-to-alls: {marks.said(faster)}." if faster else ""
    if others := marks.of_claims(data, {"EX-E2E.q": "6.25 Mbit/s", "EX-E2E.r": "100 Mbit/s"}):
        words += f" The same of 16 experts at other rates between nodes: {others}."
    if volume := marks.of_claims(data, {"EX-T1.a": "ids only", "EX-T1.b": "K/V sent"}):
        words += f" Bytes sent with 16 experts, two all-to-alls ÷ one, placed: {volume}."
    return f"Share of routing time saved: {'; '.join(told)}.{words}" if told else words.strip()


def against_deepspeed(data: Data, setting: Mapping[str, Any], metric: str) -> dict[int, Sample]:
    """By step of `STEPS`: how many times shorter `metric` is than with DeepSpeed's layers, as the claims read it: pairs of
    runs of the same repeat and occasion, their mean logarithm by occasion, and its interval. Steps without a pair are
    left out."""
    return {at: sample for at in range(1, len(STEPS)) if (sample := one_step(data, setting, metric, 0, at))}


def one_step(data: Data, setting: Mapping[str, Any], metric: str, before: int, at: int) -> Sample | None:
    """How many times shorter `metric` is after step `at` of `STEPS` than after step `before`, of pairs of these two."""
    slow, fast = (dict(zip(KIND, list(SYSTEMS)[number], strict=True)) for number in (before, at))
    return data.sample("moe_decode", metric, {**SAME, **setting, **slow}, over=fast, sampled="occasions")


def exflow_gain(
    data: Data, *, metric: Literal["iteration_seconds", "routing_seconds"] = "iteration_seconds"
) -> Drawing:
    """How many times faster than DeepSpeed's layers each step to ExFlow is, for every model and rate.

    `metric`: iteration_seconds, or routing_seconds for the exchanges alone.
    """
    runs = data.runs("moe_decode", **SAME, placement=sorted({placement for *_, placement in SYSTEMS}))
    if (runs.weights == "trained").any():  # on clusters all are random
        runs = runs[runs.weights == "trained"]
    settings = [dict(zip(SETTING, values, strict=True)) for values, _ in runs.groupby(SETTING)]
    found = [(setting, against_deepspeed(data, setting, metric)) for setting in settings]
    groups = [(setting, steps) for setting, steps in found if steps.keys() & {_PLACED, _SENT}]
    if not groups:
        raise NothingToShow("No occasion of moe_decode has DeepSpeed's layers and placed experts.")
    drawn = {path for _, steps in groups for sample in steps.values() for path in sample.runs}
    data.only(runs[runs.path.isin(drawn)])
    fig, panels = marks.grid(len(groups), 3, (3.2, 3.6), (0.6, 0), least=7, sharey=True)
    for axes, (setting, steps) in zip(panels.flat, groups, strict=False):
        _steps(axes, steps, partial(one_step, data, setting, metric))
        if metric == "iteration_seconds" and setting["experts"] in _PAPER:
            (value,) = (number.value for number in paper(_PAPER[setting["experts"]]))
            axes.axhline(value, color="black", linestyle=":", linewidth=1)
            marks.note(axes, f"paper {value:g}", -0.45, value, dy=2, fontsize=7.5)
        ranks = setting["nodes"] * setting["packages"] * setting["gcds"]
        counts = [len(sample.values) for sample in steps.values()]
        pairs = f"{marks.span(counts)} pair{'s' * (max(counts) > 1)} a step"
        networks = {run.conditions.get("fabric") for sample in steps.values() for run in sample.runs.values()}
        rate = f", {setting['cluster_mbit_s']:g} Mbit/s" if networks == {"shaped"} else ""
        title = f"{setting['experts']} experts, {ranks} ranks{rate}\n{pairs}"
        axes.set_title(title, fontsize=9)
        there = [0, *steps]
        axes.set_xticks(there, [STEPS[at] for at in there], fontsize=7.5)
    drawn_times = [time for _, steps in groups for sample in steps.values() for time in sample.values]
    low, high = 0.6 * min(1, *drawn_times), 2 * max(1, *drawn_times)
    for axes in panels[:, 0]:
        axes.set_ylim(low, high)
        marks.log_axis(axes.yaxis, marks.round_ticks(low, high))
        axes.set_ylabel("times as fast")
    what = "An iteration" if metric == "iteration_seconds" else "Routing time of an iteration"
    caption = f"{what}: time with DeepSpeed's layers ÷ time with all changes up to the step (the first is no padding, "
    caption += "and our gate). Dots: pairs of runs of one occasion. Marks: their geometric mean, with its 95 % interval where there are as many "
    caption += "occasions as a verdict takes. × at a step: its speedup over the step drawn before it, from pairs "
    caption += "of these two; where numbers of pairs differ, the factors need not multiply to the whole. In a panel of one step no pair of the others "
    caption += "is of one occasion. Dashed: new keys and values "
    caption += "(K/V) are sent to all ranks too, which the paper's accounting leaves out. Dotted: the paper's "
    caption += "throughput ÷ DeepSpeed-MoE's. Settings without such pairs are left out. "
    caption += f"Network {', '.join(sorted(set(runs.fabric)))}."
    return Drawing(fig, ", ".join(sorted(set(runs.evidence))), caption)


def _steps(axes: Axes, steps: Mapping[int, Sample], alone: Callable[[int, int], Sample | None]) -> None:
    """Times as fast as DeepSpeed after each step; beside a step what it alone gives over the one drawn before."""
    values = {0: 1.0} | {at: sample.value for at, sample in steps.items()}
    from_here = max(at for at in values if at < _SENT)
    for places, index, line in (([0, 1, 2, 3], 0, "-"), ([from_here, _SENT], 3, "--")):
        look = {**marks.look(index), "markersize": 5}
        there = [at for at in places if at in values]
        axes.plot(there, [values[at] for at in there], line, linewidth=1.5, color=look["color"])
        for before, at in pairwise(there):
            marks.point(axes, at, steps[at], **look)
            high = max(values[at], *steps[at].values, *(end for end in steps[at].interval if np.isfinite(end)))
            last = at == _SENT  # its line comes from the left
            place = {"dx": 7, "va": "center"} if last else {"dy": 5, "ha": "center", "va": "bottom"}
            if step := alone(before, at):
                marks.note(axes, f"×{step.value:.2f}", at, values[at] if last else high, bbox=marks.CLEAR, **place)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlim(-0.5, max(steps) + (1 if _SENT in steps else 0.5))

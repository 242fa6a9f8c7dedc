"""How long a step takes: by plan, network and levels."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.claims.sample import Sample
from repro.experiments.zero_train import CHANGES
from repro.report.figures.base import HATCHES, PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow, paper
from repro.report.figures.marks import ABOVE, CLEAR, log_axis, point, round_ticks, rows, said, span
from repro.report.figures.zero.marks import TICK_MARK, color, families, look, note, times
from repro.report.figures.zero.runs import (
    FIELDS,
    MEASURED,
    PLANS,
    PREDICTED,
    STATE,
    PlanName,
    Training,
    micro_batches,
    predicted_gain,
    present,
)

RIVALS = ("zero3", "zeropp")
_BATCHES = [
    {"color": shade, "marker": marker} for shade, marker in zip(("#222222", "#777777", "#aaaaaa"), "v^<", strict=True)
]
_OTHER_PAIRS = [("zeropp", "zero3"), ("hierarchical_fp", "zero3")]  # of claims
_PLACES = {"package": "the pair", "node": "the node", "cluster": "all ranks"}


def zero_step_time(
    data: Data,
    *,
    plan: PlanName = "hierarchical",
    rivals: Sequence[PlanName] = RIVALS,
    plans: Sequence[PlanName] = tuple(PLANS),
) -> Drawing:
    """Time of a step of some plans, measured and predicted, with one micro-batch and with several; and how many times
    faster `plan` is than `rivals`, beside the paper's ratios."""
    training = Training(data.runs("zero_train"))
    by_count = {count: training.like(accumulation=count) for count in training.batches}
    by_count = {count: runs[runs.plan.isin(plans)] for count, runs in by_count.items() if runs.plan.nunique() > 1}
    if not by_count:
        raise NothingToShow("Runs of one plan only.")
    data.only(*by_count.values())
    every = pd.concat(by_count.values())
    pairs = list(dict.fromkeys([*((plan, rival) for rival in rivals), *_OTHER_PAIRS]))
    found = {(pair, count): faster(data, runs, *pair[::-1]) for pair in pairs for count, runs in by_count.items()}
    compared = [pair for pair in pairs if any(found[pair, count] for count in by_count)]
    panels = len(by_count) + bool(compared)
    size = (4.4 * panels - 3.4 * (panels > 2), 0.25 * max(len(present(every)), 8) + 2.2)
    fig, axes = plt.subplots(1, panels, figsize=size, squeeze=False)
    for panel, (count, runs) in zip(axes[0], by_count.items(), strict=False):
        times(panel, [(PLANS[name], name, runs[runs.plan == name]) for name in present(runs)])
        panel.tick_params(axis="y", labelsize=8)
        panel.set_title(f"{micro_batches(count)} per step", fontsize=10)
        panel.set_xlim(0.8 * np.nanmin(runs[[MEASURED, PREDICTED]]), 2.2 * runs[MEASURED].max())
        log_axis(panel.xaxis, round_ticks(*panel.get_xlim()))
    for i, (count, runs) in enumerate(by_count.items() if compared else ()):
        samples = {y: found[pair, count] for y, pair in enumerate(compared)}
        _gains(axes[0, -1], i, runs, compared, samples)
        axes[0, -1].plot([], [], label=f"{training.evidence}, {micro_batches(count)}", linestyle="", **_BATCHES[i])
    if compared:
        _published(axes[0, -1], compared)
    families(axes[0, 0], set(every.plan))
    fig.legend(*axes[0, 0].get_legend_handles_labels(), ncols=6, **ABOVE)
    caption = f"{training.size()}, {training.network}. {training.repeats} Black tick: predicted, joined by dots. The "
    caption += f"time axis is logarithmic.{training.best(every)}{training.libraries(every)}"
    if compared:
        caption += " Right: pairs of runs of the same occasion (dots), their mean (mark), and its 95 % interval "
        caption += "where there are as many occasions as a verdict takes; plans without such a pair are not compared. "
        caption += f"Crosses: the paper, 20 billion parameters on 384 GCDs; {PLANS['hierarchical']} ÷ {PLANS['zero3']} "
        caption += "is the product of its two other numbers."
    return Drawing(fig, f"{training.evidence}; ticks: modelled; crosses: paper", caption)


def faster(data: Data, runs: pd.DataFrame, slow: str, fast: str) -> Sample | None:
    """How many times faster plan `fast` is than `slow`, as the claims read it: pairs of runs of one occasion."""
    return paired(data, runs[runs.plan == slow], runs[runs.plan == fast])


def paired(data: Data, slow: pd.DataFrame, fast: pd.DataFrame) -> Sample | None:
    """Step of runs of one point over that of another, with the number of steps that most pairs of runs have, the usual
    one of several."""
    counts = {steps: min(len(slow[slow.steps == steps]), sum(fast.steps == steps)) for steps in slow.steps.unique()}
    steps = max(counts, key=lambda each: (counts[each], each == FIELDS["steps"]), default=None)
    if not steps or not counts[steps]:
        return None
    return data.ratio("zero_train", MEASURED, *(side[side.steps == steps].iloc[0] for side in (slow, fast)))


def _gains(
    axes: Axes, i: int, runs: pd.DataFrame, compared: Sequence[tuple[str, str]], samples: Mapping[int, Sample | None]
) -> None:
    """A mark and a tick per pair of plans: how many times faster the first is, measured and predicted."""
    for y, (plan, rival) in enumerate(compared):
        if sample := samples[y]:
            at = y + 0.27 * (i - 1)
            value = point(axes, at, sample, across=True, markersize=6, **_BATCHES[i])
            predicted = predicted_gain(runs, rival, plan)
            axes.plot(predicted, at, "|", **TICK_MARK)
            ends = [value, predicted, *sample.values, *(end for end in sample.interval if np.isfinite(end))]
            note(axes, f"{value:.2f}", np.nanmax(ends), at, "right")


def _published(axes: Axes, compared: Sequence[tuple[str, str]]) -> None:
    """The paper's ratios, a row below ours; names of the rows, and the legend."""
    published = {number.label: number.value for number in paper("ZT-1")}  # times faster than ZeRO-3
    for y, pair in enumerate(compared):
        fast, slow = (published.get(PLANS[plan]) for plan in pair)
        if fast and slow:
            axes.plot(fast / slow, y + 0.27, "kx", markersize=7)
            note(axes, f"{fast / slow:.2f}", fast / slow, y + 0.27, "right")
    axes.plot([], [], "kx", markersize=7, label="paper")
    axes.plot([], [], "|", label="predicted", **TICK_MARK)
    axes.axvline(1, color="grey", linewidth=1)
    rows(axes, [f"{PLANS[plan]}\n÷ {PLANS[rival]}".replace(", ", ",\n") for plan, rival in compared], fontsize=8)
    axes.set(xlabel="times as fast", xlim=(0, 1.15 * axes.get_xlim()[1]))
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2, fontsize=7.5, frameon=False, columnspacing=1)


def zero_rates(data: Data, *, plan: PlanName = "hierarchical", rivals: Sequence[PlanName] = RIVALS) -> Drawing:
    """How many times faster `plan` is than `rivals`, over the rate between nodes (left); and how many times faster
    plans are than ZeRO-3 with levels and without (right). Dotted and ticks: predicted."""
    training = Training(data.runs("zero_train"))
    if training.setting["fabric"] != "shaped":
        raise NothingToShow("No run on a network of given rates.")
    swept = training.like(cluster_mbit_s=..., accumulation=...)
    flat = training.like(package_ratio=1, node_ratio=1, cluster_mbit_s=...)
    rate = flat.groupby("cluster_mbit_s").plan.nunique()[::-1].idxmax() if len(flat) else 0
    flat = flat[flat.cluster_mbit_s == rate]
    several = {count: runs for count, runs in swept.groupby("accumulation") if runs.cluster_mbit_s.nunique() > 1}
    several = {count: runs for count, runs in several.items() if {plan} & set(runs.plan) and {*rivals} & set(runs.plan)}
    without = {plan: faster(data, flat, "zero3", plan) for plan in ("zeropp", "hierarchical_fp", "hierarchical")}
    panels = [bool(several), any(without.values())]
    if not any(panels):
        raise NothingToShow("Runs with one rate and one ratio of levels only.")
    data.only(*several.values(), flat, training.like())
    shape = {"figsize": (9.5 if all(panels) else 5.5, 4.2), "width_ratios": [1.2, 1] if all(panels) else [1]}
    fig, axes = plt.subplots(1, sum(panels), squeeze=False, **shape)
    if several:
        pairs = _over_rates(axes[0, 0], data, several, plan, rivals)
    if panels[1]:
        _without_levels(axes[0, -1], data, training.like(), flat, without)
    caption = f"{training.size()}, {training.network}. Dotted lines and ticks: predicted. Marks and bars: the mean "
    caption += "of pairs of runs of the same occasion; without such a pair nothing is drawn."
    if several:
        caption += f" Pairs by rate: {pairs}."
        caption += " Hollow: several micro-batches per step. The rates of all levels vary together, at fixed ratios."
    if panels[1]:
        told = ", ".join(f"{PLANS[name]} {said(sample)}" for name, sample in without.items() if sample)
        caption += f" Without levels (all links at {rate:g} Mbit/s): {told}."
    return Drawing(fig, f"{training.evidence}; dotted and ticks: modelled", caption)


def _over_rates(
    axes: Axes, data: Data, by_count: Mapping[int, pd.DataFrame], plan: str, rivals: Sequence[PlanName]
) -> str:
    """Returns how many pairs of runs a mark is the mean of: `6.25 Mbit/s 1, 25 Mbit/s 2 to 8`."""
    pairs: dict[float, set[int]] = {}
    for (count, runs), filled in zip(by_count.items(), ("full", "none", "left"), strict=False):
        for rival in rivals:
            samples = {rate: faster(data, at, rival, plan) for rate, at in runs.groupby("cluster_mbit_s")}
            found = {rate: sample.value for rate, sample in samples.items() if sample}
            predicted = {rate: predicted_gain(runs[runs.cluster_mbit_s == rate], rival, plan) for rate in found}
            label = f"as {PLANS[rival]}, {micro_batches(count)}"
            axes.plot(list(found), list(found.values()), linewidth=1.5, fillstyle=filled, label=label, **look(rival))
            axes.plot(list(found), list(predicted.values()), linestyle=":", color=color(rival), linewidth=1)
            for rate in found:
                pairs.setdefault(rate, set()).add(len(samples[rate].values))
    axes.plot([], [], ":", color="grey", label="predicted")
    rates = {rate for runs in by_count.values() for rate in runs.cluster_mbit_s}
    log_axis(axes.xaxis, sorted(rates))
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(xlabel="rate between nodes per rank (Mbit/s)", ylabel=f"{PLANS[plan]}: times as fast", ylim=(0, None))
    axes.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1.01), frameon=False)
    return ", ".join(f"{rate:g} Mbit/s {span(each)}" for rate, each in sorted(pairs.items()))


def _without_levels(
    axes: Axes, data: Data, levels: pd.DataFrame, flat: pd.DataFrame, without: Mapping[str, Sample | None]
) -> None:
    """How many times faster than ZeRO-3 plans are, on a network with levels and on one without."""
    with_levels = {plan: faster(data, levels, "zero3", plan) for plan in without}
    shown = [plan for plan in without if with_levels[plan] or without[plan]]
    network = levels.iloc[0]
    ratios = f"{network.package_ratio:g} : {network.node_ratio:g} : 1"
    for i, (samples, runs, name) in enumerate(((with_levels, levels, ratios), (without, flat, "all links alike"))):
        style = {"color": PALETTE[i + 3], "hatch": HATCHES[i], "edgecolor": "white"}
        axes.bar(0, 0, label=name, **style)
        for x, plan in enumerate(shown):
            if sample := samples[plan]:
                at, predicted = x + 0.26 * (i - 0.5), predicted_gain(runs, "zero3", plan)
                axes.bar(at, sample.value, 0.24, **style)
                axes.plot(at, predicted, "_", **TICK_MARK)
                note(axes, f"{sample.value:.2f}", at, np.nanmax([sample.value, predicted]))
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xticks(range(len(shown)), [PLANS[plan].replace(", ", ",\n") for plan in shown])
    axes.set(ylabel="times as fast as ZeRO-3", xlim=(-0.6, max(1, len(shown)) - 0.4))
    axes.margins(y=0.12)
    axes.grid(axis="x", visible=False)
    legend = {"title": "rates of the three levels", "title_fontsize": 8, "frameon": False, "ncols": 2}
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.01), **legend)


def changes(run: pd.Series) -> str:
    """How a run's plan differs from the hierarchical plan as we read it."""
    words = {
        "weights": f"weights over {_PLACES.get(run.weights)}",
        "gradients": f"gradients over {_PLACES.get(run.gradients)}",
        "secondary": f"copy of the weights in {_PLACES.get(run.secondary)}",
        "weight_bits": f"weights as {run.weight_bits} bits",
        "gradient_bits": f"gradients as {run.gradient_bits} bits".replace("16,4,4 bits", "16 bits in the pair, then 4"),
        "reduce_across": "sums across nodes per micro-batch",
    }
    return ",\n".join(words[name] for name in CHANGES if run[name] != FIELDS[name]) or "hierarchical"


def variants(training: Training) -> pd.DataFrame:
    """Runs of the hierarchical plan: unchanged, in 16 bits, with other levels or bits. Column `name`: the `changes`."""
    runs = training.like(accumulation=..., **dict.fromkeys(CHANGES, ...))
    runs = runs[runs.plan.isin(["hierarchical", "hierarchical_fp"])]
    names = ["16 bits everywhere" if run.plan == "hierarchical_fp" else changes(run) for _, run in runs.iterrows()]
    return runs.assign(name=names)


def zero_levels(data: Data) -> Drawing:
    """Time of a step and bytes of state per parameter, of the hierarchical plan with one choice changed at a time."""
    training = Training(data.runs("zero_train"))
    runs = variants(training)
    names = sorted(runs.name.unique(), key=lambda name: (name != "hierarchical", name[:3] == "16 ", name))
    if len(names) < 2:
        raise NothingToShow("No run of the hierarchical plan with other levels or bits.")
    batches = [count for count in training.batches if runs[runs.accumulation == count].name.nunique() > 1]
    if not batches:
        raise NothingToShow("No two runs of the hierarchical plan that differ in one choice only.")
    data.only(runs[runs.accumulation.isin(batches)])
    fig, axes = plt.subplots(
        1, len(batches), figsize=(max(6.5, 5 * len(batches)), 0.34 * len(names) + 1.8), squeeze=False
    )
    for panel, count in zip(axes[0], batches, strict=True):
        mine = runs[runs.accumulation == count]
        there = [name for name in names if name in set(mine.name)]
        times(panel, [(name, "hierarchical", mine[mine.name == name]) for name in there])
        panel.tick_params(axis="y", labelsize=7.5)
        held = (mine[STATE] / mine.parameters).groupby(mine.name).median()
        edge = {"transform": panel.get_yaxis_transform(), "ha": "right", "fontsize": 8, "bbox": CLEAR}
        for y, name in enumerate(there):
            panel.text(0.99, y, f"{held[name]:.1f}", va="center", **edge)
        panel.text(0.99, -0.65, "bytes\nheld", va="bottom", **edge)
        over = {name: paired(data, mine[mine.name == name], mine[mine.name == "hierarchical"]) for name in there[1:]}
        for y, sample in enumerate(over.values(), 1) if any(over.values()) else ():
            panel.text(0.83, y, f"{sample.value:.2f}" if sample else "–", va="center", **edge)
        if any(over.values()):
            panel.text(0.83, -0.65, "÷ un-\nchanged", va="bottom", **edge)
        panel.axvline(mine[mine.name == "hierarchical"][MEASURED].median(), color="grey", linestyle=":", linewidth=1)
        panel.set_title(f"{micro_batches(count)} per step", loc="left", fontsize=10, pad=14)
        panel.set(xlim=(0, 1.9 * mine[MEASURED].max()))
    caption = f"{training.size()}, {training.network}. {training.repeats} Tick: predicted. Dotted, vertical: the plan "
    caption += "unchanged. Columns at the right edge (not times): ÷ unchanged, the step over that of the unchanged "
    caption += "plan, from pairs of runs of the same occasion (–: none); bytes held, of state per parameter on a rank."
    return Drawing(fig, f"{training.evidence}; ticks: modelled", caption)

"""How long a step takes: by plan, network, levels and number of nodes; and how well that is predicted."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.claims.sample import Sample
from repro.experiments.zero_train import CHANGES
from repro.report.figures.base import HATCHES, MARKERS, PALETTE, Data, Drawing, NothingToShow, paper
from repro.report.figures.marks import log_axis, point, round_ticks
from repro.report.figures.zero.marks import TICK_MARK, color, look, note, times
from repro.report.figures.zero.runs import (
    FIELDS,
    MEASURED,
    PLANS,
    PREDICTED,
    STATE,
    PlanName,
    Training,
    gains,
    micro_batches,
    parameters,
    present,
    ratio,
)

_RIVALS = ("zero3", "zeropp")
_OTHER_PAIRS = [("zeropp", "zero3"), ("hierarchical_fp", "zero3")]  # of claims
_PLACES = {"package": "the pair", "node": "the node", "cluster": "all ranks"}
_BOTH = [PREDICTED, MEASURED]
_FAMILIES = {
    "DDP, ZeRO": "zero3",
    "ZeRO++ and its parts": "zeropp",
    "MiCS, HSDP": "mics",
    "hierarchical": "hierarchical",
    "search's best": "best",
}


def zero_step_time(
    data: Data,
    *,
    plan: PlanName = "hierarchical",
    rivals: Sequence[PlanName] = _RIVALS,
    plans: Sequence[PlanName] = tuple(PLANS),
) -> Drawing:
    """Time of a step of some plans, measured and predicted, with one micro-batch and with several; and how many times
    faster `plan` is than `rivals`, beside the paper's ratios."""
    training = Training(data.runs("zero_train"))
    shown = present(training.like(accumulation=...), plans)
    compared = [(plan, rival) for rival in rivals]
    compared += [pair for pair in _OTHER_PAIRS if {*pair} <= set(shown) and pair not in compared]
    width = [1] * len(training.batches) + [0.45 * len(compared) + 0.2]
    fig, axes = plt.subplots(1, len(width), figsize=(11.5, 0.27 * max(len(shown), 8) + 2), width_ratios=width)
    for i, (panel, count) in enumerate(zip(axes, training.batches, strict=False)):
        runs = training.like(accumulation=count)
        times(panel, [(PLANS[name], name, runs[runs.plan == name]) for name in present(runs, plans)])
        panel.tick_params(axis="y", labelsize=7)
        panel.set_title(f"{micro_batches(count)} per step")
        panel.set_xlim(0.8 * np.nanmin(runs[[MEASURED, PREDICTED]]), 1.7 * runs[MEASURED].max())
        log_axis(panel.xaxis, round_ticks(*panel.get_xlim()))
        _gains(axes[-1], i, data, runs, compared)
        label = f"{training.evidence}, {micro_batches(count)}"
        axes[-1].plot([], [], MARKERS[i], color=PALETTE[i + 2], label=label)
    _published(axes[-1], compared)
    caption = f"{training.size()}, {training.network}. Plans that were run. {training.repeats}"
    caption += (
        " Black tick: predicted. Times on a logarithmic axis. Right: pairs of runs of one occasion (dots), their mean, "
    )
    caption += "and its 95 % interval where there are two occasions or more."
    return Drawing(fig, f"{training.evidence}; ticks: modelled; x: paper", caption)


def faster(data: Data, runs: pd.DataFrame, slow: str, fast: str) -> Sample | None:
    """How many times faster plan `fast` is than `slow`, as the claims read it: pairs of runs of one occasion."""
    sides = [runs[runs.plan == plan] for plan in (slow, fast)]
    common = set(sides[0].steps) & set(sides[1].steps)
    if not common:
        return None
    steps = sides[1][sides[1].steps.isin(common)].steps.mode()[0]
    return data.ratio("zero_train", MEASURED, *(side[side.steps == steps].iloc[0] for side in sides))


def _gains(axes: Axes, i: int, data: Data, runs: pd.DataFrame, compared: Sequence[tuple[str, str]]) -> None:
    """A mark and a tick per pair of plans: how many times faster the first is, measured and predicted."""
    for x, (plan, rival) in enumerate(compared):
        at, pair = x + 0.33 * (i - 1), (runs[runs.plan == rival], runs[runs.plan == plan])
        if measured := faster(data, runs, rival, plan):
            value = point(axes, at, measured, markersize=7, color=PALETTE[i + 2], marker=MARKERS[i])
            note(axes, f"{value:.2f}", at, value, "right")
        axes.plot(at, ratio(*pair, PREDICTED).median(), "_", **TICK_MARK)


def _published(axes: Axes, compared: Sequence[tuple[str, str]]) -> None:
    published = {number.label: number.value for number in paper("ZT-1")}  # times faster than ZeRO-3
    known = [(x, *pair) for x, pair in enumerate(compared) if {PLANS[plan] for plan in pair} <= published.keys()]
    for x, plan, rival in known:
        value = published[PLANS[plan]] / published[PLANS[rival]]
        axes.plot(x + 0.33, value, "kx", markersize=8, label="paper, 384 GCDs, 20B" if x == known[0][0] else None)
        note(axes, f"{value:.2f}", x + 0.33, value, "right")
    axes.plot([], [], "_", label="predicted", **TICK_MARK)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(ylabel="times as fast", ylim=(0, None))
    axes.set_xlim(-0.5, len(compared) - 0.35)
    names = [f"{PLANS[plan]}\n÷ {PLANS[rival]}".replace(", ", ",\n") for plan, rival in compared]
    axes.set_xticks(range(len(compared)), names, fontsize=7)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=7)


def zero_rates(data: Data, *, plan: PlanName = "hierarchical", rivals: Sequence[PlanName] = _RIVALS) -> Drawing:
    """How many times faster `plan` is than `rivals`, over the rate between nodes (left); and how many times faster
    plans are than ZeRO-3 with levels and without (right). Dotted and ticks: predicted."""
    training = Training(data.runs("zero_train"))
    if training.setting["fabric"] != "shaped":
        raise NothingToShow("No run on a network of given rates.")
    swept = training.like(cluster_mbit_s=..., accumulation=...)
    flat = training.like(package_ratio=1, node_ratio=1, cluster_mbit_s=...)
    text = ""
    if len(flat):
        rate = flat.groupby("cluster_mbit_s").plan.nunique()[::-1].idxmax()
        flat, text = flat[flat.cluster_mbit_s == rate], f"Without levels: {rate:g} Mbit/s on all links. "
    if not len(flat) and swept.cluster_mbit_s.nunique() == 1:
        raise NothingToShow("Runs with one rate and one ratio of levels only.")
    several = swept.cluster_mbit_s.nunique() > 1  # else a panel of single points
    shape = {"figsize": (9.5 if several else 5, 3.9), "width_ratios": [1.2, 1] if several else [1]}
    fig, panels = plt.subplots(1, 1 + several, squeeze=False, **shape)
    if several:
        _over_rates(panels[0, 0], data, swept, plan, rivals)
    _without_levels(panels[0, -1], data, training.like(), flat)
    caption = f"{training.size()}, {training.network}. {'Left: other rates at the same ratios. ' if several else ''}"
    caption += (
        f"Rates with levels and without: {text or 'without, not run. '}Dotted and ticks: predicted. Marks and bars: "
    )
    caption += "mean of pairs of runs of one occasion."
    return Drawing(fig, f"{training.evidence}; dotted and ticks: modelled", caption)


def _over_rates(axes: Axes, data: Data, swept: pd.DataFrame, plan: str, rivals: Sequence[PlanName]) -> None:
    counts = [(count, runs) for count, runs in swept.groupby("accumulation") if runs.cluster_mbit_s.nunique() > 1]
    for (count, runs), filled in zip(counts, ("full", "none", "left"), strict=False):
        for rival in rivals:
            found = [
                (rate, sample.value if (sample := faster(data, at, rival, plan)) else np.nan, gains(at, rival, plan)[1])
                for rate, at in runs.groupby("cluster_mbit_s")
            ]
            rates, values, predicted = np.array(found).T
            label = f"than {PLANS[rival]}, {micro_batches(count)}"
            axes.plot(rates, values, linewidth=1.5, fillstyle=filled, label=label, **look(rival))
            axes.plot(rates, predicted, linestyle=":", color=color(rival), linewidth=1)
    axes.plot([], [], ":", color="grey", label="predicted")
    log_axis(axes.xaxis, sorted(swept.cluster_mbit_s.unique()))
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(xlabel="rate between nodes per rank (Mbit/s)", ylabel=f"{PLANS[plan]}: times faster", ylim=(0, None))
    axes.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1.01))


def _without_levels(axes: Axes, data: Data, levels: pd.DataFrame, flat: pd.DataFrame) -> None:
    others = [plan for plan in ("zeropp", "hierarchical_fp", "hierarchical") if {plan, "zero3"} <= set(flat.plan)]
    for i, (runs, name) in enumerate(((levels, "16 : 4 : 1"), (flat, "without levels"))):
        for x, plan in enumerate(others):
            _, predicted = gains(runs, "zero3", plan)
            value = sample.value if (sample := faster(data, runs, "zero3", plan)) else np.nan
            if np.isnan(value):
                continue
            at, look_ = x + 0.24 * (i - 0.5), {"hatch": HATCHES[i], "edgecolor": "white"}
            axes.bar(at, value, 0.22, label=name if x == 0 else None, color=PALETTE[i + 3], **look_)
            axes.plot(at, predicted, "_", color="black", markersize=11, markeredgewidth=1.6)
            note(axes, f"{value:.2f}", at, np.nanmax([value, predicted]))
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xticks(range(len(others)), [PLANS[plan].replace(", ", ",\n") for plan in others])
    axes.set(ylabel="times faster than ZeRO-3", ylim=(0, 1.35 * axes.get_ylim()[1]))
    axes.set_xlim(-0.6, max(1, len(others)) - 0.4)
    if others:
        axes.legend(fontsize=8, title="rates of the levels", title_fontsize=8)
    else:
        axes.text(0, 0.5, "without levels: not run", ha="center", fontsize=8, color="grey")


def changes(run: pd.Series) -> str:
    """How a run's plan differs from the hierarchical plan as we read it."""
    words = {
        "weights": f"weights over {_PLACES.get(run.weights)}",
        "gradients": f"gradients over {_PLACES.get(run.gradients)}",
        "secondary": f"copy of the weights in {_PLACES.get(run.secondary)}",
        "weight_bits": f"weights as {run.weight_bits} bits",
        "gradient_bits": f"gradients as {run.gradient_bits} bits".replace("16,4,4 bits", "16 bits in the pair, then 4"),
        "reduce_across": "nodes reduce per micro-batch",
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
    fig, axes = plt.subplots(1, len(batches), figsize=(5.5 * len(batches), 0.42 * len(names) + 1.6), squeeze=False)
    for panel, count in zip(axes[0], batches, strict=True):
        mine = runs[runs.accumulation == count]
        there = [name for name in names if name in set(mine.name)]
        times(panel, [(name, "hierarchical", mine[mine.name == name]) for name in there])
        panel.tick_params(axis="y", labelsize=7)
        held = (mine[STATE] / mine.parameters).groupby(mine.name).median()
        edge = {"transform": panel.get_yaxis_transform(), "ha": "right", "fontsize": 8}
        for y, name in enumerate(there):
            panel.text(0.99, y, f"{held[name]:.1f}", va="center", **edge)
            sides = mine[mine.name == name], mine[mine.name == "hierarchical"]
            common = set.intersection(*(set(side.steps) for side in sides))
            sides = [side[side.steps.isin(common)] for side in sides]
            if y and common and (sample := data.ratio("zero_train", MEASURED, *(s.iloc[0] for s in sides))):
                panel.text(0.84, y, f"× {sample.value:.2f}", va="center", **edge)
        panel.text(0.99, -0.7, "bytes held", **edge)
        panel.axvline(mine[mine.name == "hierarchical"][MEASURED].median(), color="grey", linestyle=":", linewidth=1)
        panel.set_title(f"{micro_batches(count)} per step", loc="left")
        panel.set(xlim=(0, 1.75 * mine[MEASURED].max()))
    caption = f"{training.size()}, {training.network}. {training.repeats} Tick: predicted. Dotted: the plan unchanged."
    caption += " Right edge: ×, step over the unchanged plan's, of pairs of one occasion, where there are; bytes of state per parameter on a rank."
    return Drawing(fig, f"{training.evidence}; ticks: modelled", caption)


def zero_scaling(data: Data, *, plans: Sequence[PlanName] = ("zero3", "zeropp", "hierarchical")) -> Drawing:
    """Weak scaling of some plans: compute and the rest of a step over the number of nodes, and the efficiency against
    the smallest run with several nodes, measured and of bytes over rates alone."""
    training = Training(data.runs("zero_train"))
    grown = training.like(nodes=...)
    grown = grown[grown.plan.isin(plans)]
    medians = grown.groupby(["plan", "nodes"])[[MEASURED, "compute_seconds", PREDICTED]].median()
    scaled = [plan for plan in present(grown, plans) if len(medians.loc[plan]) > 1]
    if not scaled:
        raise NothingToShow("Runs on one number of nodes only.")
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), width_ratios=[1.5, 1])
    _weak_scaling(left, medians, scaled)
    for plan in scaled:
        several = medians.loc[plan][medians.loc[plan].index > 1]
        moving = several[PREDICTED] - several.compute_seconds
        _efficiency(right, data, grown[(grown.plan == plan) & (grown.nodes > 1)], plan)
        right.plot(moving.iloc[0] / moving, ":", fillstyle="none", **look(plan))
    published = paper("ZT-2")[0].value
    right.axhline(published, color="black", linestyle="--", linewidth=1, label="paper, up to 384 GCDs")
    right.plot([], [], ":", color="grey", marker="o", fillstyle="none", label="bytes over rates alone")
    right.set(xlabel="nodes", ylabel="efficiency", ylim=(0, 1.1))
    log_axis(right.xaxis, sorted(nodes for nodes in grown.nodes.unique() if nodes > 1))
    right.legend(fontsize=8, loc="lower left")
    ranks = training.setting["packages"] * training.setting["gcds"]
    caption = f"{ranks} ranks per node, {parameters(grown)}, {training.network}. Left: medians. "
    caption += "Right: dots are pairs of runs of one occasion, marks their mean, bars its 95 % interval."
    return Drawing(fig, f"{training.evidence}; dotted: modelled; dashed: paper", caption)


def _efficiency(axes: Axes, data: Data, runs: pd.DataFrame, plan: str) -> None:
    """Step of the fewest nodes over that of more, as the claims read it: pairs of one occasion."""
    first, *others = (some.iloc[0] for _, some in runs.groupby("nodes"))
    samples = {run.nodes: data.ratio("zero_train", MEASURED, first, run) for run in others}
    found = {first.nodes: 1.0} | {n: point(axes, n, s, **look(plan)) for n, s in samples.items() if s}
    axes.plot(list(found), list(found.values()), label=PLANS[plan], **look(plan))
    for nodes, value in list(found.items())[1:]:
        note(axes, f"{value:.2f}", nodes, value, "right")


def _weak_scaling(axes: Axes, medians: pd.DataFrame, plans: list[str]) -> None:
    ticks, start, grey = {}, 0, {"color": "#999999", "hatch": "///", "edgecolor": "white"}
    for plan in plans:
        mine = medians.loc[plan]
        compute = mine.compute_seconds.fillna(0)
        for x, nodes in enumerate(mine.index, start):
            total = mine[MEASURED][nodes]
            axes.bar(x, compute[nodes], 0.8, **grey)
            axes.bar(x, total - compute[nodes], 0.8, bottom=compute[nodes], color=color(plan))
            note(axes, f"{total:.{2 if total < 10 else 1}f}", x, total)
            ticks[x] = f"{nodes}\n{PLANS[plan]}" if nodes == mine.index[len(mine) // 2] else f"{nodes}"
        start += len(mine) + 1
    axes.bar(0, 0, label="compute, measured alone", **grey)
    axes.bar(0, 0, color=color(plans[-1]), label="rest (coloured): communication and software")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set(ylabel="time of a step (s)", xlabel="nodes", ylim=(0, 1.35 * medians[MEASURED].max()))
    axes.legend(fontsize=8, loc="upper left")
    axes.grid(axis="x", visible=False)


def every_plan(training: Training, accumulation: int) -> pd.DataFrame:
    """Runs of all plans in the setting, changed hierarchical ones included, that have a predicted step."""
    free = dict.fromkeys((*CHANGES, "block"), ...)
    return training.like(accumulation=accumulation, **free).dropna(subset=_BOTH)


def medians(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per plan of `every_plan`: predicted and measured step (s)."""
    return runs.groupby(["plan", "block", *CHANGES], as_index=False)[_BOTH].median()


def zero_prediction(data: Data) -> Drawing:
    """Measured against predicted step of every run with a shaped network."""
    training = Training(data.runs("zero_train"))
    paired = training.runs.dropna(subset=[PREDICTED])
    if paired.empty:
        raise NothingToShow("No record of a zero_train run with a predicted step on a shaped network.")
    fig, axes = plt.subplots(figsize=(6.4, 4.9))
    notes, others = [], paired
    for i, count in enumerate(training.batches):
        filled = "none" if i else "full"
        runs = every_plan(training, count)
        others, table = others.drop(runs.index), medians(runs)
        if table.empty:
            continue
        for plan, mine in table.groupby("plan"):
            style = look(plan) | {"markersize": 7, "linestyle": "none", "fillstyle": filled}
            axes.plot(mine[PREDICTED], mine[MEASURED], **style)
        axes.plot([], [], "o", color="black", fillstyle=filled, label=micro_batches(count))
        rank = table[_BOTH].corr(method="spearman").iloc[0, 1]
        longer = table.loc[table[PREDICTED].idxmin(), MEASURED] / table[MEASURED].min() - 1
        notes.append(
            f"{micro_batches(count)}: {len(table)} plans, Spearman {rank:.2f}; the plan predicted fastest takes "
            f"{100 * longer:.0f} % longer than the fastest."
        )
    for name, plan in _FAMILIES.items():
        if plan in set(paired.plan):
            axes.plot([], [], linestyle="none", label=name, **look(plan))
    label = "other rates, ratios, nodes"
    axes.plot(others[PREDICTED], others[MEASURED], ".", color="#999999", label=label, zorder=1)
    ends = [0.8 * paired[PREDICTED].min(), 1.25 * paired[MEASURED].max()]
    axes.plot(ends, ends, color="black", linewidth=1)
    axes.set(xlabel="predicted step: compute, and bytes over rates (s)", ylabel="measured step (s)")
    for axis in (axes.xaxis, axes.yaxis):
        log_axis(axis, round_ticks(*ends))
    axes.legend(fontsize=8)
    caption = f"{training.size()}, {training.network}. " + " ".join(notes)
    return Drawing(fig, f"{training.evidence} against modelled", caption)

"""What a plan sends over each level, and what it keeps in memory."""

import matplotlib.pyplot as plt
import numpy as np

from repro.report.figures import marks
from repro.report.figures.base import Drawing
from repro.report.figures.data import Data
from repro.report.figures.zero.marks import color, fill, note
from repro.report.figures.zero.runs import HPZ, LEVELS, PLANS, STATE, PlanName, Training, present

_CLAIMS = {
    "ZP-1.a": "ZeRO-3 sends M ×",
    "ZP-1.b": "ZeRO++ M ×",
    "ZP-1.c": "less by a factor of",
    "ZP-1.d": "one hop of qgZ ÷ two",
}
_MEMORY = {"ZT-4.a": "ZeRO-3", "ZT-4.b": "ZeRO++", "ZT-4.c": "hierarchical"}


def zero_bytes(data: Data, *, accumulation: int | None = None, plans: tuple[PlanName, ...] = tuple(PLANS)) -> Drawing:
    """Bytes per step and node over each level, in units of the bytes of the 16-bit weights, for some plans.

    `accumulation`: micro-batches per step; default: the fewest.
    """
    training = Training(data.runs("zero_train"))
    runs = training.with_batches(accumulation)
    shown, nodes, unit = present(runs, plans), training.setting["nodes"], runs.model_bytes.iloc[0]
    runs = runs[runs.plan.isin(shown)]
    data.only(runs)
    fig, axes = plt.subplots(1, 3, figsize=(10, 0.25 * len(shown) + 1.7), sharey=True)
    for panel, level in zip(axes, LEVELS, strict=True):
        sent = runs.groupby("plan")[[f"bytes_{level}", f"wire_{level}"]].median() / unit / nodes
        for y, plan in enumerate(shown):
            counted, wire = sent.loc[plan]
            value = wire if np.isnan(counted) else counted
            panel.barh(y, counted, 0.7, **fill(plan))
            if np.isnan(counted):
                panel.plot(wire, y, "P", mfc="white", color=color(plan), markersize=7)
            note(panel, "not counted" if np.isnan(value) else f"{value:.2f}", np.nan_to_num(value), y, "right")
        panel.set_title(LEVELS[level], pad=16)
        panel.set(xlabel="bytes per step and node (M)", xlim=(0, 1.25 * np.nanmax(sent.loc[shown])))
        panel.grid(axis="y", visible=False)
    for name, value in rules(nodes, nodes * training.setting["packages"] * training.setting["gcds"]).items():
        axes[2].axvline(value, color="black", linestyle=":", linewidth=1.5)
        place = {"xycoords": ("data", "axes fraction"), "fontsize": 8, "ha": "center", "va": "bottom"}
        axes[2].annotate(f"{name}: {value:.2f}", (value, 1), **place)
    marks.rows(axes[0], [PLANS[plan] for plan in shown])
    more = (runs.wire_cluster / runs.bytes_cluster).dropna()
    text = f"{training.size()}; M: the bytes of its 16-bit weights, {unit / 1e6:.1f} MB. Bars: payload, counted by "
    text += "every rank. Hollow crosses: libraries, which do not count payload; bytes by the kernel, with headers."
    if len(more):
        text += f" Between nodes the kernel counts {100 * (more.median() - 1):.1f} % more than the payload."
    if told := marks.of_claims(data, _CLAIMS):
        text += f" As the claims count, the first two for many nodes: {told}."
    text += training.best(runs) + training.libraries(runs)
    text += f"{HPZ} qwZ: weights are sent as INT8; qgZ: gradients as INT4, in two hops unless said otherwise."
    text += f" Dotted: the rules for many nodes and one micro-batch, 3 M for ZeRO-3 and 0.75 M for ZeRO++, counted for {nodes}."
    return Drawing(fig, training.evidence, text)


def rules(nodes: int, ranks: int) -> dict[str, float]:
    """What the counting rules of ZeRO-3 (3 M) and ZeRO++ (0.75 M) give out of each of so many nodes, in M per micro-batch.

    Both are for many nodes: of a gather among N ranks only (N - 1) / N travels.
    """
    return {"3 M": 3 * (ranks - 1) / ranks, "0.75 M": 0.5 * (ranks - 1) / ranks + 0.25 * (nodes - 1) / nodes}


def zero_memory(data: Data, *, accumulation: int | None = None, plans: tuple[PlanName, ...] = tuple(PLANS)) -> Drawing:
    """Bytes of state per parameter that the fullest rank held, beside the formula of `repro.zero.memory`."""
    training = Training(data.runs("zero_train"))
    runs = training.with_batches(accumulation)
    shown = present(runs, plans)
    data.only(runs[runs.plan.isin(shown)])
    fig, axes = plt.subplots(figsize=(7.5, 0.25 * len(shown) + 1.6))
    for y, plan in enumerate(shown):
        mine = runs[runs.plan == plan]
        held, predicted = ((mine[name] / mine.parameters).median() for name in (STATE, f"predicted_{STATE}"))
        axes.barh(y, held, 0.7, **fill(plan))
        axes.plot(predicted, y, "kD", mfc="white", markersize=5, label="formula" if y == 0 else None)
        marks.note(axes, f"{held:.2f}", held, y, 9, va="center", fontsize=8)
    marks.rows(axes, [PLANS[plan] for plan in shown])
    axes.set(xlabel="bytes of state per parameter on a rank")
    axes.margins(x=0.12)
    axes.barh(0, 0, color="#555555", label="held by the fullest rank")
    fig.legend(ncols=2, **marks.ABOVE)
    caption = f"{training.size()}; weights, gradients and optimizer states, without activations. Bars: tensors that "
    caption += "the fullest rank holds. White diamonds: our memory formula, which covers our own plans only."
    if told := marks.of_claims(data, _MEMORY, ".4g"):
        caption += f" Held ÷ formula: {told}."
    return Drawing(fig, f"{training.evidence} (bars), modelled (diamonds)", caption)

"""Does a model learn the same when its weights and gradients are quantised?"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.report.figures.base import LINE_STYLES, Drawing
from repro.report.figures.data import Data, NothingToShow, series
from repro.report.figures.marks import said
from repro.report.figures.zero.marks import color, look
from repro.report.figures.zero.runs import PLANS, PlanName, Training, commonest, present

_LEAST_STEPS = 50  # for a curve


def zero_loss(
    data: Data, *, reference: PlanName = "zero3", swept: PlanName = "hierarchical", smooth: float = 0.05
) -> Drawing:
    """Loss over steps of every plan of the longest runs, and its difference to the plan `reference`; beside it, where
    it was run, the final loss of the plan `swept` by the size of the quantised block.

    `smooth`: share of all steps that a thick curve averages (at least 10 steps).
    """
    training = Training(data.runs("zero_train"))
    steps = training.runs.steps.max()
    if steps < _LEAST_STEPS:
        raise NothingToShow(f"The longest run has {steps} steps: too few for a curve.")
    setting = commonest(training.runs[training.runs.steps == steps], "seed", "block")
    long = training.like(setting, block=256)
    sweep = training.like(setting, plan=swept, seed=0)
    blocks = sorted(sweep.block.unique(), key=lambda block: block or np.inf)
    data.only(long, sweep)
    curves = series(long).pivot_table(index="step", columns=["plan", "seed"], values="loss")
    window = max(10, int(len(curves) * smooth))

    panels = [["loss", "block"], ["gap", "block"]] if len(blocks) > 1 else [["loss"], ["gap"]]
    shape = {"figsize": (7 + 2.5 * (len(blocks) > 1), 4.8), "height_ratios": [2, 1]}
    fig, axes = plt.subplot_mosaic(panels, **shape, width_ratios=[1.7, 1][: len(panels[0])])
    _curves(axes["loss"], axes["gap"], curves, window, present(long), reference)
    if len(blocks) > 1:
        losses = [sweep[sweep.block == block].loss_last.median() for block in blocks]
        axes["block"].plot(range(len(blocks)), losses, label=PLANS[swept], **look(swept))
        axes["block"].set(xlabel="values per scale", ylabel="final loss (nats per byte)")
        names = [f"{block:g}" if block else "message" for block in blocks]
        axes["block"].set_xticks(range(len(blocks)), names, rotation=45, ha="right")
        seeds_of = long[long.plan == reference].set_index("seed").loss_last
        _reference(axes["block"], seeds_of, reference)
    seeds = long.seed.nunique()
    bands = f"Lines: the mean of {seeds} seeds; bands: all of them." if seeds > 1 else "One seed."
    text = f"{training.size(setting)}, tinyshakespeare. Above: thin, every step; thick, the mean of {window} steps. "
    text += f"Below: difference to {PLANS[reference]} with the same seed; grey: within 1 %. {bands}"
    if len(blocks) > 1:
        text += f" Right: one seed{'; the last point has one scale per message' if 0 in blocks else ''}. "
        text += f"Block sizes differ by {100 * (max(losses) / min(losses) - 1):.1f} %, seeds of {PLANS[reference]} by "
        text += f"{100 * (seeds_of.max() / seeds_of.min() - 1):.1f} %."
    return Drawing(fig, " and ".join(sorted(set(long.evidence))), f"{text} {_final(data)}".strip())


def _final(data: Data) -> str:
    """The claims' final losses over ZeRO-3's."""
    samples = {plan: data.of_claim(claim) for plan, claim in {"hierarchical": "ZT-3.a", "ZeRO++": "ZT-3.b"}.items()}
    told = [f"{plan} {said(sample, '.4g')}" for plan, sample in samples.items() if sample]  # 1 % is what agrees
    return f"Final loss ÷ ZeRO-3's: {'; '.join(told)}." if told else ""


def _curves(loss: Axes, gap: Axes, curves: pd.DataFrame, window: int, plans: list[str], reference: str) -> None:
    smooth = curves.rolling(window, min_periods=1, center=True).mean()
    for i, plan in enumerate(plans):
        style = {"color": color(plan), "linestyle": LINE_STYLES[i]}
        loss.plot(curves[plan].mean(axis=1), color=style["color"], alpha=0.2, linewidth=0.7)
        loss.plot(smooth[plan].mean(axis=1), label=PLANS[plan], **style)
        if plan != reference and reference in smooth:
            percent = (100 * (smooth[plan] / smooth[reference] - 1)).dropna(axis=1, how="all")
            gap.plot(percent.mean(axis=1), **style)
            gap.fill_between(percent.index, percent.min(axis=1), percent.max(axis=1), alpha=0.2, color=style["color"])
    loss.set(ylabel="loss (nats per byte)")
    loss.legend()
    gap.axhspan(-1, 1, color="grey", alpha=0.15)
    gap.set(xlabel="step", ylabel=f"loss above\n{PLANS[reference]}'s (%)")
    low, high = gap.get_ylim()
    gap.set_ylim(min(-1.5, low), max(1.5, high))


def _reference(axes: Axes, losses: pd.Series, plan: str) -> None:
    """The unquantised plan: its final loss with seed 0, and what other seeds make of it."""
    axes.axhline(losses.get(0, np.nan), label=f"{PLANS[plan]}, same seed", linestyle="--", color=color(plan))
    axes.axhspan(losses.min(), losses.max(), alpha=0.15, label=f"{PLANS[plan]}, all seeds", color=color(plan))
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))

"""How far a placement carries: made from few tokens, and on other texts than it was made for."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.claims.sample import Sample
from repro.report.figures import marks
from repro.report.figures.base import PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow
from repro.report.figures.exflow import BY_SEQUENCES, MODELS, PLAIN, TEXTS, TRACE, by_sequences


def counted(runs: pd.DataFrame) -> pd.DataFrame:
    """With `tokens`: how many each placement was computed from (all: their median over seeds). Only numbers of GPUs for
    which fewer than all were tried."""
    runs = runs[runs.gpus.isin(runs.gpus[runs.train_tokens > 0])]
    everything = runs.tokens_used[runs.train_tokens == 0].astype(int).median()
    return runs.assign(tokens=runs.train_tokens.where(runs.train_tokens > 0, everything))


def exflow_tokens(
    data: Data, *, trace: str = TRACE, others: tuple[str, ...] = ("gpt_moe_8e", "gpt_moe_64e")
) -> Drawing:
    """Crossings of a placement over the tokens it was computed from: on these tokens, and on held-out sequences (left); and
    held-out ones against a placement by all tokens, of `others` too (right)."""
    placements = data.runs("exflow_placement", trace=trace, gpus_per_node=0, **PLAIN)
    few = counted(placements[placements.method == "affinity"])
    if few.empty:
        raise NothingToShow("No run with fewer training tokens.")
    rank_order = placements.query("method == 'contiguous' and train_tokens == 0 and gpus in @few.gpus")
    every = data.all_runs("exflow_placement").query("method == 'affinity' and gpus == 4")
    data.only(few, rank_order)
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.2))
    for axes in (left, right):
        axes.axvspan(1000, 3000, color="#bbbbbb", alpha=0.4, label="enough, says the paper" if axes is left else None)
    for i, (gpus, runs) in enumerate(few.groupby("gpus")):
        held_out = {**marks.look(i), "label": f"{gpus} GPUs, held-out sequences", "markersize": 5}
        own = held_out | {"label": f"{gpus} GPUs, the placement's own tokens", "marker": marks.look(i + 1)["marker"]}
        samples = ((tokens, _by_tokens(data, trace, gpus, some)) for tokens, some in runs.groupby("tokens"))
        marks.points(left, [(tokens, sample) for tokens, sample in samples if sample], **held_out)
        marks.points(left, runs.groupby("tokens").train_crossing_fraction, "--", **own)
        crossing = rank_order[rank_order.gpus == gpus].crossing_fraction.median()
        if not np.isnan(crossing):
            left.axhline(crossing, color=PALETTE[5], linestyle=":", label=f"rank order, {gpus} GPUs: {crossing:.2f}")
    for i, each in enumerate((trace, *others)):
        _against_all(right, data, each, every[every.trace == each], i)
    right.axhline(1, color="black", linewidth=0.8)
    for axes in (left, right):
        axes.set(xscale="log", xlabel="tokens that the placement was computed from")
    left.set(ylabel="transitions that cross GPUs", ylim=(0, None))
    right.set(ylabel="crossings ÷ those of a\nplacement by all tokens")
    fig.legend(ncols=3, **marks.ABOVE)
    caption = f"Placements by our search. Left: {few.routing.iloc[0]}. Dashed: on the tokens that the placement was "
    caption += "computed from (its own), medians with the range of seeds. Elsewhere, "
    caption += f"{BY_SEQUENCES[:1].lower()}{BY_SEQUENCES[1:]}"
    return Drawing(fig, "measured; grey band: paper", caption)


def _by_tokens(data: Data, trace: str, gpus: int, runs: pd.DataFrame, **how: Any) -> Sample | None:
    tokens = int(runs.train_tokens.iloc[0])
    return by_sequences(data, trace, method="affinity", gpus=gpus, train_tokens=tokens, **how)


def _against_all(axes: Axes, data: Data, trace: str, runs: pd.DataFrame, index: int) -> None:
    """Held-out crossings of placements by few tokens over those of a placement by all, as the claims read it."""
    few = [(int(tokens), some) for tokens, some in runs.groupby("train_tokens") if tokens]
    found = [(tokens, _by_tokens(data, trace, 4, some, over={"train_tokens": 0})) for tokens, some in few]
    drawn = [(tokens, sample) for tokens, sample in found if sample]
    if drawn:
        label = f"right: {MODELS.get(trace, trace)}, 4 GPUs"
        marks.points(axes, drawn, label=label, markersize=5, **marks.look(index))


HOMES = {TRACE: "mmlu", "gpt_moe_16e": "shakespeare", "gpt_moe_16e_shakespeare": "shakespeare"}


def exflow_domains(data: Data, *, homes: dict[str, str] = HOMES, gpus: int = 4) -> Drawing:
    """Share of transitions that stay on their GPU: of other texts, over that of the text which experts were placed by.

    `homes`: trace → the text to place by.
    """
    runs = data.runs("exflow_placement", method="affinity", gpus=gpus)
    placed = runs[[homes.get(run.trace) == run.train_domain for run in runs.itertuples()]]
    data.only(placed)
    stay = 1 - placed.groupby(["trace", "test_domain"]).crossing_fraction.median()
    names, samples = [], []
    for trace, domain in stay.index:
        asked = {"method": "affinity", "gpus": gpus, "train_domain": homes[trace], "test_domain": domain}
        how = {"over": {"test_domain": homes[trace]}, "complement": True}
        if domain != homes[trace] and (sample := by_sequences(data, trace, **asked, **how)):
            model = MODELS.get(trace, trace).replace(", trained", ",\ntrained")
            home, other = (TEXTS.get(each, each.capitalize()) for each in (homes[trace], domain))
            names.append(f"{model}:\n{home} → {other}")
            samples.append((sample, stay[trace, homes[trace]], stay[trace, domain]))
    if not samples:
        raise NothingToShow("No run on single domains.")
    fig, axes = plt.subplots(figsize=(8, 0.55 * len(samples) + 1.5))
    axes.axvspan(0.989, 1.005, color="#bbbbbb", alpha=0.6, label="paper: C4, Dolma, Yelp")
    axes.axvline(1, color="black", linewidth=0.8)
    for y, (sample, home, other) in enumerate(samples):
        value = marks.point(axes, y, sample, across=True, **marks.look(0))
        end = max(value, *sample.values, sample.interval[1])
        marks.note(axes, f"{value:.3f} ({home:.2f} → {other:.2f})", end, y, 6, va="center", bbox=marks.CLEAR)
    marks.rows(axes, names, fontsize=8)
    axes.set_xlabel("share of transitions that stay on their GPU: other text ÷ text of the placement")
    axes.set_xlim(axes.get_xlim()[0], axes.get_xlim()[1] + 0.35 * (axes.get_xlim()[1] - axes.get_xlim()[0]))
    fig.legend(**marks.ABOVE)
    caption = f"{gpus} GPUs, held-out sequences. Rows: the text that experts were placed by → the other text; in "
    caption += f"brackets the two shares. {BY_SEQUENCES}"
    return Drawing(fig, "measured; grey band: paper", caption)

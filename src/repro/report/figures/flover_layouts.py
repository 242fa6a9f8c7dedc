"""What the layouts of keys and values cost and save when a request leaves."""

import matplotlib.pyplot as plt
import pandas as pd

from repro.claims.sample import Sample
from repro.report.figures import marks
from repro.report.figures.base import Drawing
from repro.report.figures.data import Data, NothingToShow
from repro.report.figures.flover import of_one_model, setting

LAYOUTS = {
    "window": "window (the paper's)",
    "fixed": "fixed (no reordering)",
    "last": "last into hole",
    "shift": "shift down",
    "paged": "paged",
}


def flover_layouts(data: Data, *, longest: int | None = None, model: str | None = None) -> Drawing:
    """What closing a slot costs and saves under each layout of the KV cache, with random lengths up to `longest` (None:
    that of most runs)."""
    uniform = of_one_model(data.runs("flover_serving", workload="uniform"), model)
    longest = longest or int(uniform.longest.mode()[0])
    runs = of_one_model(data.runs("flover_serving", workload="uniform", longest=longest), model)
    there = {layout: name for layout, name in LAYOUTS.items() if layout in set(runs.layout)}
    if len(there) < 2:
        raise NothingToShow("Only one layout was run.")
    runs = runs[runs.layout.isin(list(there))]
    data.only(runs)
    fig, panels = plt.subplots(1, 3, figsize=(9, 0.45 * len(there) + 1.3), sharey=True)
    metrics = [("moved_bytes", 1e-6, "KV moved (MB)", ".1f"), ("waste_fraction", 100, "dead rows (%)", ".1f")]
    metrics += [("tokens_per_s", 1, "output tokens/s", ",.0f")]
    for axes, (metric, factor, label, number) in zip(panels, metrics, strict=True):
        found = {layout: factor * runs[runs.layout == layout][metric] for layout in there}
        marks.bars(axes, {f"{there[each]}, n = {len(values)}": values for each, values in found.items()}, label, number)
    run = runs.iloc[0]
    caption = f"{run.weights}; {run.requests} requests, {setting(run)}. Dead rows: rows whose request is already "
    caption += "done, as a share of the rows of all iterations. Medians of n runs, with range and values."
    if len(set(runs.layout.value_counts())) > 1:
        caption += " Bars of fewer runs are of fewer occasions, and cannot be ranked against the others."
    if sample := reordering(data, "flover_serving", runs):
        caption += f" Reordering makes serving {marks.said(sample)} times as fast."
    return Drawing(fig, "measured", caption)


def reordering(data: Data, experiment: str, runs: pd.DataFrame) -> Sample | None:
    """What reordering gains over dead rows, as the claims read it."""
    sides = [runs[runs.layout == layout] for layout in ("fixed", "window")]
    if any(side.empty for side in sides):
        return None
    return data.ratio(experiment, "total_seconds", *(side.iloc[0] for side in sides))

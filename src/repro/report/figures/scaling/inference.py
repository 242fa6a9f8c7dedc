"""Inference at the papers' sizes, predicted: ExFlow's expert-parallel decoding and Flover's fused serving."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from repro.claims import registry
from repro.report.figures.base import MARKERS, PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow, paper, series
from repro.report.figures.marks import log_axis, of_claims
from repro.report.figures.scaling.marks import band, style, whiskers

_ROWS = {  # axis: metric: name
    "throughput ÷ DeepSpeed's": {
        "speedup_over_deepspeed": "load as on our traces",
        "speedup_over_deepspeed_even": "even load",
        "speedup_over_deepspeed_dropping": "DeepSpeed drops tokens",
    },
    "throughput ÷ two all-to-alls": {
        "speedup_coherent": "one all-to-all",
        "speedup_placed": "and placed",
        "speedup_balanced": "and placed, even load",
        "speedup_kv_sent": "placed, keys and values sent",
    },
    "share": {
        "routing_reduction_over_deepspeed": "time of exchanges saved over DeepSpeed",
        "all_to_all_share_deepspeed": "all-to-alls' share of DeepSpeed's time",
    },
}
# Axis: (experts, GPUs) that the paper names: the claim with its number, which is against DeepSpeed.
_PAPERS = {
    "throughput ÷ DeepSpeed's": {(16, 8): "EX-E2E.h", (32, 16): "EX-E2E.i", (8, 8): "EX-E2E.d"},
    "share": {(16, 8): "EX-E2E.g", (8, 4): "EX-E2E.p"},
}
PAPERS_MODELS = {
    "gpt-j-6b": "GPT-J 6B",
    "llama-13b": "LLaMA-13B",
    "llama-33b": "LLaMA-33B",
    "llama-65b": "LLaMA-65B",
    "llama-65b-released": "LLaMA-65B",
}
_SPEEDUPS = {
    "FL-F4a.l": "GPT-J 6B",
    "FL-F4a.m": "LLaMA-13B",
    "FL-F4a.n": "LLaMA-33B",
    "FL-F4a.o": "LLaMA-65B of the authors' file",
}
AUTHORS_FILE = ", authors' file"  # behind the name of a model with the shape that their configuration file has


def scaling_experts(data: Data) -> Drawing:
    """ExFlow over DeepSpeed-MoE and over two all-to-alls that pad nothing, and shares of the exchanges, by experts and GPUs;
    a column of panels per batch of a GPU."""
    found = data.runs("scaling_decode")
    sizes = ["tokens_per_gpu", "experts", "gpus"]
    found = found.sort_values("draws").drop_duplicates(sizes, keep="last").sort_values(sizes)
    batches, numbers = sorted(found.tokens_per_gpu.unique()), {claim.id: claim.paper_value for claim in registry.load()}
    if len(found.drop_duplicates(["experts", "gpus"])) < 2:
        raise NothingToShow("One number of experts and GPUs only.")
    data.only(found)
    shape = {"figsize": (max(7, 4.8 * len(batches) + 0.4), 8.4), "squeeze": False, "sharey": "row", "sharex": "col"}
    figure, axes = plt.subplots(len(_ROWS), len(batches), **shape)
    figure.get_layout_engine().set(h_pad=0.14)  # for the legends above the panels
    for column, tokens in enumerate(batches):
        rows = found[found.tokens_per_gpu == tokens].reset_index(drop=True)
        for panel, (axis, modes) in zip(axes[:, column], _ROWS.items(), strict=True):
            published = {size: numbers[claim] for size, claim in _PAPERS.get(axis, {}).items()}
            _modes(panel, rows, modes, published)
        axes[0, column].set_title(f"{tokens} tokens per GPU", pad=24, fontsize=10)
        axes[-1, column].set_xticks(rows.index, [f"{row.experts}\n{row.gpus}" for row in rows.itertuples()], fontsize=8)
        axes[-1, column].set_xlabel("experts, and below them GPUs")
    for panel, axis in zip(axes[:, 0], _ROWS, strict=True):
        panel.set_ylabel(axis, fontsize=9)
        above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4, "frameon": False, "columnspacing": 1}
        panel.legend(fontsize=8, handletextpad=0.3, borderaxespad=0.1, **above).set_in_layout(
            False
        )  # over both columns
        panel.margins(y=0.08)
    load = f"{found.max_load_affinity.min():.1f} to {found.max_load_affinity.max():.1f}"
    caption = "Marks: medians; bars: 5 to 95 % of what is uncertain. Hollow squares: the paper's numbers, against "
    caption += f"DeepSpeed-MoE, where it names experts and GPUs. The busiest GPU of a layer has {load} times its "
    caption += "share of tokens, counted on our traces."
    return Drawing(figure, "modelled, with hops measured on traces; hollow squares: paper", caption)


def _modes(
    panel: Axes, rows: pd.DataFrame, modes: Mapping[str, str], published: Mapping[tuple[int, int], float]
) -> None:
    """A mark with its band per size and metric, and the paper's numbers."""
    for number, (metric, name) in enumerate(modes.items()):
        at = rows.index + 0.17 * (number - 1.5)
        look = style(number) | {"capsize": 2, "markersize": 4, "label": name}
        panel.errorbar(at, rows[metric], yerr=whiskers(rows, metric), **look)
    sizes = list(zip(rows.experts, rows.gpus, strict=True))
    known = {at: published[size] for at, size in enumerate(sizes) if size in published}
    if published:
        panel.plot(list(known), list(known.values()), "s", color="black", mfc="none", label="paper")
    if any(name.startswith("speedup") for name in modes):
        panel.axhline(1, color="black", linewidth=0.8)


def scaling_requests(data: Data) -> Drawing:
    """Time until the last request is done over the number of requests, fused and with instances, beside Fig. 4(a)."""
    found, published = data.runs("scaling_serving"), paper("FL-F4a")
    found = found.sort_values(["model", "requests"]).drop_duplicates("model", keep="last")  # the most requests
    data.only(found)
    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    shape = {"figsize": (max(5, 3 * columns + 0.5), 3 * lines + 0.4), "squeeze": False, "sharey": True}
    figure, axes = plt.subplots(lines, columns, **shape)
    for panel in axes.flat[len(found) :]:
        panel.remove()
    for panel, (place, run) in zip(axes.flat, found.iterrows(), strict=False):
        rows = series(found.loc[[place]])
        for policy, number in (("instances", 1), ("fused", 0)):
            name, label = f"seconds_{policy}", f"{policy}, predicted"
            band(panel, rows, "requests", name, PALETTE[number], marker=MARKERS[number], label=label)
        for policy, marker in (("Flover", "s"), ("FasterTransformer", "D")):
            label = f"{PAPERS_MODELS[run.model]}, {policy}"
            points = [number for number in published if number.label.startswith(label) and number.x is not None]
            look = {"color": "black", "mfc": "none", "markersize": 5, "label": f"{policy}, paper"}
            panel.plot([point.x for point in points], [point.value for point in points], marker, **look)
        released = run.model.endswith("released")
        panel.set_title(f"{PAPERS_MODELS[run.model]}{AUTHORS_FILE * released}", fontsize=10)
        panel.set_xlabel("requests")
        log_axis(panel.xaxis, sorted({*rows.requests, *(number.x for number in published if number.x)}))
        log_axis(panel.yaxis, [5, 10, 20, 50, 100, 200, 500])
    for panel in axes[:, 0]:
        panel.set_ylabel("until the last is done (s)")
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    caption = "One request every 500 ms, 512 tokens each. Lines: medians; bands: 5 to 95 % of what is uncertain of "
    caption += "the machine. Hollow: the paper's Fig. 4(a). Authors' file: with the shape in their configuration "
    caption += "file, whose MLP is narrower than LLaMA-65B's."
    if told := of_claims(data, _SPEEDUPS):
        caption += f" At 32 requests, instances ÷ fused: {told}."
    return Drawing(figure, "modelled; hollow: paper", caption)

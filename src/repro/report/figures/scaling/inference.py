"""Inference at the papers' sizes, predicted: ExFlow's expert-parallel decoding and Flover's fused serving."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from repro.claims import registry
from repro.experiments.scaling_decode import BATCHES
from repro.flover.paper import REQUESTS
from repro.report.figures.base import MARKERS, PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow, paper, series
from repro.report.figures.marks import ABOVE, grid, log_axis, of_claims, span
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
# Axis: (experts, GPUs) that the paper names: the claim with its number, which is against DeepSpeed, and the number's
# colour: of the one series that it is about, or black.
_PAPERS = {
    "throughput ÷ DeepSpeed's": {
        (16, 8): ("EX-E2E.h", "black"),
        (32, 16): ("EX-E2E.i", "black"),
        (8, 8): ("EX-E2E.d", "black"),
    },
    "share": {(16, 8): ("EX-E2E.g", PALETTE[0]), (8, 4): ("EX-E2E.p", PALETTE[1])},
}
_ENDS = {min(BATCHES): "v", max(BATCHES): "^"}  # tokens per GPU: the mark of their medians
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
    """ExFlow over DeepSpeed-MoE and over two all-to-alls that pad nothing, and shares of the exchanges, by experts and
    GPUs; tokens per GPU are drawn."""
    sizes, few_many = ["experts", "gpus"], list(_ENDS)
    found = data.runs("scaling_decode", tokens_per_gpu=[0, *few_many]).sort_values([*sizes, "draws"])
    found = found.drop_duplicates(["tokens_per_gpu", *sizes], keep="last")
    rows = found[found.tokens_per_gpu == 0].reset_index(drop=True)
    if len(rows) < 2:
        raise NothingToShow("Tokens per GPU are drawn in records of fewer than two numbers of experts and GPUs.")
    data.only(found)
    numbers = {claim.id: claim.paper_value for claim in registry.load()}
    figure, axes = plt.subplots(len(_ROWS), 1, figsize=(9, 8.4), sharex=True)
    figure.get_layout_engine().set(h_pad=0.14)  # for the legends above the panels
    for panel, (axis, modes) in zip(axes, _ROWS.items(), strict=True):
        published = {size: (numbers[claim], color) for size, (claim, color) in _PAPERS.get(axis, {}).items()}
        _modes(panel, rows, modes, published)
        _rings(panel, rows, modes)
        for tokens in few_many:
            _medians(panel, rows[sizes].merge(found[found.tokens_per_gpu == tokens], how="left"), modes, _ENDS[tokens])
        panel.set_ylabel(axis, fontsize=9)
        above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4, "frameon": False, "columnspacing": 1}
        panel.legend(fontsize=8, handletextpad=0.3, borderaxespad=0.1, **above).set_in_layout(False)
        panel.margins(y=0.08)
    few, many = few_many
    axes[0].set_title(f"{few} to {many} tokens per GPU, drawn", pad=24, fontsize=10)
    axes[-1].set_xticks(rows.index, [f"{row.experts}\n{row.gpus}" for row in rows.itertuples()], fontsize=8)
    axes[-1].set_xlabel("experts, and below them GPUs")
    load = f"{rows.max_load_affinity.min():.1f} to {rows.max_load_affinity.max():.1f}"
    caption = "Marks: medians; bars: 95 % of the draws of machine, model error and tokens per GPU, of which the paper "
    caption += f"names none. Small triangles, where there are such runs: medians with {few} tokens (downwards) and "
    caption += f"with {many} (upwards). Hollow squares: the paper's numbers against "
    caption += "DeepSpeed-MoE, where it names experts and GPUs, in the colour of their series (black: of no single "
    caption += "one). Ringed: what claims use. On our "
    caption += f"traces the busiest GPU of a layer has {load} times its even share of tokens."
    return Drawing(figure, "modelled, with hops measured on traces; hollow squares: paper", caption)


def _modes(
    panel: Axes, rows: pd.DataFrame, modes: Mapping[str, str], published: Mapping[tuple[int, int], tuple[float, str]]
) -> None:
    """A mark with its band per size and metric, and the paper's numbers, each in its colour."""
    for number, (metric, name) in enumerate(modes.items()):
        look = style(number) | {"capsize": 2, "markersize": 4, "label": name}
        panel.errorbar(_at(rows, number), rows[metric], yerr=whiskers(rows, metric), **look)
    for at, size in enumerate(zip(rows.experts, rows.gpus, strict=True)):
        if size in published:
            value, color = published[size]
            panel.plot(at, value, "s", color=color, mfc="none")
    if published:
        panel.plot([], [], "s", color="black", mfc="none", label="paper")
    if any(name.startswith("speedup") for name in modes):
        panel.axhline(1, color="black", linewidth=0.8)


def _medians(panel: Axes, rows: pd.DataFrame, modes: Mapping[str, str], marker: str) -> None:
    """A small mark per size and metric, without a band."""
    for number, metric in enumerate(modes):
        look = style(number) | {"marker": marker, "markersize": 3, "mfc": "white"}
        panel.plot(_at(rows, number), rows[metric], **look)


def _at(rows: pd.DataFrame, number: int) -> pd.Index:
    """Where the marks of series `number` stand: beside each other."""
    return rows.index + 0.17 * (number - 1.5)


def _rings(panel: Axes, rows: pd.DataFrame, modes: Mapping[str, str]) -> None:
    """A ring around each number that a claim reads."""
    metrics = list(modes)
    for value in (claim.value for claim in registry.load() if claim.value):
        if value.experiment == "scaling_decode" and value.metric in metrics:
            read = rows[(rows[list(value.where)] == pd.Series(value.where)).all(axis=1)]
            at = _at(read, metrics.index(value.metric))
            panel.plot(at, read[value.metric], "o", color="black", mfc="none", markersize=10)


def scaling_requests(data: Data) -> Drawing:
    """Time until the last request is done over the number of requests, fused and with instances, beside Fig. 4(a)."""
    found, published = data.runs("scaling_serving"), paper("FL-F4a")
    found = found.sort_values(["model", "requests"]).drop_duplicates("model", keep="last")  # the most requests
    data.only(found)
    figure, axes = grid(len(found), 3, (3, 3), (0.5, 0.4), least=5, sharey=True)
    off = []
    for panel, (place, run) in zip(axes.flat, found.iterrows(), strict=False):
        off.append(_requests_panel(panel, run.model, series(found.loc[[place]])))
    for panel in axes[:, 0]:
        panel.set_ylabel("until the last is done (s)")
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, ncols=4, **ABOVE)
    caption = f"One request every {span(found.interval_ms)} ms, 512 tokens each. "
    caption += "Lines: medians; bands: 95 % of what is uncertain of "
    caption += "the machine. Hollow: the paper's Fig. 4(a). Authors' file: the shape in the authors' configuration "
    caption += "file, whose MLP is narrower than LLaMA-65B's. Both axes are logarithmic."
    there = {claim: name for claim, name in _SPEEDUPS.items() if data.of_claim(claim)}
    if told := of_claims(data, there):
        values = {claim.id: claim.paper_value for claim in registry.load()}
        caption += f" At {REQUESTS} requests, instances ÷ fused: {told} "
        caption += f"(paper: {', '.join(f'{values[claim]:g}' for claim in there)})."
    caption += f" Instances, predicted ÷ paper, at the most requests, half and a quarter as many: {'; '.join(off)}."
    shown = tuple(PAPERS_MODELS[model] for model in found.model)
    if readings := [number for number in published if number.x is None and number.label.startswith(shown)]:
        caption += f" Of {readings[0].label.rsplit(', ', 1)[0]}, both readings of the bar are drawn: "
        caption += f"{' and '.join(f'{number.value:g}' for number in readings)} s."
    return Drawing(figure, "modelled; hollow: paper", caption)


def _requests_panel(panel: Axes, model: str, rows: pd.DataFrame) -> str:
    """One model's lines and the paper's numbers. Returns how far the instances are from these, in words."""
    name, published = PAPERS_MODELS[model], paper("FL-F4a")
    for policy, number in (("instances", 1), ("fused", 0)):
        label = f"{policy}, predicted"
        band(panel, rows, "requests", f"seconds_{policy}", PALETTE[number], marker=MARKERS[number], label=label)
    for policy, marker in (("Flover", "s"), ("FasterTransformer", "D")):
        shown = [number for number in published if number.label.startswith(f"{name}, {policy}")]
        # Two readings of one bar have no place on the axis in the file: they are of the most requests.
        points = pd.DataFrame({"requests": number.x or REQUESTS, "seconds": number.value} for number in shown)
        hollow: dict[str, Any] = {"color": "black", "mfc": "none", "markersize": 5, "label": f"{policy}, paper"}
        panel.plot(points.requests, points.seconds, marker, **hollow)
    title = f"{name}{AUTHORS_FILE * model.endswith('released')}"
    panel.set_title(title, fontsize=10)
    panel.set_xlabel("requests")
    log_axis(panel.xaxis, sorted({*rows.requests, *points.requests}))
    log_axis(panel.yaxis, [5, 10, 20, 50, 100, 200, 500])
    ratios = rows.set_index("requests").seconds_instances / points.groupby("requests").seconds.mean()
    return f"{title} {', '.join(f'{ratio:.2f}' for ratio in ratios.dropna()[:-4:-1])}"

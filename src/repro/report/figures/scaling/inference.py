"""Inference at the papers' sizes, predicted: ExFlow's expert-parallel decoding and Flover's fused serving."""

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

from repro.report.figures.base import MARKERS, PALETTE, Data, Drawing, paper, series
from repro.report.figures.marks import log_axis
from repro.report.figures.scaling.marks import band, style, whiskers

_MODES = {  # metric: name
    "coherent": "one all-to-all",
    "placed": "and placed",
    "balanced": "and placed, if load were even",
    "kv_sent": "placed, keys and values sent",
}
# (experts, GPUs) that the paper names, and the claim with its number.
_PAPERS = {(16, 8): "EX-E2E.b", (32, 8): "EX-E2E.c", (32, 16): "EX-E2E.c", (8, 8): "EX-E2E.d"}
_PAPERS_MODELS = {
    "gpt-j-6b": "GPT-J 6B",
    "llama-13b": "LLaMA-13B",
    "llama-33b": "LLaMA-33B",
    "llama-65b": "LLaMA-65B",
    "llama-65b-released": "LLaMA-65B",
}


def scaling_experts(data: Data) -> Drawing:
    """Throughput of ExFlow's modes over that of two all-to-alls, by experts and GPUs, a panel per batch of a GPU."""
    found = data.runs("scaling_decode")
    batches = sorted(found.tokens_per_gpu.unique())
    figure, axes = plt.subplots(1, len(batches), figsize=(4.6 * len(batches) + 1, 4), squeeze=False, sharey=True)
    for panel, tokens in zip(axes[0], batches, strict=True):
        rows = found[found.tokens_per_gpu == tokens].sort_values(["experts", "gpus"]).reset_index(drop=True)
        for number, (mode, name) in enumerate(_MODES.items()):
            at, metric = rows.index + 0.17 * (number - 1.5), f"speedup_{mode}"
            look = style(number) | {"capsize": 2, "markersize": 4, "label": name}
            panel.errorbar(at, rows[metric], yerr=whiskers(rows, metric), **look)
        sizes = list(zip(rows.experts, rows.gpus, strict=True))
        published = {at: paper(_PAPERS[size])[0].value for at, size in enumerate(sizes) if size in _PAPERS}
        if published:
            panel.plot(list(published), list(published.values()), "s", color="black", mfc="none", label="paper")
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xticks(rows.index, [f"{experts}\n{gpus}" for experts, gpus in sizes], fontsize=8)
        panel.set(xlabel="experts\nGPUs", title=f"{tokens} tokens per GPU")
    axes[0][0].set_ylabel("throughput ÷ two all-to-alls")
    axes[0][0].legend(fontsize=7)
    load = f"{found.max_load_affinity.min():.1f} to {found.max_load_affinity.max():.1f}"
    caption = f"Bands of 5 to 95 %. The busiest GPU of a layer has {load} times its share of tokens."
    return Drawing(figure, "modelled, with hops measured on traces; paper (squares)", caption)


def scaling_requests(data: Data) -> Drawing:
    """Time until the last request is done over the number of requests, fused and with instances, beside Fig. 4(a)."""
    found, published = data.runs("scaling_serving").sort_values("model"), paper("FL-F4a")
    figure, axes = plt.subplots(1, len(found), figsize=(2.5 * len(found) + 0.6, 3.4), squeeze=False, sharey=True)
    for panel, (place, run) in zip(axes[0], found.iterrows(), strict=True):
        rows = series(found.loc[[place]])
        for policy, number in (("instances", 1), ("fused", 0)):
            name, label = f"seconds_{policy}", f"{policy}, predicted"
            band(panel, rows, "requests", name, PALETTE[number], marker=MARKERS[number], label=label)
        for policy, marker in (("Flover", "s"), ("FasterTransformer", "D")):
            label = f"{_PAPERS_MODELS[run.model]}, {policy}"
            points = [number for number in published if number.label.startswith(label) and number.x is not None]
            look = {"color": "black", "mfc": "none", "markersize": 5, "label": f"{policy}, paper"}
            panel.plot([point.x for point in points], [point.value for point in points], marker, **look)
        panel.set(title=run.model, yscale="log", xlabel="requests")
        log_axis(panel.xaxis, rows.requests)
        panel.yaxis.set_minor_locator(NullLocator())
    axes[0][0].set_ylabel("until the last is done (s)")
    axes[0][0].legend(fontsize=7)
    return Drawing(figure, "modelled (bands), paper (squares)")

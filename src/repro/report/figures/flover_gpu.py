"""LLaMA-13B on one GPU beside the small model on a CPU and the paper's GPUs."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from repro.claims import registry
from repro.claims.sample import Sample
from repro.report.figures import marks
from repro.report.figures.base import PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow
from repro.report.figures.flover import T1

ROWS = {  # what: the claim on a GPU, the one on a CPU
    "32 requests, times as fast\nas one after another": ("FL-F4a.k", "FL-F4a.i"),
    "4 requests, times as fast\nas an instance for each": ("FL-F4a.t", "FL-F4a.j"),
    "32 requests, times as fast\nas dynamic batching": ("FL-PROG.e", "FL-PROG.d"),
    "lengths to 1,024, times as\nfast as without reordering": ("FL-MS.e", "FL-MS.a"),
    "32 requests, mean latency\n÷ that of a lone request": ("FL-F4a.u", "FL-F4c"),
}
STYLES = (
    ("on a GPU", {"color": PALETTE[0], "marker": "o"}, 0.0),
    ("on a CPU", {"color": PALETTE[1], "marker": "s"}, 0.25),
)


def _counts(samples: Mapping[str, Sequence[Sample | None]]) -> str:
    """`on a GPU: 1 to 2, on a CPU: 8`"""
    told = []
    for number, (label, *_) in enumerate(STYLES):
        counts = [len(sample.values) for found in samples.values() if (sample := found[number])]
        if counts:
            told.append(f"{label}: {marks.span(counts)}")
    return ", ".join(told)


def flover_gpu(data: Data) -> Drawing:
    """The same five ratios of the paper, of 13 billion parameters on a GPU, and of 42 million on a CPU."""
    published = {each.id: each.paper_value for each in registry.load()}
    samples = {name: [data.of_claim(claim) for claim in pair] for name, pair in ROWS.items()}
    if not any(on_gpu for on_gpu, _ in samples.values()):
        raise NothingToShow("No pair of runs of LLaMA-13B on a GPU.")
    fig, axes = plt.subplots(figsize=(8, 4.4))
    for y, (name, found) in enumerate(samples.items()):
        marks.point(axes, y - 0.25, [published[ROWS[name][0]]], across=True, **marks.PAPER)
        for sample, (_, style, below) in zip(found, STYLES, strict=True):
            if sample:
                marks.numbered(axes, y + below, sample, ".3g", **style)
    for label, style, _ in STYLES:
        axes.plot([], [], linestyle="", label=label, **style)
    axes.plot([], [], label="paper", **marks.PAPER)
    axes.axvline(1, color="grey", linewidth=1)
    marks.rows(axes, list(samples), fontsize=8)
    marks.log_axis(axes.xaxis, [1, 2, 3, 5, 10])
    axes.set(xlabel="ratio, logarithmic", xlim=(min(0.9, 0.95 * axes.dataLim.xmin), max(20, 1.5 * axes.dataLim.xmax)))
    fig.legend(ncols=3, **marks.ABOVE)
    runs = [run for on_gpu, _ in samples.values() if on_gpu for run in on_gpu.runs.values()]
    gpus = sorted({gpu for run in runs for gpu in run.provenance.gpu})
    caption = f"GPU: LLaMA-13B, random weights in float16, the paper's lengths, on one {' or '.join(gpus)}. CPU: a "
    caption += (
        "LLaMA of 42 million parameters, random weights in bfloat16, lengths ÷ 8 (reordering: ÷ 2). Marks: means "
    )
    caption += "over runs, or over pairs of one occasion; whiskers: the claim's interval, where there are enough; "
    caption += f"dots: each ({_counts(samples)}). Paper: LLaMA-13B; first two rows against FasterTransformer. "
    caption += f"Dynamic batching: a window of 1.76 T1. {T1}"
    return Drawing(fig, "measured; diamonds: paper", caption)

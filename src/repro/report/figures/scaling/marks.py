"""Shared by the figures of the scaling model: names of plans and machines, looks, bands and whiskers of predictions."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.experiments.common.names import NAMED
from repro.report.figures.marks import look
from repro.report.figures.zero import runs as zero

PLANS = {plan: zero.PLANS[plan].removeprefix("ZeRO-3 with ") for plan in NAMED}  # name in the records: in a figure
FRONTIER = {"frontier": "Frontier", "frontier-rccl": "Frontier, one slow ring"}  # the machine and its scenario
SLOW_RING = (
    " One slow ring: a scenario in which RCCL sends over one NIC of a node at a time and starts messages slowly."
)
OFF = " Off by 100 %: a factor of two, up or down."
MACHINES = FRONTIER | {
    "dgx-h100": "DGX H100",
    "gb200-nvl72": "GB200 NVL72",
    "tpu-like-torus": "TPU-like torus",
    "wilkes3": "A100 nodes",
    "dgx-2": "DGX-2",
}
WORDS = {  # parameters of the step model, and choices about the paper's run
    "gemm": "share of peak compute",
    "hbm": "memory bandwidth",
    "launch s": "start of a kernel",
    "peer s": "gap between messages",
    "secondary": "when hpZ's copy is filled",
    "messages": "messages a layer",
    "all to all": "rate of all-to-alls",
    "node achieved": "rate in the node",
    "cluster achieved": "rate between nodes",
    "cluster latency s": "latency between nodes",
    "node latency s": "latency in the node",
    "package achieved": "rate in the pair",
    "package latency s": "latency in the pair",
    "overlap": "overlap with compute",
    "end overlap": "overlap at the step's end",
    "side by side": "levels side by side",
    "quantize slowdown": "slower quantising",
    "hardware": "network library",
    "tokens": "tokens a micro-batch",
    "accumulation": "micro-batches a step",
    "scales apart": "scales sent apart",
}
_VALUES = {  # of choices
    "frontier": "four rings",
    "frontier-rccl": "one slow ring",
    "micro_batch": "every micro-batch",
    "step": "every step",
    "0.0": "no",
    "1.0": "yes",
}


def in_words(parameter: str, value: str = "") -> str:
    """`gemm` → `share of peak compute`; with a value of a choice, which follows a colon."""
    name = parameter.replace("_", " ")
    return f"{WORDS.get(name, name)}{f': {_VALUES.get(value, value)}' if value else ''}"


def scenario(runs: pd.DataFrame) -> str:
    """What `one slow ring` means, where some of the runs are of it; for captions."""
    return SLOW_RING if "frontier-rccl" in set(runs.hardware) else ""


def style(index: int) -> dict[str, Any]:
    """Colour and marker number `index`, for points without a line."""
    return {**look(index), "linestyle": "none"}


def batches(count: int) -> str:
    return f"{zero.micro_batches(count)} per step"


def errors(log_errors: pd.Series, between: str = "\n") -> str:
    """`40 predicted: half are off by ≤ 12 %, nine in ten by ≤ 35 %`, of log(predicted / measured). `OFF` says what 100 %
    are."""
    if len(log_errors) < 2:
        return f"{len(log_errors)} predicted" + "".join(f": off by {100 * np.expm1(abs(e)):.0f} %" for e in log_errors)
    middle, most = (100 * np.expm1(np.quantile(np.abs(log_errors), q)) for q in (0.5, 0.9))
    return f"{len(log_errors)} predicted: half are off by ≤ {middle:.0f} %,{between}nine in ten by ≤ {most:.0f} %"


def whiskers(rows: pd.DataFrame, name: str) -> np.ndarray:
    """[2, rows]: from the median `name` down to its 2.5 % and up to its 97.5 % quantile, as `errorbar` takes it."""
    return np.array([rows[name] - rows[f"{name}_low"], rows[f"{name}_high"] - rows[name]])


def band(axes: Axes, rows: pd.DataFrame, x: str, name: str, color: str, **line: Any) -> None:
    """A line through the medians `name`, and the band from the 2.5 % to the 97.5 % quantile."""
    rows = rows.sort_values(x)
    axes.fill_between(rows[x], rows[f"{name}_low"], rows[f"{name}_high"], color=color, alpha=0.15, linewidth=0)
    axes.plot(rows[x], rows[name], color=color, markersize=4, **line)

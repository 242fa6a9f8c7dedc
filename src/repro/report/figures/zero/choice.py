"""Which plan for which machine and model: candidates of `zero_plan`, by arithmetic alone."""

import pandas as pd
from matplotlib.axes import Axes

from repro.report.figures.base import PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow, series
from repro.report.figures.marks import ABOVE, grid, log_axis
from repro.report.figures.zero.marks import color
from repro.report.figures.zero.runs import LEVELS, PLANS, micro_batches, parameters

_MACHINES = {"frontier": ("Frontier", 8, "GCDs"), "a100": ("A100 nodes", 4, "GPUs")}  # name, ranks per node, their name
_MARKS = dict(
    zip(("zero1", "zero2", "zero3", "zeropp", "mics", "hierarchical_fp", "hierarchical"), "v<osDP^", strict=True)
)


def machines(data: Data) -> pd.DataFrame:
    """Runs of `zero_plan` for the papers' machines, smallest first; column `where`: machine and ranks in words."""
    runs = data.runs("zero_plan", machine=list(_MACHINES))
    runs = runs.sort_values(["machine", "nodes"], ascending=[False, True])
    named = [(*_MACHINES[run.machine], run.nodes) for run in runs.itertuples()]
    return runs.assign(where=[f"{name}, {nodes * size} {unit}" for name, size, unit, nodes in named])


def candidates(runs: pd.DataFrame) -> pd.DataFrame:
    """All partitions that some runs of `machines` ranked, with their run's fields; the fastest of a run first."""
    return series(runs).astype({"named": bool, "fits": bool})


# --- routes in words -----------------------------------------------------------------------------------------------


def sends(row: pd.Series) -> str:
    """What one of the `candidates` sends: weights in every pass, gradients, and new weights once per step."""
    alone = {"package"} if row.machine == "a100" else {"cluster"} if row.nodes == 1 else set()
    order = ["-", *LEVELS]
    upto = {name: set(order[1 : order.index(row[name]) + 1]) - alone for name in ("weights", "optimizer")}
    sent = {
        "weights": _route(row.weight_route, upto["weights"]),
        "gradients": _route(row.gradient_route, set(LEVELS) - alone),
        "new weights": _route(row.update_route, upto["optimizer"] - upto["weights"]),
    }
    return "; ".join(f"{name} {text}" for name, text in sent.items())


def _route(route: str, used: set[str]) -> str:
    """A route of the table, for the levels that it uses: `INT8 in one ring`, `16 bits, then INT4`."""
    hops = [hop.rsplit(" ", 1) for hop in route.split(" | ")]
    widths = [(len(used & set(levels.split("+"))), bits if "INT" in bits else f"{bits} bits") for levels, bits in hops]
    widths = [(width, bits) for width, bits in widths if width]
    if len(widths) < 2:
        return f"{widths[0][1]}{' in one ring' * (widths[0][0] > 1)}" if widths else "stay"
    same = len({bits for _, bits in widths}) == 1
    return f"{widths[0][1]} level by level" if same else ", then ".join(bits for _, bits in widths)


def zero_choice(data: Data, *, model: str | None = None) -> Drawing:
    """Predicted step over the memory of a rank, for every partition on every machine: those with a name, the others,
    and the fastest that fits. `model`: an id of `zero_plan`; default: the largest."""
    choice = machines(data)
    choice = choice[choice.model == model] if model else choice[choice.parameters == choice.parameters.max()]
    if choice.empty:
        raise NothingToShow(f"No zero_plan run of {model or 'a model'} on {' or '.join(_MACHINES)}.")
    data.only(choice)
    order = list(dict.fromkeys(choice["where"]))
    runs = sorted(choice.groupby(["accumulation", "where"]), key=lambda each: (each[0][0], order.index(each[0][1])))
    fig, axes = grid(len(runs), 3, (3.2, 2.6), (0.4, 0.9), least=6)
    columns = axes.shape[1]
    for panel, ((count, where), run) in zip(axes.flat, runs, strict=False):
        best = _partitions(panel, run)
        panel.set_title(f"{where}, {micro_batches(count)}\n{best}", fontsize=7.5)
    for panel in axes[:, 0]:
        panel.set_ylabel("predicted step (s)")
    for panel in axes.flat[max(0, len(runs) - columns) : len(runs)]:
        panel.set_xlabel("memory of a rank (GB)")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), ncols=5 if columns > 1 else 3, **ABOVE)
    sustained = dict(zip(choice.machine, choice.sustained_tflops, strict=True))
    rates = " and ".join(f"{value:g} ({_MACHINES[machine][0]})" for machine, value in sustained.items())
    caption = f"{parameters(choice)}, {choice.seq_len.iloc[0]} tokens per rank and micro-batch, sustained compute "
    caption += f"{rates} TFLOP/s per rank. Every mark is a way to partition; grey area: does not fit. "
    caption += "Panel titles: the level over which the fastest that fits divides weights / gradients / optimizer "
    caption += "(whole: over none). The memory axis is logarithmic; the time axis does not begin at 0, so small "
    caption += "differences look large."
    asked = {"machine": "frontier", "nodes": 48, "model": "gpt-20b", "memory_gb": 64, "accumulation": 1}
    if largest := data.sample("zero_plan", "largest_hierarchical", asked):
        caption += f" On 384 GCDs of 64 GB the hierarchical plan holds {largest.value:.1f} billion parameters."
    return Drawing(fig, "modelled", caption)


def _partitions(panel: Axes, run: pd.DataFrame) -> str:
    """Draws the partitions of a run; the fastest that fits, in words."""
    table, limit = candidates(run), run.memory_gb.iloc[0]
    others, named = table[~table.named], table[table.named].set_index("plan")
    panel.axvspan(limit, 1e4, color="grey", alpha=0.12)
    panel.axvline(limit, color="black", linestyle="--", linewidth=1, label="memory of a rank")
    panel.axhline(run.compute_seconds.iloc[0], color="black", linestyle=":", linewidth=1, label="compute alone")
    style = {"mfc": "none", "color": "#888888", "markersize": 4, "label": "other partitions"}
    panel.plot(others.gigabytes, others.step_seconds, "o", **style)
    for plan, marker in _MARKS.items():
        style = {"marker": marker, "color": color(plan), "linestyle": "none", "label": PLANS[plan]}
        panel.plot(named.gigabytes[plan], named.step_seconds[plan], **style)
    best = others[others.fits].head(1)
    star = {"mfc": "none", "color": PALETTE[3], "linestyle": "none", "label": "fastest that fits"}
    panel.plot(best.gigabytes, best.step_seconds, "*", markersize=15, markeredgewidth=1.5, **star)
    panel.set_xlim(0.8 * table.gigabytes.min(), 4 * limit)
    log_axis(panel.xaxis, [10, 20, 50, 100, 200])
    if best.empty:
        return "none fits"
    found = " / ".join(best[["weights", "gradients", "optimizer"]].iloc[0])
    return "fastest: " + found.replace("-", "whole")

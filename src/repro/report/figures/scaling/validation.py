"""Does the model hold? Predictions beside measurements that were not fitted: collectives, then training steps."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from repro.report.figures.base import MARKERS, Drawing
from repro.report.figures.data import Data, NothingToShow, series
from repro.report.figures.marks import ABOVE, grid, log_axis, round_ticks
from repro.report.figures.scaling.marks import OFF, PLANS, batches, errors, style

_SOURCES = {
    "a100_dgx": "NCCL, two DGX A100 (published)",
    "a100_node": "NCCL, DGX A100 (published)",
    "alps": "NCCL, Alps (published)",
    "leonardo": "NCCL, Leonardo (published)",
    "lumi": "RCCL, LUMI (published)",
    "slingshot11": "Cray MPICH, Slingshot-11 (published)",
}
_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "send_recv", "all_to_all")  # each has one look
_CUT = (0.05, 20)  # ends of the axis of predicted over measured
_SPLITS = {
    "ranks": "more ranks",
    "sizes": "more than 1 MiB",
    "machine": "all, by the catalogue",
    "scenario": "all, by the catalogue with one ring",
}


def scaling_collectives(data: Data) -> Drawing:
    """Predicted against measured times of collectives, one panel per source. Filled: fitted. Hollow: predicted."""
    tables = _measured_collectives(data)
    figure, axes = grid(len(tables), 3, (3.0, 2.9), (0.4, 0.2))
    for panel, (name, table) in zip(axes.flat, tables.items(), strict=False):
        for collective, rows in table.groupby("collective"):
            look = style(_COLLECTIVES.index(collective)) | {"markersize": 3}
            for fitted, some in rows.groupby("fitted"):
                panel.plot(some.seconds, some.predicted, fillstyle="full" if fitted else "none", **look)
            panel.plot([], [], label=collective.replace("_", "-"), **look)
        ends = np.array([table.seconds.min() / 2, table.seconds.max() * 2])
        panel.plot(ends, ends, color="black", linewidth=1)
        for factor in (0.5, 2):
            panel.plot(ends, factor * ends, ":", color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel="measured (s)", ylabel="predicted (s)", xlim=ends, ylim=ends)
        panel.set_title(f"{name}\n{errors(table[~table.fitted].log_error)}", fontsize=8.5)
        panel.legend(fontsize=8, loc="upper left")
    held = pd.concat([table[~table.fitted] for table in tables.values()])
    caption = "A mark is a measured time. Filled: used for the fit. Hollow: predicted; the errors in the titles are "
    caption += f"of these. In all, {errors(held.log_error, ' ')}.{OFF} Line: predicted as measured; dotted: half and "
    caption += "twice the measured time."
    return Drawing(figure, "modelled against published and own measurements", caption)


def _measured_collectives(data: Data) -> dict[str, pd.DataFrame]:
    """By source: `collective`, `seconds`, `predicted`, `log_error` and whether a row was `fitted`."""
    published, probes = data.all_runs("scaling_network"), data.all_runs("fabric_probe")
    tables = {}
    if len(published):
        published = published[(published.protocols == published.protocols.max()) & (published.split == "ranks")]
        for source, some in published.groupby("source"):
            tables[_SOURCES[source]] = series(some).assign(fitted=lambda table: table.part == "fitted")
    if len(probes):
        whole = probes[probes.repeats > 1]  # a probe of tier `smoke` has one
        probes = whole if len(whole) else probes
        tables[f"this machine's network ({' and '.join(sorted(probes.evidence.unique()))})"] = series(probes)
    if not tables:
        raise NothingToShow("No record of a scaling_network or fabric_probe run.")
    data.only(published, probes)
    return tables


def scaling_held_out(data: Data) -> Drawing:
    """Predicted over measured times of collectives by size, a panel for each source and split. Filled: fitted. Hollow:
    held out, with the 90 % band as a vertical line."""
    found = data.runs("scaling_network")
    found = found[found.protocols == found.protocols.max()].sort_values(["source", "split"])
    found = found.drop_duplicates(["source", "split"])
    data.only(found)
    figure, axes = grid(len(found), 4, (2.4, 2.4), (0.3, 0.9), least=6, sharex=True, sharey=True)
    held: list[pd.DataFrame] = []
    for panel, (_, run) in zip(axes.flat, found.iterrows(), strict=False):
        table = series(found.loc[[run.name]])
        held.append(table[table.part == "held_out"])
        _held_out_panel(panel, table)
        part = f"{_SOURCES[run.source]}\nheld out: {_SPLITS[run.split]}\n"
        inside = f"{100 * run.held_out_covered:.0f} % inside the band"
        panel.set_title(f"{part}{errors(held[-1].log_error)};\n{inside}", fontsize=7.5)
    for panel in axes.flat[: len(found)]:
        panel.set_xlabel("bytes")
        panel.tick_params(labelbottom=True)
    for panel in axes[:, 0]:
        panel.set_ylabel("predicted ÷ measured")
    handles = {}
    for panel in axes.flat[: len(found)]:
        handles |= dict(zip(*panel.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), ncols=4, **ABOVE)
    caption = "Filled: fitted. Hollow: held out, with the model's 90 % band as a vertical line; the bands use fitted "
    caption += f"times alone. Titles: of held-out times. In all, {errors(pd.concat(held).log_error, ' ')}.{OFF} Bands "
    caption += f"should hold 90 % of them, and do in {(found.held_out_covered >= 0.9).sum()} of {len(found)} panels; "
    caption += f"in the worst they hold {100 * found.held_out_covered.min():.0f} %. Grey: within a factor of 1.4. "
    caption += "Held-out times had been seen before the splits were final. Both axes are logarithmic; bands that reach "
    caption += f"further are cut at {_CUT[0]:g} and {_CUT[1]:g}."
    return Drawing(figure, "modelled against published measurements", caption)


def _held_out_panel(axes: Axes, table: pd.DataFrame) -> None:
    """Colours by collective; bands seen from the measured time."""
    rows = table[table.part == "held_out"]
    ends = (rows.low / rows.seconds, rows.high / rows.seconds)
    # Of one shade, which makes a smaller picture.
    axes.vlines(rows.nbytes, *ends, color="0.85", linewidth=1, antialiased=False, zorder=0)
    for collective, some in table.groupby("collective"):
        look = style(_COLLECTIVES.index(collective)) | {"markersize": 3}
        for part, each in some.groupby("part"):
            fill = "full" if part == "fitted" else "none"
            axes.plot(each.nbytes, each.predicted / each.seconds, fillstyle=fill, **look)
        axes.plot([], [], label=collective.replace("_", "-"), **look)
    axes.axhline(1, color="black", linewidth=1)
    axes.axhspan(1 / 1.4, 1.4, color="grey", alpha=0.12)
    axes.set(xscale="log", yscale="log", ylim=_CUT)


def step_runs(data: Data) -> pd.DataFrame:
    """Runs of `scaling_step` of all plans, or else of the paper's."""
    found = data.runs("scaling_step")
    return found[found.plans == min(found.plans)]  # "all" before "paper"


def scaling_plans(data: Data) -> Drawing:
    """Predicted against measured training steps of every plan and rate. Filled: calibrated with. Hollow: predicted."""
    found = step_runs(data)
    data.only(found)
    table = series(found)
    plans = [plan for plan in PLANS if plan in set(table.plan)]
    rates, counts = (sorted(table[name].unique()) for name in ("cluster_mbit_s", "accumulation"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.9), width_ratios=[1, 1.25])
    for (rate, count), rows in table.groupby(["cluster_mbit_s", "accumulation"]):
        look = {**style(rates.index(rate)), "marker": MARKERS[counts.index(count)], "markersize": 5, "alpha": 0.8}
        for calibrated, some in rows.groupby("calibrated"):
            fill = "full" if calibrated else "none"
            left.plot(some.measured, some.predicted, fillstyle=fill, **look)
            right.plot(100 * np.expm1(some.log_error), some.plan.map(plans.index), fillstyle=fill, **look)
        left.plot([], [], label=f"{rate:g} Mbit/s, {batches(count)}", **look)
    _seconds_axes(left, table)
    right.set_yticks(range(len(plans)), [PLANS[plan] for plan in plans])
    _errors_axes(right, table[~table.calibrated.astype(bool)].log_error)
    figure.legend(*left.get_legend_handles_labels(), ncols=3, **ABOVE)
    run = found.iloc[0]
    caption = f"{run.nodes * run.packages * run.gcds} processes in {run.nodes} nodes, on one machine; a GPT of 3.8 "
    caption += "million parameters. Colour: rate between nodes per rank. Filled: used to calibrate. Hollow: "
    caption += "predicted; the title counts these. Grey: within 15 %."
    if (found.fabric != "shaped").any():
        caption += " The network was NOT shaped to these rates."
    kinds = " and ".join(sorted(found.evidence.unique()))
    return Drawing(figure, f"{kinds} steps, modelled predictions", caption)


def _seconds_axes(axes: Axes, table: pd.DataFrame) -> None:
    """The diagonal, and 15 % around it."""
    ends = np.array([table.measured.min() / 1.3, table.measured.max() * 1.3])
    axes.plot(ends, ends, color="black", linewidth=1)
    axes.fill_between(ends, ends / 1.15, ends * 1.15, color="grey", alpha=0.2)
    axes.set(xlabel="measured step (s)", ylabel="predicted step (s)")
    for axis in (axes.xaxis, axes.yaxis):
        log_axis(axis, round_ticks(*ends))


def _errors_axes(axes: Axes, log_errors: pd.Series) -> None:
    """Agreement, 15 % around it, and how many of the predicted steps are there."""
    axes.axvspan(-15, 15, color="grey", alpha=0.2)
    axes.axvline(0, color="black", linewidth=1)
    axes.invert_yaxis()
    within = 100 * (np.abs(np.expm1(log_errors)) <= 0.15).mean()
    axes.set_xlabel("predicted against measured (%)")
    text = errors(log_errors).replace("\n", " ")
    axes.set_title(f"{text};\n{within:.0f} % of them are off by less than 15 %", fontsize=8.5)

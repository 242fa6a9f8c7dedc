"""Does the collective model hold? Fitted to published measurements of small machines, compared with those of larger ones."""

from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, Outcome, Point
from repro.records.record import Metric

LARGE = 1 << 20  # bytes from which a message is of the size that training sends


class ScalingNetwork(Point):
    """`source`: NCCL on DGX A100 (microsoft/vidur), or Cray MPICH on LUMI's Slingshot-11 (HLC-Lab/pico)."""

    source: Literal["a100_dgx", "slingshot11"] = "slingshot11"
    protocols: int = Field(3, ge=1, le=3, description="at most so many, each for a range of message sizes")


def run(point: ScalingNetwork) -> Outcome:
    """Choose the protocols' switches by leaving one machine shape out after the other, fit, and predict. The series has every
    measurement with its prediction."""
    from dataclasses import replace

    import pandas as pd

    from repro.scaling import fit, published

    study = published.STUDIES[point.source]()
    choices = fit.choose(study.fitted, study.model, study.candidates, point.protocols - 1)
    switches = choices.switches[0]
    found = fit.fit(study.fitted, replace(study.model, switches=switches))
    parts = {"fitted": study.fitted, "held_out": study.held_out}
    table = pd.concat([fit.predict(found, rows).assign(part=name) for name, rows in parts.items()], ignore_index=True)
    metrics = {}
    for name in parts:
        rows = table[table.part == name]
        large = rows[rows.nbytes >= LARGE]
        for size, chosen in (("", rows), ("_large", large)):
            median, p90 = fit.error_quantiles(chosen.log_error)
            metrics[f"{name}_error_median{size}"] = Metric(value=median, unit="1")
            metrics[f"{name}_error_p90{size}"] = Metric(value=p90, unit="1")
        metrics[f"{name}_rows"] = Metric(value=len(rows), unit="1")
    metrics |= {
        "left_out_error_median": Metric(value=float(choices.error_median[0]), unit="1"),
        "one_protocol_error_median": Metric(value=_without_switches(choices), unit="1"),
    }
    conditions = {"switches_bytes": ", ".join(f"{switch:g}" for switch in switches) or "none"}
    conditions["parameters"] = "; ".join(
        f"{row.parameter} {row.value:.3g} ({row.low:.3g} to {row.high:.3g})" for row in found.table().itertuples()
    )
    series = table.assign(source=point.source).drop(columns=["sizes", "hop"])
    return Outcome(metrics, "modelled", conditions, series, topology=f"{point.source} (published measurements)")


def _without_switches(choices: "object") -> float:
    rows = choices[[not switches for switches in choices.switches]]
    return float(rows.error_median.iloc[0])


def label(point: ScalingNetwork) -> str:
    """Short name of a point for its record file."""
    return f"{point.source}-{point.protocols}p"


_ERRORS = {
    f"{part}_error_{q}{size}" for part in ("fitted", "held_out") for q in ("median", "p90") for size in ("", "_large")
}
EXPERIMENT = Experiment(
    summary="The collective model against published measurements that it was not fitted to",
    parameters=ScalingNetwork,
    run=run,
    label=label,
    reports=frozenset(_ERRORS)
    | {
        "fitted_rows",
        "held_out_rows",
        "left_out_error_median",
        "one_protocol_error_median",
        "switches_bytes",
        "parameters",
    },
    timed=False,
)

"""Fit the collective model to one part of a study and predict the other."""

from dataclasses import replace

import pandas as pd

from repro.experiments.base import Outcome
from repro.experiments.scaling_network import ScalingNetwork, ScalingNetworkMetrics
from repro.scaling import fit, published

LARGE = 1 << 20  # bytes from which a message is of the size that training sends


def run(point: ScalingNetwork) -> Outcome:
    """Choose the protocols' switches by leaving one machine shape out after the other, fit, and predict. The series has every
    measurement with its prediction."""
    study = published.STUDIES[point.source]()
    choices = fit.choose(study.fitted, study.model, study.candidates, point.protocols - 1)
    switches = choices.switches[0]
    found = fit.fit(study.fitted, replace(study.model, switches=switches))
    parts = {"fitted": study.fitted, "held_out": study.held_out}
    table = pd.concat([fit.predict(found, rows).assign(part=name) for name, rows in parts.items()], ignore_index=True)
    errors = {}
    for name in parts:
        rows = table[table.part == name]
        for size, chosen in (("", rows), ("_large", rows[rows.nbytes >= LARGE])):
            median, p90 = fit.error_quantiles(chosen.log_error)
            errors |= {f"{name}_error_median{size}": median, f"{name}_error_p90{size}": p90}
        errors[f"{name}_rows"] = len(rows)
    without_switches = choices[[not switches for switches in choices.switches]]
    metrics = ScalingNetworkMetrics(
        left_out_error_median=choices.error_median[0],
        one_protocol_error_median=without_switches.error_median.iloc[0],
        **errors,
    )
    conditions = {"switches_bytes": ", ".join(f"{switch:g}" for switch in switches) or "none"}
    conditions["parameters"] = "; ".join(
        f"{row.parameter} {row.value:.3g} ({row.low:.3g} to {row.high:.3g})" for row in found.table().itertuples()
    )
    series = table.assign(source=point.source).drop(columns=["sizes", "hop"])
    return Outcome(metrics, "modelled", conditions, series, topology=f"{point.source} (published measurements)")

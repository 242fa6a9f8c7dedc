"""Fit the collective model to one part of a study and predict the other."""

from dataclasses import replace

import pandas as pd

from repro.experiments.base import Outcome
from repro.experiments.scaling_network import PARTS, ScalingNetwork, ScalingNetworkMetrics
from repro.scaling import fit, published

LARGE = 1 << 20  # bytes from which a message is of the size that training sends


def run(point: ScalingNetwork) -> Outcome:
    """Choose the protocols' switches by cross-validation, fit, and predict. Series: all measurements, predicted."""
    study = published.STUDIES[point.source]()
    choices = fit.choose(study.fitted, study.model, study.candidates, point.protocols - 1)
    switches = choices.switches[0]
    found = fit.fit(study.fitted, replace(study.model, switches=switches))
    table = pd.concat([fit.predict(found, getattr(study, part)).assign(part=part) for part in PARTS], ignore_index=True)
    errors = {}
    for name in PARTS:
        rows = table[table.part == name]
        for size, chosen in (("", rows), ("_large", rows[rows.nbytes >= LARGE])):
            median, p90 = fit.error_quantiles(chosen.log_error)
            errors |= {f"{name}_error_median{size}": median, f"{name}_error_p90{size}": p90}
        errors[f"{name}_rows"] = len(rows)
    errors["left_out_error_median"] = choices.error_median[0]
    errors["one_protocol_error_median"] = choices[~choices.switches.astype(bool)].error_median.iloc[0]
    values = (f"{p.parameter} {p.value:.3g} ({p.low:.3g} to {p.high:.3g})" for p in found.table().itertuples())
    conditions = {
        "switches_bytes": ", ".join(f"{switch:g}" for switch in switches) or "none",
        "parameters": "; ".join(values),
    }
    series = table.assign(source=point.source).drop(columns=["sizes", "hop"])
    metrics = ScalingNetworkMetrics(**errors)
    return Outcome(metrics, "modelled", conditions, series, topology=f"{point.source} (published measurements)")

"""Fit the collective model to one part of a study and predict the other, with a band."""

from dataclasses import replace

import numpy as np
import pandas as pd

from repro.experiments.base import Outcome
from repro.experiments.scaling_network import PARTS, ScalingNetwork, ScalingNetworkMetrics
from repro.scaling import fit, published, validate
from repro.scaling.published import LARGE, Study


def run(point: ScalingNetwork) -> Outcome:
    """Fit and predict. Series: all measurements, predicted, the held-out ones with the ends of their bands."""
    study = published.STUDIES[point.source]()
    if point.split in ("machine", "scenario"):
        table, chosen = published.by_catalogue(study, point.split).assign(part="held_out"), {}
        machine = study.machines[point.split]
        taken = f" but {', '.join(study.taken)}, from these rows" if study.taken else ""
        parameters = f"of {machine} in the catalogue, none fitted here{taken}"
        conditions = {"switches_bytes": "none", "parameters": parameters}
    else:
        table, chosen, conditions = _fitted(point, study)
    series = table.assign(source=point.source, split=point.split).drop(columns=["sizes", "hop"])
    metrics = ScalingNetworkMetrics(**_errors(table), **chosen)
    return Outcome(metrics, "modelled", conditions, series, topology=f"{point.source} (published measurements)")


def _fitted(point: ScalingNetwork, study: Study) -> tuple[pd.DataFrame, dict[str, float], dict[str, str]]:
    """All rows predicted, the errors by which protocols were chosen, and what was fitted. The switches of the protocols
    come from cross-validation among the fitted rows; NCCL has its own."""
    fitted, held_out = study.split(point.split)
    model, chosen = study.model, {}
    if study.candidates:
        choices = fit.choose(fitted, model, study.candidates, point.protocols - 1)
        model = replace(model, switches=choices.switches[0])
        chosen["left_out_error_median"] = choices.error_median[0]
        chosen["one_protocol_error_median"] = choices[~choices.switches.astype(bool)].error_median.iloc[0]
    found = fit.fit(fitted, model)
    carry = validate.carries(fitted, model)
    rows = validate.banded(found, fitted, held_out, validate.band(fitted, model, carry), carry)
    parts = dict(zip(PARTS, (fit.predict(found, fitted), rows), strict=True))
    table = pd.concat([rows.assign(part=part) for part, rows in parts.items()], ignore_index=True)
    values = (f"{p.parameter} {p.value:.3g} ({p.low:.3g} to {p.high:.3g})" for p in found.table().itertuples())
    switches = ", ".join(f"{switch:g}" for switch in model.switches) or "none"
    how = "; errors carried over to more ranks" if carry else ""
    return table, chosen, {"switches_bytes": switches, "parameters": "; ".join(values) + how}


def _errors(table: pd.DataFrame) -> dict[str, float]:
    found = {}
    for name, rows in table.groupby("part"):
        for size, chosen in (("", rows), ("_large", rows[rows.nbytes > LARGE])):
            if chosen.empty:  # fitted to small messages only
                continue
            median, p90 = fit.error_quantiles(chosen.log_error)
            found |= {f"{name}_error_median{size}": median, f"{name}_error_p90{size}": p90}
            if name == "held_out":
                half = np.expm1(np.log(chosen.high / chosen.low) / 2)
                found |= {f"{name}_covered{size}": chosen.inside.mean(), f"{name}_half_band{size}": half.median()}
        found[f"{name}_rows"] = len(rows)
    held_out = table[table.part == "held_out"].log_error
    found["held_out_within_40"] = (np.expm1(held_out.abs()) <= 0.4).mean()
    found["held_out_bias"] = float(np.expm1(held_out.median()))
    if len(own := validate.scatter(table)):
        found["scatter_median"], found["scatter_p90"] = fit.error_quantiles(own)
    return found

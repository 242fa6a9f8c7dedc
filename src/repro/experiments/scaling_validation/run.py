"""Fit the overlap, and predict every published point with it and with bands of all that is uncertain."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from repro.experiments.base import Outcome
from repro.experiments.scaling_validation import ScalingValidation, ScalingValidationMetrics
from repro.scaling import overlap
from repro.scaling.whatif import BAND

ASSUMED = 0.7  # the middle of the interval that machines had before it was fitted
RECOMPUTED = math.log(4 / 3)  # passes per step with recomputation, over those without


def run(point: ScalingValidation) -> Outcome:
    """Series, by `kind`: point has a row per published point, profile the fit's rms error over the overlap."""
    points = overlap.published()
    fitted = points.fitted.to_numpy()
    found = overlap.fit(points[fitted], point.draws, point.seed)
    table = _predicted(points, found.overlap, point)
    table.loc[fitted, "left_out"] = points.ratio[fitted] * np.exp(found.left_out)
    errors = np.log(table.predicted / table.ratio)
    tflops = np.log(np.concatenate([table[f"predicted_{plan}"] / table[plan] for plan in ("zero3", "zeropp")]))
    metrics = ScalingValidationMetrics(
        overlap_low=found.low,
        overlap=found.overlap,
        overlap_high=found.high,
        rms_log_error=_rms(errors[fitted]),
        rms_log_error_left_out=_rms(found.left_out),
        rms_log_error_held_out=_rms(errors[~fitted]),
        rms_log_error_assumed=float(np.interp(ASSUMED, found.profile.overlap, found.profile.rms)),
        worst_log_error=float(errors[fitted].abs().max()),
        within_band=_inside(table, ""),
        within_band_machine=_inside(table, "_machine"),
        tflops_log_bias=float(np.mean(tflops) + RECOMPUTED),
        tflops_log_spread=float(np.std(tflops)),
    )
    series = pd.concat([table.assign(kind="point"), found.profile.assign(kind="profile")], ignore_index=True)
    return Outcome(metrics, "modelled", series=series, topology="24 DGX-2 (published measurements)")


def _predicted(points: pd.DataFrame, best: float, point: ScalingValidation) -> pd.DataFrame:
    """With `predicted` ratios at the best overlap, their bands, and TFLOPS."""
    rows = []
    off3, offpp = (overlap.model_error(plan, point.draws, point.seed) for plan in ("zero3", "zeropp"))
    for each in points.to_dict("records"):
        zero3, zeropp = overlap.steps(each, overlap=best)
        drawn3, drawnpp = overlap.steps(each, point.draws)
        drawn = drawn3.seconds / drawnpp.seconds
        row = each | {"predicted": float(zero3.seconds / zeropp.seconds)}
        for of, values in (("", drawn * off3 / offpp), ("_machine", drawn)):
            row[f"predicted_low{of}"], _, row[f"predicted_high{of}"] = np.quantile(values, BAND)
        for plan, step in (("zero3", zero3), ("zeropp", zeropp)):
            row[f"predicted_{plan}"] = float(step.tflops_per_rank)
        rows.append(row)
    return pd.DataFrame(rows)


def _inside(table: pd.DataFrame, of: str) -> float:
    """Share of the published ratios in their bands."""
    return float(table.ratio.between(table[f"predicted_low{of}"], table[f"predicted_high{of}"]).mean())


def _rms(errors: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))

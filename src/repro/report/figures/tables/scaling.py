"""Tables of the notebook on the papers' sizes."""

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler

from repro.report.figures.data import Data, NothingToShow, series
from repro.report.figures.scaling.inference import AUTHORS_FILE, PAPERS_MODELS
from repro.report.figures.scaling.marks import MACHINES, PLANS
from repro.report.figures.scaling.training import frontier_runs
from repro.report.figures.scaling.validation import step_runs
from repro.report.figures.tables import rounded

_PROBED = "median, not calibrated"
_NAMED_PLANS = "(?:zero3|zeropp|mics|hierarchical_fp|hierarchical)"


def network_errors(data: Data) -> pd.DataFrame:
    """Errors of times that were held out of a fit, in percent, by source, split and number of protocols."""
    found = data.runs("scaling_network").set_index(["source", "split", "protocols"]).filter(regex="^held_out_error")
    return (
        (100 * found)
        .round()
        .convert_dtypes()
        .rename(columns=lambda name: f"{name.removeprefix('held_out_error_')} (%)")
    )


def protocols(data: Data) -> pd.DataFrame:
    """Where a library changes its protocol, as fitted, and how well each choice predicts a shape that was left out."""
    names = {
        "switches_bytes": "switches at (bytes)",
        "left_out_error_median": "error left out",
        "one_protocol_error_median": "with one protocol",
        "parameters": "parameters",
    }
    table = data.runs("scaling_network").set_index(["source", "split", "protocols"])
    return table[list(names)].rename(columns=names).round(3)


def step_errors(data: Data) -> Styler:
    """Predicted steps against measured ones by rate and micro-batches, in percent; at the right the median without
    calibration, from the probe alone."""
    new = series(step_runs(data)).query("calibrated == False")
    by_rate = (100 * np.expm1(new.log_error)).groupby([new.cluster_mbit_s, new.accumulation])
    within = by_rate.agg(lambda each: 100 * (each.abs() <= 15).mean())
    table = by_rate.agg(["count", "median", "min", "max"]).assign(**{"within 15 %": within}).round()
    table[_PROBED] = (
        (100 * np.expm1(new.log_error_probed_only)).groupby([new.cluster_mbit_s, new.accumulation]).median()
    )
    return rounded(table.rename_axis(["Mbit/s between nodes", "micro-batches"]), 0)


def step_factors(data: Data) -> pd.DataFrame:
    """Factors that were calibrated on three plans at one rate."""
    table = step_runs(data).set_index(["accumulation", "rates"]).filter(like="factor_").round(2)
    return table.rename(columns=lambda name: name.removeprefix("factor_").replace("_", " "))


def published_steps(data: Data) -> pd.DataFrame:
    """The fitted overlap, and errors of published speedups that were fitted and that were not."""
    found = data.runs("scaling_validation").nlargest(1, "draws")
    errors = ["rms_log_error", "rms_log_error_left_out", "rms_log_error_held_out", "rms_log_error_assumed"]
    shares = ["within_band", "within_band_machine", "tflops_log_bias", "tflops_log_spread"]
    columns = ["overlap_low", "overlap", "overlap_high", *errors, "worst_log_error", *shares]
    return found[columns].T.round(3).set_axis(["value"], axis=1).rename(index=lambda name: name.replace("_", " "))


def training(data: Data) -> pd.DataFrame:
    """Predicted steps on Frontier, by model, micro-batches and plan; critical: what a step waits for."""
    frontier = frontier_runs(data)
    columns = {"step_seconds": "step (s)", "tflops": "TFLOPS per GCD", "efficiency": "efficiency"}
    columns |= {"gigabytes": "GB a rank", "critical": "critical"}
    steps = pd.wide_to_long(frontier, list(columns), "path", "plan", sep="_", suffix=_NAMED_PLANS).reset_index("plan")
    steps = steps.replace({"plan": PLANS, "hardware": MACHINES})
    table = steps.set_index(["hardware", "model", "accumulation", "plan"])[list(columns)].sort_index()
    return table.rename(columns=columns).round(2)


def four_numbers(data: Data) -> pd.DataFrame:
    """Share of the draws that give each of the paper's numbers, and all."""
    rungs = data.runs("scaling_ladder").nlargest(1, "draws")
    table = rungs.filter(like="share_").T.mul(100).round(1).set_axis(["% of draws"], axis=1)
    return table.rename(index=lambda name: name.removeprefix("share_").replace("_", " "))


def priors(data: Data) -> pd.DataFrame:
    """The priors of the draws."""
    rungs = data.runs("scaling_ladder").nlargest(1, "draws")
    each = [prior.split(": ", 1) for prior in rungs.priors.item().split("; ")]
    return pd.DataFrame(each, columns=["what", "prior"]).set_index("what")


def largest_models(data: Data) -> pd.DataFrame:
    """The largest model that each plan holds by the states' bytes alone, 10⁹ parameters."""
    maps = data.runs("scaling_map")
    maps = maps[maps.over == "size_ranks"]
    if maps.empty:
        raise NothingToShow("No map over sizes and ranks.")
    largest = maps.replace({"hardware": MACHINES}).set_index("hardware").filter(like="largest_").round()
    return largest.rename(columns=lambda name: f"{PLANS[name.removeprefix('largest_')]} (10⁹)")


def serving(data: Data) -> pd.DataFrame:
    """Predicted seconds of one request, of all, and the speedups."""
    names = {
        "requests": "requests",
        "single_request_s": "one alone (s)",
        "seconds_fused": "fused (s)",
        "seconds_instances": "instances (s)",
        "speedup_over_instances": "instances ÷ fused",
        "speedup_over_serial": "one after the other ÷ fused",
    }
    runs = data.runs("scaling_serving").sort_values(["model", "requests"]).set_index("model")
    runs = runs.rename(index=lambda name: f"{PAPERS_MODELS[name]}{AUTHORS_FILE * name.endswith('released')}")
    return runs[list(names)].rename(columns=names).round(1)

"""Probe and train on the same network, calibrate, and compare predicted steps with measured ones."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from repro import quantize, scaling
from repro.experiments.base import Outcome
from repro.experiments.common.launched import ranks_of
from repro.experiments.fabric_probe.run import Probe, fitted, probe
from repro.experiments.scaling_step import ERRORS, EXPERIMENT, ScalingStep, ScalingStepMetrics
from repro.experiments.zero_train import WARM_UP, ZeroTrain
from repro.experiments.zero_train.run import Report, train
from repro.scaling.calibrate import FACTORS
from repro.scaling.fit import error_quantiles
from repro.scaling.machines import Machine
from repro.zero import Plan, plan

AS_PROBED = dict.fromkeys(FACTORS, 1.0)
CALIBRATED = ("ddp", "zero3", "hierarchical")  # at the first rate
SIZES = [4096 * 4**k for k in range(5)]  # bytes of the probe's tensors


def run(point: ScalingStep) -> Outcome:
    """Probe and train at each rate, calibrate, predict. The series has a row per plan and rate."""
    quantize.warm_up()
    rates = [float(rate) for rate in point.rates.split(",")]
    probes: list[tuple[float, list[Probe]]] = []  # with the rate of the links over the first one
    scales: dict[float, float] = {}
    trained: list[tuple[ZeroTrain, Plan, list[Report]]] = []
    for rate in rates:
        trainings = point.trainings(rate)
        topology = trainings[0].topology
        with ranks_of(trainings[0], EXPERIMENT.timeout_s) as ranks:
            scales[rate] = rate / rates[0] if ranks.links.state == "shaped" else 1.0
            probes.append((scales[rate], ranks.run(probe, topology, SIZES, point.repeats, last=False)))
            for number, training in enumerate(trainings, 1):
                # Every plan in processes of its own: after others in the same ones its steps take longer.
                last = rate == rates[-1] and number == len(trainings)
                chosen = plan.named(training.plan, topology)
                trained.append((training, chosen, ranks.run(train, training, chosen, last=last)))
    probed = fitted(ranks, probes)
    machines = {rate: probed.machine(scale) for rate, scale in scales.items()}
    measured = [(each.cluster_mbit_s, _observation(each, machines[each.cluster_mbit_s], *of)) for each, *of in trained]
    known = [rate == rates[0] and one.plan.name in CALIBRATED for rate, one in measured]
    factors = scaling.calibrate([one for (_, one), calibrated in zip(measured, known, strict=True) if calibrated])
    table = _compared(measured, factors).assign(calibrated=known)
    metrics = ScalingStepMetrics(
        first_plan_over_fastest=_first_over_fastest(table),
        **_errors(table[~table.calibrated]),
        **{f"factor_{name}": value for name, value in factors.items()},
        **{f"probe_{name}": value for name, value in probed.metrics},
    )
    state = ranks.links.state
    return Outcome(metrics, ranks.links.evidence, {"fabric": state}, table, point.describe(state))


def _observation(training: ZeroTrain, probed: Machine, plan: Plan, ranks: Sequence[Report]) -> scaling.Observation:
    """The measured step of a plan, on the machine as it was probed."""
    timed = np.max([rank.steps.seconds[WARM_UP:] for rank in ranks], axis=0)
    alone = max(rank.compute_seconds or 0.0 for rank in ranks)
    size = (training.micro_batch, training.accumulation)
    return scaling.Observation(plan, training.gpt, probed, float(np.median(timed)), *size, alone)


def _compared(measured: list[tuple[float, scaling.Observation]], factors: dict[str, float]) -> pd.DataFrame:
    """A row per plan and rate: measured and predicted steps, and the logarithms of their ratios."""
    table = pd.DataFrame(
        {
            "plan": one.plan.name,
            "cluster_mbit_s": rate,
            "measured": one.seconds,
            "predicted": float(one.predicted(factors)),
            "probed_only": float(one.predicted(AS_PROBED)),
            "compute": one.compute_s,
        }
        for rate, one in measured
    )
    errors = np.log(table[["predicted", "probed_only"]].div(table.measured, axis=0))
    return table.assign(log_error=errors.predicted, log_error_probed_only=errors.probed_only)


def _first_over_fastest(table: pd.DataFrame) -> float:
    """What who trusts the prediction loses: the measured step of the plan that is predicted to be fastest, over the fastest
    measured step; at the rate where it is most."""
    each = table.groupby("cluster_mbit_s")[["measured", "predicted"]]
    return float(max(rows.measured[rows.predicted.idxmin()] / rows.measured.min() for _, rows in each))


def _errors(new: pd.DataFrame) -> dict[str, float]:
    """Of the steps that were not calibrated with, with the calibration and without any."""
    found = {"steps_within_15_percent": float((np.abs(np.expm1(new.log_error)) <= 0.15).mean())}
    for which in ("", "_probed_only"):
        quantiles = error_quantiles(new[f"log_error{which}"], (0.5, 0.9, 1.0))
        found |= {f"step_error_{what}{which}": q for what, q in zip(ERRORS, quantiles, strict=True)}
    return found

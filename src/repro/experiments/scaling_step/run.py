"""Probe and train on the same ranks, calibrate, and compare predicted steps with measured ones."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch._dynamo  # (AdamW imports it on first use: once here, not in every rank)

from repro import launch, paths, quantize, scaling
from repro.experiments.base import Outcome
from repro.experiments.common.probe.fitted import Probed, fitted
from repro.experiments.common.probe.ranks import cases
from repro.experiments.scaling_step import TIMEOUT_S, ScalingStep, ScalingStepMetrics
from repro.experiments.scaling_step.ranks import Found, probe_and_train
from repro.experiments.zero_train import WARM_UP
from repro.launch import network
from repro.scaling.fit import error_quantiles
from repro.zero import plan

AS_PROBED = {"message": 1.0, "bytes": 1.0, "memory": 1.0, "exposed": 0.0}
CALIBRATED = ("ddp", "zero3", "hierarchical")  # at the first rate
SIZES = [4096 * 4**k for k in range(5)]  # bytes of the probe's tensors


@dataclass(frozen=True, eq=False)
class Measured:
    """A step that was measured at a rate, and what was probed there."""

    rate: float
    observation: scaling.Observation
    probe: Probed

    @property
    def calibrates(self) -> bool:
        return self.observation.plan.name in CALIBRATED


def run(point: ScalingStep) -> Outcome:
    """Probe and train at each rate, calibrate, predict. The series has a row per plan and rate."""
    quantize.warm_up()
    rates = [float(rate) for rate in point.rates.split(",")]
    measured: list[Measured] = []
    for rate in rates:
        found, evidence, state = _train(point, rate, last=rate == rates[-1])
        measured += _observations(point, rate, found, state)
    factors = scaling.calibrate([m.observation for m in measured if m.calibrates and m.rate == rates[0]])
    table = _compared(measured, factors, rates[0])
    probed = {f"probe_{name}": value for name, value in measured[0].probe.metrics}
    return Outcome(
        metrics=ScalingStepMetrics(**_errors(table), **{f"factor_{k}": v for k, v in factors.items()}, **probed),
        evidence=evidence,
        conditions={"fabric": state},
        series=table,
        topology=point.describe(state),
    )


def _train(point: ScalingStep, rate: float, last: bool) -> tuple[list[Found], str, str]:
    """What every rank found at a rate, the kind of evidence, and the network's state. Ranks of a job stay until the last rate."""
    trainings = point.trainings(rate)
    topology = trainings[0].topology
    plans = [plan.named(training.plan, topology) for training in trainings]
    corpus = paths.data("tinyshakespeare.txt").read_bytes()
    with network.between(topology) as links:
        found = launch.launch(
            *(probe_and_train, topology.world_size, topology, cases(topology, SIZES)),
            *(point.repeats, list(zip(trainings, plans, strict=True)), corpus),
            fabric=links.fabric,
            topology=topology,
            timeout_s=TIMEOUT_S - 15,
            first_only=last,
        )
        return found, links.evidence, links.state


def _observations(point: ScalingStep, rate: float, found: list[Found], state: str) -> list[Measured]:
    """A measured step per plan, on the machine as it was probed at this rate."""
    native, host = torch.cuda.is_available(), state != "the machine's own"
    trainings = point.trainings(rate)
    topology = trainings[0].topology
    probed = fitted(topology, cases(topology, SIZES), [rank.probe for rank in found], native, host)
    measured = []
    for number, training in enumerate(trainings):
        ranks = [rank.reports[number] for rank in found]
        timed = np.max([[step.seconds for step in rank.steps[WARM_UP:]] for rank in ranks], axis=0)
        observation = scaling.Observation(
            plan.named(training.plan, topology),
            training.gpt,
            probed.machine(topology, native),
            float(np.median(timed)),
            training.micro_batch,
            training.accumulation,
            max(rank.compute_seconds or 0.0 for rank in ranks),
        )
        measured.append(Measured(rate, observation, probed))
    return measured


def _compared(measured: list[Measured], factors: dict[str, float], calibrated_at: float) -> pd.DataFrame:
    rows = []
    for one in measured:
        predicted = float(one.observation.predicted(factors))
        probed_only = float(one.observation.predicted(AS_PROBED))
        rows.append(
            {
                "plan": one.observation.plan.name,
                "cluster_mbit_s": one.rate,
                "calibrated": one.calibrates and one.rate == calibrated_at,
                "measured": one.observation.seconds,
                "predicted": predicted,
                "probed_only": probed_only,
                "compute": one.observation.compute_s,
                "log_error": float(np.log(predicted / one.observation.seconds)),
                "log_error_probed_only": float(np.log(probed_only / one.observation.seconds)),
            }
        )
    return pd.DataFrame(rows)


def _errors(table: pd.DataFrame) -> dict[str, float]:
    """Of the steps that were not calibrated with, with the calibration and without any."""
    new, found = table[~table.calibrated], {}
    for name, errors in (("", new.log_error), ("_probed_only", new.log_error_probed_only)):
        quantiles = error_quantiles(errors, (0.5, 0.9, 1.0))
        found |= {f"step_error_{what}{name}": q for what, q in zip(("median", "p90", "worst"), quantiles, strict=True)}
    within = np.abs(np.expm1(new.log_error)) <= 0.15
    return found | {"steps_within_15_percent": float(within.mean())}

"""Does the step model hold? Probe the network, calibrate the processors' work on three plans at one rate, predict every plan at every rate,
and compare with steps that the same ranks train."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from repro.experiments import _probe
from repro.experiments.base import Experiment, Outcome, Point, Shape
from repro.experiments.zero_train import WARM_UP, ZeroTrain
from repro.records.record import Metric

if TYPE_CHECKING:
    import pandas as pd

    from repro.experiments._scaling_ranks import Found
    from repro.scaling import Observation

PLANS = (
    *("ddp", "zero1", "zero2", "zero3", "hpz", "qwz", "qgz", "zeropp", "mics", "hsdp"),
    *("hierarchical", "hierarchical_fp"),
)
PAPER = ("ddp", "zero3", "zeropp", "hierarchical")
AS_PROBED = {"message": 1.0, "bytes": 1.0, "memory": 1.0, "exposed": 0.0}
CALIBRATED = ("ddp", "zero3", "hierarchical")  # at the first rate
SIZES = tuple(4096 * 4**k for k in range(5))  # bytes of the probe's tensors
TIMEOUT_S = 3600.0


class ScalingStep(Point):
    """Ranks: nodes * packages * gcds; the model and the network are those of zero_train. `rates`: between nodes, Mbit/s per rank with all
    ranks busy, separated by commas; the first is the one that is calibrated at."""

    plans: Literal["all", "paper"] = Field("all", description="paper: the plans that it compares, and DDP")
    rates: str = Field("25,12.5,50", pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?)*$")
    nodes: int = Field(2, ge=2, description="at least two: the plans differ in what leaves a node")
    packages: int = Field(2, ge=1)
    gcds: int = Field(2, ge=1)
    accumulation: int = Field(1, ge=1, description="backward passes per step")
    steps: int = Field(5, ge=WARM_UP + 1)
    repeats: int = Field(5, ge=1, description="of each collective of the probe")

    def trainings(self, rate: float) -> list[ZeroTrain]:
        """What is trained at a rate, one after the other."""
        names = ("nodes", "packages", "gcds", "accumulation", "steps", "seed")
        same = {name: getattr(self, name) for name in names} | {"cluster_mbit_s": rate}
        return [ZeroTrain(plan=plan, **same) for plan in (PLANS if self.plans == "all" else PAPER)]


@dataclass(frozen=True, eq=False)
class Measured:
    """A step that was measured at a rate, and what was probed there."""

    rate: float
    observation: "Observation"
    probe: _probe.Probed

    @property
    def calibrates(self) -> bool:
        return self.observation.plan.name in CALIBRATED


def run(point: ScalingStep) -> Outcome:
    """Probe and train at each rate, calibrate, predict. The series has a row per plan and rate."""
    import torch._dynamo  # noqa: F401  (AdamW imports it on first use: once here, not in every rank)

    from repro import quantize, scaling

    quantize.warm_up()
    rates = [float(rate) for rate in point.rates.split(",")]
    measured: list[Measured] = []
    for rate in rates:
        found, evidence, state = _train(point, rate, last=rate == rates[-1])
        measured += _observations(point, rate, found, state)
    factors = scaling.calibrate([m.observation for m in measured if m.calibrates and m.rate == rates[0]])
    table = _compared(measured, factors, rates[0])
    probed = {f"probe_{name}": metric for name, metric in measured[0].probe.metrics.items()}
    return Outcome(
        metrics=_metrics(table, factors) | probed,
        evidence=evidence,
        conditions={"fabric": state},
        series=table,
        topology=f"{point.nodes} nodes x {point.packages} packages x {point.gcds} GCDs, {state}",
    )


def _train(point: ScalingStep, rate: float, last: bool) -> "tuple[list[Found], str, str]":
    """What every rank found at a rate, the kind of evidence, and the network's state. Ranks of a job stay until the last rate."""
    from repro import launch, paths
    from repro.experiments import _probe_ranks, _scaling_ranks
    from repro.launch import network
    from repro.zero import plan

    trainings = point.trainings(rate)
    topology = trainings[0].topology
    plans = [plan.named(training.plan, topology) for training in trainings]
    corpus = paths.data("tinyshakespeare.txt").read_bytes()
    with network.between(topology) as links:
        found = launch.launch(
            *(_scaling_ranks.probe_and_train, topology.world_size, topology, _probe_ranks.cases(topology, list(SIZES))),
            *(point.repeats, list(zip(trainings, plans, strict=True)), corpus),
            fabric=links.fabric,
            topology=topology,
            timeout_s=TIMEOUT_S - 15,
            first_only=last,
        )
        return found, links.evidence, links.state


def _observations(point: ScalingStep, rate: float, found: "list[Found]", state: str) -> list[Measured]:
    """A measured step per plan, on the machine as it was probed at this rate."""
    import numpy as np
    import torch

    from repro import scaling
    from repro.experiments import _probe_ranks
    from repro.zero import plan

    native, host = torch.cuda.is_available(), state != "the machine's own"
    trainings = point.trainings(rate)
    topology = trainings[0].topology
    cases = _probe_ranks.cases(topology, list(SIZES))
    probed = _probe.fitted(topology, cases, [rank.probe for rank in found], native, host)
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


def _compared(measured: list[Measured], factors: dict[str, float], calibrated_at: float) -> "pd.DataFrame":
    import numpy as np
    import pandas as pd

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


def _metrics(table: "pd.DataFrame", factors: dict[str, float]) -> dict[str, Metric]:
    """Errors of the steps that were not calibrated with, and without any calibration; the factors."""
    import numpy as np

    from repro.scaling.fit import error_quantiles

    new, found = table[~table.calibrated], {}
    for name, errors in (("", new.log_error), ("_probed_only", new.log_error_probed_only)):
        median, p90, worst = error_quantiles(errors, (0.5, 0.9, 1.0))
        for what, value in (("median", median), ("p90", p90), ("worst", worst)):
            found[f"step_error_{what}{name}"] = Metric(value=value, unit="1")
    found["steps_within_15_percent"] = Metric(value=float((np.abs(np.expm1(new.log_error)) <= 0.15).mean()), unit="1")
    return found | {f"factor_{name}": Metric(value=value, unit="×") for name, value in factors.items()}


def label(point: ScalingStep) -> str:
    """Short name of a point for its record file."""
    shape = f"{point.nodes}x{point.packages}x{point.gcds}"
    return f"{point.plans}-{shape}-{point.accumulation}x{point.steps}-{point.rates.replace(',', '_')}mbit"


EXPERIMENT = Experiment(
    summary="Predicted and measured step times of the ZeRO plans, the network probed in the same run",
    parameters=ScalingStep,
    run=run,
    label=label,
    reports=frozenset(f"probe_{name}" for name in _probe.REPORTS)
    | {f"step_error_{what}{name}" for what in ("median", "p90", "worst") for name in ("", "_probed_only")}
    | {"factor_message", "factor_bytes", "factor_memory", "factor_exposed", "steps_within_15_percent", "fabric"},
    shape=lambda point: Shape(point.nodes, point.packages, point.gcds),
    timeout_s=TIMEOUT_S,
)

"""Does the step model hold? Probe the network, predict the step of every plan from that, then train and compare: in one run, on the
same ranks, so that a prediction cannot profit from the times it is compared with."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from repro.experiments import _probe
from repro.experiments.base import Experiment, Outcome, Point, Shape
from repro.experiments.zero_train import WARM_UP, ZeroTrain
from repro.record import Metric

if TYPE_CHECKING:
    import pandas as pd

    from repro.experiments._probe import Probed
    from repro.experiments._zero_ranks import Report

PLANS = (
    *("ddp", "zero1", "zero2", "zero3", "hpz", "qwz", "qgz", "zeropp", "mics", "hsdp"),
    *("hierarchical", "hierarchical_fp"),
)
PAPER = ("zero3", "zeropp", "hierarchical")
TIMEOUT_S = 1800.0


class ScalingStep(Point):
    """Ranks: nodes * packages * gcds; the model and the network are those of zero_train."""

    plans: Literal["all", "paper"] = Field("all", description="paper: the three plans that it compares")
    nodes: int = Field(2, ge=2, description="at least two: the plans differ in what leaves a node")
    packages: int = Field(2, ge=1)
    gcds: int = Field(2, ge=1)
    accumulation: int = Field(1, ge=1, description="backward passes per step")
    steps: int = Field(5, ge=WARM_UP + 1)
    repeats: int = Field(5, ge=1, description="of each collective of the probe")
    cluster_mbit_s: float = Field(25.0, gt=0, description="inter-node rate per rank with all ranks busy")

    @property
    def trainings(self) -> list[ZeroTrain]:
        """What is trained, one after the other."""
        names = ("nodes", "packages", "gcds", "accumulation", "steps", "cluster_mbit_s", "seed")
        same = {name: getattr(self, name) for name in names}
        return [ZeroTrain(plan=plan, **same) for plan in (PLANS if self.plans == "all" else PAPER)]


def run(point: ScalingStep) -> Outcome:
    """Probe, train, predict."""
    import torch._dynamo  # (AdamW imports it on first use: once here, not in every rank)

    from repro import launch, network, paths, quantize
    from repro.experiments import _probe_ranks, _scaling_ranks
    from repro.zero import plan

    trainings = point.trainings
    topology = trainings[0].topology
    plans = [plan.named(training.plan, topology) for training in trainings]
    quantize.warm_up()
    cases = _probe_ranks.cases(topology, [4096 * 4**k for k in range(5)])
    corpus = paths.data("tinyshakespeare.txt").read_bytes()
    with network.between(topology) as links:
        found = launch.launch(
            *(_scaling_ranks.probe_and_train, topology.world_size, topology, cases, point.repeats),
            *(list(zip(trainings, plans, strict=True)), corpus),
            fabric=links.fabric,
            topology=topology,
            timeout_s=TIMEOUT_S - 15,
            first_only=True,
        )
    native, host = torch.cuda.is_available(), links.state != "the machine's own"
    probed = _probe.fitted(topology, cases, [rank.probe for rank in found], native, host)
    table = _compared(
        point, plans, probed, [list(reports) for reports in zip(*(rank.reports for rank in found), strict=True)], native
    )
    return Outcome(
        metrics=_metrics(table) | {f"probe_{name}": metric for name, metric in probed.metrics.items()},
        evidence=links.evidence,
        conditions={"fabric": links.state},
        series=table,
        topology=f"{point.nodes} nodes x {point.packages} packages x {point.gcds} GCDs, {links.state}",
    )


def _compared(
    point: ScalingStep, plans: list, probed: "Probed", reports: "list[list[Report]]", native: bool
) -> "pd.DataFrame":
    """A row per plan: predicted and measured seconds, and what the prediction is made of."""
    import numpy as np
    import pandas as pd

    from repro import scaling

    rows = []
    for training, plan, ranks in zip(point.trainings, plans, reports, strict=True):
        measured = float(
            np.median(
                [max(step.seconds for step in steps) for steps in zip(*(r.steps[WARM_UP:] for r in ranks), strict=True)]
            )
        )
        compute = max(rank.compute_seconds or 0.0 for rank in ranks)
        predicted = scaling.predict_step(
            plan,
            training.gpt,
            probed.machine(plan.topology, native),
            training.micro_batch,
            training.accumulation,
            compute_s=compute,
        )
        rows.append(
            {
                "plan": plan.name,
                "cluster_mbit_s": point.cluster_mbit_s,
                "accumulation": point.accumulation,
                "measured": measured,
                "predicted": float(predicted.seconds),
                "compute": float(predicted.compute_s),
                "quantize": float(predicted.quantize_s),
                **{level: float(predicted.level_s.get(level, 0.0)) for level in plan.topology.names},
                "log_error": float(np.log(predicted.seconds / measured)),
            }
        )
    return pd.DataFrame(rows)


def _metrics(table: "pd.DataFrame") -> dict[str, Metric]:
    from repro.scaling.fit import error_quantiles

    median, p90, worst = error_quantiles(table.log_error, (0.5, 0.9, 1.0))
    found = {
        "step_error_median": Metric(value=median, unit="1"),
        "step_error_p90": Metric(value=p90, unit="1"),
        "step_error_worst": Metric(value=worst, unit="1"),
    }
    for row in table.itertuples():
        found[f"measured_{row.plan}"] = Metric(value=row.measured, unit="s")
        found[f"predicted_{row.plan}"] = Metric(value=row.predicted, unit="s")
    return found


def label(point: ScalingStep) -> str:
    """Short name of a point for its record file."""
    shape = f"{point.nodes}x{point.packages}x{point.gcds}"
    return f"{point.plans}-{shape}-{point.accumulation}x{point.steps}-{point.cluster_mbit_s:g}mbit"


EXPERIMENT = Experiment(
    summary="Predicted and measured step times of the ZeRO plans, the network probed in the same run",
    parameters=ScalingStep,
    run=run,
    label=label,
    reports=frozenset(f"probe_{name}" for name in _probe.REPORTS)
    | {f"{what}_{plan}" for what in ("measured", "predicted") for plan in PLANS}
    | {"step_error_median", "step_error_p90", "step_error_worst", "fabric"},
    shape=lambda point: Shape(point.nodes, point.packages, point.gcds),
    timeout_s=TIMEOUT_S,
)

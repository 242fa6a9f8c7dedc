"""Place experts by training sequences of a real model's routing, count the hops of sequences that the placement never saw."""

from typing import Literal

from pydantic import Field, model_validator

from repro import paths
from repro.experiments.base import Experiment, Outcome, Point
from repro.record import Metric

TRACE, EXPERTS = "gptoss20b_routing.npz", 32
TRAIN_FRACTION = 0.7


class PlacementPoint(Point):
    """`seed` splits the sequences, draws the training tokens and seeds the method: an interval over seeds covers all three."""

    method: Literal["contiguous", "random", "exflow", "exflow-direct", "affinity"] = "affinity"
    gpus: int = Field(4, ge=1)
    gpus_per_node: int = Field(0, ge=0, description="0 = all GPUs in one node")
    train_tokens: int = Field(0, ge=0, description="drawn at random from the training sequences; 0 = all of them")
    time_limit_s: float = Field(30.0, gt=0, description="limit of the placement search")

    @model_validator(mode="after")
    def _whole(self) -> "PlacementPoint":
        if EXPERTS % self.gpus:
            raise ValueError(
                f"gpus is {self.gpus}: {EXPERTS} experts cannot be shared evenly; allowed: 1, 2, 4, 8, 16, 32"
            )
        if self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(f"gpus is {self.gpus}: not whole nodes of gpus_per_node {self.gpus_per_node}")
        return self


def run(point: PlacementPoint) -> Outcome:
    """Cost metrics are of the held-out sequences; `train_crossing_fraction`, `bound` and `gap` of the tokens placed by."""
    from repro import exflow

    trace = exflow.load(paths.data(TRACE), top_k=1)
    train, held_out = trace.split(TRAIN_FRACTION, point.seed)
    if point.train_tokens:
        train = train.sample(point.train_tokens, point.seed)
    counts = exflow.transitions(train)
    per_node = point.gpus_per_node or None
    placement = exflow.place(counts, point.gpus, per_node, point.method, point.seed, point.time_limit_s)
    cost, train_cost = exflow.evaluate(placement, held_out), exflow.evaluate(placement, counts)
    bound = exflow.lower_bound(counts, point.gpus)
    hops = ("hops_per_token", "intra_hops", "inter_hops")
    ratios = ("crossing_fraction", "node_crossing_fraction", "max_load", "max_load_worst_layer")
    metrics = {name: Metric(value=getattr(cost, name), unit="hops/token") for name in hops}
    metrics |= {name: Metric(value=getattr(cost, name), unit="1") for name in ratios}
    metrics |= {
        "train_crossing_fraction": Metric(value=train_cost.crossing_fraction, unit="1"),
        "bound": Metric(value=bound, unit="1"),
        "gap": Metric(value=exflow.gap(train_cost.crossing_fraction, bound), unit="1"),
        "seconds": Metric(value=placement.seconds, unit="s"),
    }
    if placement.mip_gap is not None:
        metrics["mip_gap"] = Metric(value=placement.mip_gap, unit="1")
    conditions = {
        "trace": "gpt-oss-20b top-1, held-out sequences",
        "tokens_used": str(train.tokens),
        "search": placement.note or "none",
        "time_limited": "yes" if placement.time_limited else "no",
    }
    topology = f"{point.gpus // placement.gpus_per_node} x {placement.gpus_per_node} GPUs (counted, not run)"
    return Outcome(metrics, conditions=conditions, topology=topology)


def _label(point: PlacementPoint) -> str:
    nodes = f"x{point.gpus_per_node}" if point.gpus_per_node else ""
    return f"{point.method}-{point.gpus}gpus{nodes}-tokens{point.train_tokens or 'all'}-seed{point.seed}"


REPORTS = """hops_per_token intra_hops inter_hops crossing_fraction node_crossing_fraction train_crossing_fraction bound gap mip_gap
    max_load max_load_worst_layer seconds trace tokens_used search time_limited"""
EXPERIMENT = Experiment(
    summary="Expert placement on gpt-oss-20b's routing: hops, load and proven gap, counted on held-out sequences",
    parameters=PlacementPoint,
    run=run,
    label=_label,
    reports=frozenset(REPORTS.split()),
    timed=False,
)

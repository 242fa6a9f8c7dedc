"""Place experts by training sequences of a model's routing, count the hops of sequences that the placement never saw."""

from typing import Literal

from pydantic import Field, model_validator

from repro.experiments._traces import ALL, ROUNDS, TraceName, describe, domains, experts, open_trace
from repro.experiments.base import Experiment, Outcome, Point
from repro.records.record import Metric


class PlacementPoint(Point):
    """`seed` splits the sequences of gpt-oss, draws the training tokens and seeds the method: an interval over seeds covers all three.
    A GPT-MoE's tokens are split by its own training text and held-out text."""

    trace: TraceName = "gptoss20b"
    train_domain: str = ALL
    test_domain: str = Field(ALL, description="of the held-out tokens")
    method: Literal["contiguous", "random", "exflow", "exflow-direct", "affinity"] = "affinity"
    gpus: int = Field(4, ge=1)
    gpus_per_node: int = Field(0, ge=0, description="0 = all GPUs in one node")
    train_tokens: int = Field(0, ge=0, description="drawn at random from the training sequences; 0 = all of them")
    time_limit_s: float = Field(30.0, gt=0, description="limit of the placement search")
    max_load_limit: float = Field(
        0.0, ge=0, description="limit on the busiest GPU's tokens over the even share; 0 = none"
    )
    bound_s: float = Field(0.0, ge=0, description="time for the semidefinite bound; 0 = the fast bounds only")

    @model_validator(mode="after")
    def _whole(self) -> "PlacementPoint":
        for name in ("train_domain", "test_domain"):
            if getattr(self, name) not in domains(self.trace):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: {self.trace} has {', '.join(domains(self.trace))}"
                )
        count = experts(self.trace)
        if count % self.gpus:
            whole = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ValueError(f"gpus is {self.gpus}: {count} experts cannot be shared evenly; allowed: {whole}")
        if self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(f"gpus is {self.gpus}: not whole nodes of gpus_per_node {self.gpus_per_node}")
        if self.max_load_limit and (self.max_load_limit < 1 or self.method != "affinity"):
            raise ValueError(
                f"max_load_limit is {self.max_load_limit}: at least 1, and only with method affinity, found {self.method}"
            )
        return self


def run(point: PlacementPoint) -> Outcome:
    """Cost metrics are of the held-out sequences; `train_crossing_fraction`, `bound` and `gap` of the tokens placed by."""
    from repro import exflow

    train, held_out = open_trace(point.trace).parts(point.train_domain, point.test_domain, point.seed)
    if point.train_tokens:
        train = train.sample(point.train_tokens, point.seed)
    counts = exflow.transitions(train)
    per_node, limit = point.gpus_per_node or None, {"max_load": point.max_load_limit} if point.max_load_limit else {}
    placement = exflow.place(
        counts, point.gpus, per_node, point.method, point.seed, point.time_limit_s, ROUNDS, **limit
    )
    cost, train_cost = exflow.evaluate(placement, held_out), exflow.evaluate(placement, counts)
    bound = exflow.lower_bound(counts, point.gpus, point.bound_s)
    hops = ("hops_per_token", "intra_hops", "inter_hops")
    ratios = ("crossing_fraction", "node_crossing_fraction", "max_load", "max_load_worst_layer")
    metrics = {name: Metric(value=getattr(cost, name), unit="hops/token") for name in hops}
    metrics |= {name: Metric(value=getattr(cost, name), unit="1") for name in ratios}
    metrics |= {
        "train_crossing_fraction": Metric(value=train_cost.crossing_fraction, unit="1"),
        "train_max_load_worst_layer": Metric(value=train_cost.max_load_worst_layer, unit="1"),
        "bound": Metric(value=bound, unit="1"),
        "gap": Metric(value=exflow.gap(train_cost.crossing_fraction, bound), unit="1"),
        "seconds": Metric(value=placement.seconds, unit="s"),
    }
    if placement.mip_gap is not None:
        metrics["mip_gap"] = Metric(value=placement.mip_gap, unit="1")
    conditions = {
        "routing": f"{describe(point.trace, point.test_domain)}, held out",
        "tokens_used": str(train.tokens),
        "search": placement.note or "none",
        "time_limited": "yes" if placement.time_limited else "no",
    }
    topology = f"{point.gpus // placement.gpus_per_node} x {placement.gpus_per_node} GPUs (counted, not run)"
    return Outcome(metrics, conditions=conditions, topology=topology)


def _label(point: PlacementPoint) -> str:
    nodes = f"x{point.gpus_per_node}" if point.gpus_per_node else ""
    texts = "" if point.train_domain == point.test_domain == ALL else f"-{point.train_domain}-on-{point.test_domain}"
    load = f"-load{point.max_load_limit:g}" if point.max_load_limit else ""
    tokens = point.train_tokens or "all"
    return f"{point.trace}{texts}-{point.method}{load}-{point.gpus}gpus{nodes}-tokens{tokens}-seed{point.seed}"


REPORTS = """hops_per_token intra_hops inter_hops crossing_fraction node_crossing_fraction train_crossing_fraction bound gap mip_gap
    max_load max_load_worst_layer train_max_load_worst_layer seconds routing tokens_used search time_limited"""
EXPERIMENT = Experiment(
    summary="Expert placement on the routing of real models: hops, load and proven gap, counted on held-out sequences",
    parameters=PlacementPoint,
    run=run,
    label=_label,
    reports=frozenset(REPORTS.split()),
    timed=False,
)

"""What a server can choose beside a placement: copies of hot experts in spare slots, and, for top-k routing, placing by whole tokens."""

from typing import Literal

from pydantic import Field, model_validator

from repro.experiments._traces import ALL, ROUNDS, TraceName, describe, experts, open_trace, widest
from repro.experiments.base import Experiment, Outcome, Point
from repro.records.record import Metric


class ServingPoint(Point):
    """Placed by training sequences, counted on held-out ones. `seed` splits them and seeds the searches."""

    trace: TraceName = "gptoss20b"
    top_k: int = Field(1, ge=1, description="experts per token and layer")
    gpus: int = Field(8, ge=1)
    gpus_per_node: int = Field(4, ge=1)
    method: Literal["contiguous", "affinity"] = Field("affinity", description="of the placement that is begun with")
    objective: Literal["hops", "new_gpus", "gpus"] = Field(
        "hops", description="hops: as placed by method; else a search on whole tokens goes on from there"
    )
    extra_slots: int = Field(0, ge=0, description="of each GPU and layer, for copies; only with top_k 1")
    copies_for: Literal["hops", "load"] = "hops"
    tokens: int = Field(20_000, ge=1, description="drawn at random, that a search on whole tokens counts on")
    time_limit_s: float = Field(120.0, gt=0, description="of each search")

    @model_validator(mode="after")
    def _consistent(self) -> "ServingPoint":
        count, most_k = experts(self.trace), widest(self.trace)
        if self.top_k > most_k:
            raise ValueError(f"top_k is {self.top_k}: {self.trace} has 1 to {most_k} experts per token")
        if count % self.gpus or self.gpus % self.gpus_per_node:
            raise ValueError(
                f"gpus is {self.gpus}: {count} experts on whole nodes of gpus_per_node {self.gpus_per_node} do not share evenly"
            )
        if self.top_k > 1 and self.extra_slots:
            raise ValueError(f"extra_slots is {self.extra_slots}: copies are for top_k 1, found {self.top_k}")
        if self.extra_slots > count - count // self.gpus:
            raise ValueError(f"extra_slots is {self.extra_slots}, allowed: 0 to {count - count // self.gpus}")
        return self


def run(point: ServingPoint) -> Outcome:
    """For top-1 hops and load with the copies, for top-k the GPUs and nodes that tokens visit: of held-out sequences."""
    from dataclasses import asdict

    from repro import exflow

    train, held_out = open_trace(point.trace, point.top_k).parts(ALL, ALL, point.seed)
    counts, limit = exflow.transitions(train), point.time_limit_s
    placement = exflow.place(counts, point.gpus, point.gpus_per_node, point.method, point.seed, limit, ROUNDS)
    notes = [placement.note or point.method]
    if point.objective != "hops":
        search = {"seed": point.seed, "time_limit_s": limit, "tokens": point.tokens}
        placement = exflow.place_for_fanout(train, placement, point.objective, **search)
        notes.append(placement.note)
    if point.top_k == 1:
        replicas = exflow.place_replicas(placement, train, point.extra_slots, point.copies_for)
        found = asdict(exflow.evaluate_replicas(replicas, held_out))
    else:
        visits = exflow.fan_out(placement, held_out)
        found = {"gpus_visited": visits.gpus, "nodes_visited": visits.nodes}
        found |= {"new_gpus": visits.new_gpus, "new_nodes": visits.new_nodes}
    metrics = {name: Metric(value=value, unit=UNITS[name]) for name, value in found.items()}
    routing = f"{describe(point.trace, ALL, point.top_k)}, held out"
    topology = f"{point.gpus // point.gpus_per_node} x {point.gpus_per_node} GPUs (counted, not run)"
    conditions = {"routing": routing, "search": "; ".join(notes)}
    conditions["time_limited"] = "yes" if placement.time_limited else "no"
    return Outcome(metrics, conditions=conditions, topology=topology)


def _label(point: ServingPoint) -> str:
    copies = f"-{point.extra_slots}for-{point.copies_for}" if point.extra_slots else ""
    shape = f"{point.gpus}gpusx{point.gpus_per_node}"
    return f"{point.trace}-top{point.top_k}-{point.method}-{point.objective}{copies}-{shape}-seed{point.seed}"


UNITS = dict.fromkeys(("hops_per_token", "intra_hops", "inter_hops"), "hops/token")
UNITS |= dict.fromkeys(
    ("max_load", "max_load_worst_layer", "gpus_visited", "nodes_visited", "new_gpus", "new_nodes"), "1"
)
EXPERIMENT = Experiment(
    summary="Copies of hot experts (top-1: hops against load) and placing by whole tokens (top-k: GPUs that a token visits)",
    parameters=ServingPoint,
    run=run,
    label=_label,
    reports=frozenset({*UNITS, "routing", "search", "time_limited"}),
    timed=False,
)

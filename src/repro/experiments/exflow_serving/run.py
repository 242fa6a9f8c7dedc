"""Place, then copy experts or go on by whole tokens, and count."""

from dataclasses import asdict

from repro import exflow
from repro.experiments.base import Outcome
from repro.experiments.common.trace_files import open_trace
from repro.experiments.common.traces import ALL, ROUNDS, describe
from repro.experiments.exflow_serving import ServingMetrics, ServingPoint


def run(point: ServingPoint) -> Outcome:
    """Placed by one part of the trace, counted on the other."""
    train, held_out = open_trace(point.trace, point.seed, point.top_k).parts()
    counts, limit = exflow.transitions(train), point.time_limit_s
    placement = exflow.place(counts, point.gpus, point.gpus_per_node, point.method, point.seed, limit, ROUNDS)
    notes, limited = [placement.note or point.method], placement.time_limited
    if point.objective != "hops":
        search = {"seed": point.seed, "time_limit_s": limit, "tokens": point.tokens}
        placement = exflow.place_for_fanout(train, placement, point.objective, **search)
        notes.append(placement.note)
        limited = limited or placement.time_limited
    if point.top_k == 1:
        replicas = exflow.place_replicas(placement, train, point.extra_slots, point.copies_for)
        metrics = ServingMetrics(**asdict(exflow.evaluate_replicas(replicas, held_out)))
    else:
        visits = exflow.fan_out(placement, held_out)
        metrics = ServingMetrics(
            gpus_visited=visits.gpus, nodes_visited=visits.nodes, new_gpus=visits.new_gpus, new_nodes=visits.new_nodes
        )
    conditions = {
        "routing": f"{describe(point.trace, ALL, point.top_k)}, held out",
        "search": "; ".join(notes),
        "time_limited": "yes" if limited else "no",
    }
    topology = f"{point.gpus // point.gpus_per_node} x {point.gpus_per_node} GPUs (counted, not run)"
    return Outcome(metrics, conditions=conditions, topology=topology)

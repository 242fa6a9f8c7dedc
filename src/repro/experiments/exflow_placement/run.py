"""Place by one part of a trace and count on the other."""

from repro import exflow
from repro.experiments.base import Outcome
from repro.experiments.common.trace_files import open_trace
from repro.experiments.common.traces import ROUNDS, describe
from repro.experiments.exflow_placement import HOPS, SHARES, PlacementMetrics, PlacementPoint


def run(point: PlacementPoint) -> Outcome:
    """Place, count, and bound what any placement could reach."""
    train, held_out = open_trace(point.trace, point.seed).parts(point.train_domain, point.test_domain)
    if point.train_tokens:
        train = train.sample(point.train_tokens, point.seed)
    counts = exflow.transitions(train)
    per_node, limit = point.gpus_per_node or None, {"max_load": point.max_load_limit} if point.max_load_limit else {}
    search = (point.method, point.seed, point.time_limit_s, ROUNDS)
    placement = exflow.place(counts, point.gpus, per_node, *search, **limit)
    cost, train_cost = exflow.evaluate(placement, held_out), exflow.evaluate(placement, counts)
    bound = exflow.lower_bound(counts, point.gpus, point.bound_s)
    metrics = PlacementMetrics(
        **{name: getattr(cost, name) for name in (*HOPS, *SHARES)},
        train_crossing_fraction=train_cost.crossing_fraction,
        train_max_load_worst_layer=train_cost.max_load_worst_layer,
        bound=bound,
        gap=exflow.gap(train_cost.crossing_fraction, bound),
        mip_gap=placement.mip_gap,
        seconds=placement.seconds,
    )
    conditions = {
        "routing": f"{describe(point.trace, point.test_domain)}, held out",
        "tokens_used": str(train.tokens),
        "search": placement.note or "none",
        "time_limited": "yes" if placement.time_limited else "no",
    }
    topology = f"{point.gpus // placement.gpus_per_node} x {placement.gpus_per_node} GPUs (counted, not run)"
    return Outcome(metrics, conditions=conditions, topology=topology)

"""Place by one part of a trace and count on the other."""

import pandas as pd

from repro import exflow
from repro.exflow.evaluate import crossings
from repro.exflow.trace import Trace
from repro.experiments.base import Outcome
from repro.experiments.common.trace_files import Source, open_trace
from repro.experiments.common.traces import ROUNDS, describe
from repro.experiments.exflow_placement import HOPS, SHARES, PlacementMetrics, PlacementPoint


def run(point: PlacementPoint) -> Outcome:
    """Place, count, and bound what any placement could reach. Series: `by_sequence`."""
    source = open_trace(point.trace, point.seed)
    train, held_out = source.parts(point.train_domain, point.test_domain)
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
    series = by_sequence(source, held_out, placement)
    return Outcome(metrics, conditions=conditions, topology=topology, series=series)


def by_sequence(source: Source, held_out: Trace, placement: exflow.Placement) -> pd.DataFrame:
    """A row per held-out sequence: `stratum`, `unit` (see `common.sequences`), `sequence`, and sums over its tokens:
    `transitions`, those that cross GPUs and nodes, `crossings` and `node_crossings`, and as many as are expected to
    cross GPUs under a random placement, `random_crossings`: two experts of two layers share one of P GPUs with
    probability 1/P, whatever the load."""
    tokens = source.resampled(held_out).assign(
        transitions=held_out.layers - 1,
        crossings=crossings(placement.gpu, held_out),
        node_crossings=crossings(placement.node, held_out),
    )
    sums = tokens.groupby(["stratum", "unit", "sequence"], as_index=False).sum()
    return sums.assign(random_crossings=sums.transitions * (1 - 1 / placement.gpus))

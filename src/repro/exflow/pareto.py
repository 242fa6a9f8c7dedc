"""How many hops an even load costs: placements from the most even one to the one with the fewest hops."""

from typing import Any

import numpy as np

from repro.exflow.evaluate import loads
from repro.exflow.placement import Placement, evaluate, place
from repro.exflow.search.balance import least_max_load
from repro.topology import Topology

POINTS = 6


def pareto_front(
    counts: np.ndarray,
    gpus: int | Topology,
    gpus_per_node: int | None = None,
    *,
    time_limit_s: float | None = None,
    **options: Any,
) -> list[Placement]:
    """Placements of which none has both fewer weighted hops and a lower maximum load than another, most even first.

    Tried are a placement without a limit on load, and POINTS - 1 limits from the lowest that can be kept in all layers
    up towards the load of that placement, evenly spaced in logarithm. They share the time limit evenly. `options`:
    `seed`, `rounds` and `costs` of `place`. Compare the placements by `evaluate(placement, routing)`: `weighted_hops`
    against `max_load_worst_layer`. Raises ValueError as `place` does.
    """
    share = None if time_limit_s is None else time_limit_s / POINTS

    def search(max_load: float | None) -> Placement:
        return place(counts, gpus, gpus_per_node, time_limit_s=share, max_load=max_load, **options)

    found = [search(None)]
    least = least_max_load(loads(counts), found[0].gpus).max()
    most = evaluate(found[0], counts).max_load_worst_layer
    if most > least * (1 + 1e-6):
        found += [search(float(limit)) for limit in np.geomspace(least, most, POINTS)[:-1]]
    costs = [evaluate(placement, counts) for placement in found]
    kept, fewest = [], np.inf
    for placement, cost in sorted(
        zip(found, costs, strict=True), key=lambda each: (each[1].max_load_worst_layer, each[1].weighted_hops)
    ):
        if cost.weighted_hops < fewest * (1 - 1e-12):
            kept.append(placement)
            fewest = cost.weighted_hops
    return kept

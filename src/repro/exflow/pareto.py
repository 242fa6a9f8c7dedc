"""How many hops an even load costs: placements from the most even one to the one with the fewest hops."""

from collections.abc import Iterable, Sequence

import numpy as np

from repro.exflow.evaluate import loads
from repro.exflow.levels import make_levels
from repro.exflow.placement import Placement, evaluate, place
from repro.exflow.search.balance import least_max_load
from repro.topology import Topology

POINTS = 6


def pareto_front(
    counts: np.ndarray,
    gpus: int | Topology,
    gpus_per_node: int | None = None,
    max_loads: Sequence[float] | None = None,
    seed: int = 0,
    time_limit_s: float | None = None,
    rounds: int | None = None,
    *,
    costs: Sequence[float] | None = None,
) -> list[Placement]:
    """Placements of which none has both fewer weighted hops and a lower maximum load than another, most even first.

    `max_loads`: the limits that are tried (see `place`); default: 5 from the lowest that can be kept in all layers up
    towards the load of a placement without a limit, evenly spaced in logarithm. The placement without a limit is always
    tried too. The time limit is shared evenly. Compare them by `evaluate(placement, routing)`: `weighted_hops` against
    `max_load_worst_layer`.

    Raises ValueError as `place` does, also for a limit that cannot be kept.
    """
    tried = len(max_loads) + 1 if max_loads is not None else POINTS
    share = None if time_limit_s is None else time_limit_s / tried

    def search(max_load: float | None) -> Placement:
        return place(counts, gpus, gpus_per_node, "affinity", seed, share, rounds, costs=costs, max_load=max_load)

    found = [search(None)]
    limits: Iterable[float] = () if max_loads is None else max_loads
    if max_loads is None:
        least = least_max_load(loads(counts), make_levels(gpus, gpus_per_node, costs).gpus).max()
        most = evaluate(found[0], counts).max_load_worst_layer
        if most > least * (1 + 1e-6):
            limits = np.geomspace(least, most, POINTS)[:-1]
    found += [search(float(limit)) for limit in limits]
    return _undominated(found, counts)


def _undominated(placements: list[Placement], counts: np.ndarray) -> list[Placement]:
    """Those that no other beats in both load and weighted hops, by rising load."""
    prices = [evaluate(placement, counts) for placement in placements]
    order = sorted(range(len(prices)), key=lambda p: (prices[p].max_load_worst_layer, prices[p].weighted_hops))
    kept, fewest = [], np.inf
    for p in order:
        if prices[p].weighted_hops < fewest * (1 - 1e-12):
            kept.append(placements[p])
            fewest = prices[p].weighted_hops
    return kept

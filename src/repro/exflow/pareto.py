"""How many hops an even load costs: placements from the most even one to the one with the fewest hops."""

from typing import Any

import numpy as np

from repro.exflow.search.portfolio import Progress
from repro.exflow.serving.copies import place_copies
from repro.exflow.serving.replicas import evaluate_replicas
from repro.exflow.serving.slots import Replicas
from repro.exflow.trace import Trace
from repro.topology import Topology

POINTS = 6


def serving_front(
    trace: Trace,
    gpus: int | Topology,
    gpus_per_node: int | None = None,
    extra_slots: int = 0,
    *,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    dispatch: str = "shares",
    **options: Any,
) -> list[Replicas]:
    """Placements of which none has both fewer hops and a lower mean over layers of the maximum load than another on
    the tokens of a top-1 `trace`, most even first, with `extra_slots` per GPU and layer for copies of experts
    (`serving.copies.place_copies`, which has the `options`). Compare them by `evaluate_replicas`. Each of POINTS limits,
    from an even load to none, gets its share of the time; when `clock` ends, the front is that of the limits tried so
    far. Raises ValueError as `place_copies` does."""
    share = None if time_limit_s is None else time_limit_s / POINTS
    clock = options.get("clock")
    found: list[Replicas] = []

    def search(max_load: float | None) -> tuple[float, float]:
        def tell(fraction: float, text: str) -> None:
            if progress is not None:
                progress((len(found) + fraction) / POINTS, text)

        limits: dict[str, Any] = {"max_load": max_load, "time_limit_s": share, "dispatch": dispatch, "progress": tell}
        found.append(place_copies(trace, gpus, gpus_per_node, extra_slots, **limits, **options))
        cost = evaluate_replicas(found[-1], trace, dispatch)
        return cost.max_load, cost.hops_per_token

    points = [search(None)]
    for limit in np.geomspace(1.0, max(points[0][0], 1.0), POINTS)[:-1]:
        if clock is None or clock() > 0:
            points.append(search(float(limit)))
    return [found[i] for i in _front(points)]


def _front(points: list[tuple[float, float]]) -> list[int]:
    """Which of (load, hops) no other one beats in both, the least load first."""
    kept, fewest = [], np.inf
    for number in sorted(range(len(points)), key=points.__getitem__):
        if points[number][1] < fewest * (1 - 1e-12):
            kept.append(number)
            fewest = points[number][1]
    return kept

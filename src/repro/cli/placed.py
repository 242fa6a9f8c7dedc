"""What `repro place` says of a placement."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from repro.cli.console import emit, stderr, stdout

if TYPE_CHECKING:  # loading these takes a second, and `repro --help` waits for none
    import numpy as np

    from repro.exflow import Placement, Trace


def numbers(
    placement: "Placement", routing: "Trace", counts: "np.ndarray", by_level: bool, clock: Callable[[], float]
) -> dict[str, float]:
    """Cost, bound and gap of a placement on the trace and its counts, and the seconds that it took. The bound gets what
    is left on the clock."""
    from repro import exflow
    from repro.exflow.bound import lower_bound_within

    cost = exflow.evaluate(placement, counts)
    fan_out = asdict(exflow.fan_out(placement, routing)) if routing.k > 1 else {}
    bound, share = lower_bound_within(counts, placement.gpus, math.inf, clock, placement.max_load)
    names = ["hops_per_token", "crossing_fraction", "intra_hops", "inter_hops", "max_load"]
    names += ["max_load_worst_layer"] * (placement.max_load is not None)
    result = {name: getattr(cost, name) for name in names}
    result |= {"bound": bound, "gap": exflow.gap(cost.crossing_fraction, bound), "bound_share": share}
    if by_level:
        result["weighted_hops"] = cost.weighted_hops
        by_name = zip(placement.machine.names, cost.level_hops, strict=True)
        result |= {f"{name}_hops": hops for name, hops in by_name}
    return result | fan_out | {"seconds": placement.seconds}


def show(result: dict[str, float], json_: bool) -> None:
    if result.get("bound_share", 1.0) < 1:
        done = f"{result['bound_share']:.0%}"
        stderr.print(f"bound: complete for {done} of the pairs of layers when the time was over, weaker for the others")
    if json_:
        return emit(result)
    for name, value in result.items():
        stdout.print(f"{name:27} {value:.4f}", markup=False)

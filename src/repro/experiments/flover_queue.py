"""The paper's request tables by the queue model: total time over n requests (Fig. 4a), iterations and overlap (v1 Fig. 8)."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from repro.experiments.base import Experiment, Outcome, Point
from repro.record import Metric

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class QueuePoint(Point):
    """`table`: fig4a has arrivals at a fixed interval, fig8 Poisson arrivals whose mean gap is `interval_ms`."""

    table: Literal["fig4a", "fig8"] = "fig8"
    requests: int = Field(32, ge=1)
    interval_ms: float = Field(500.0, ge=0)
    single_request_s: float = Field(5.8, gt=0, description="T1: a request alone on the paper's hardware")
    iterations: int = Field(512, ge=1, description="output tokens of every request")
    batch_cost: float = Field(0.02, ge=0, description="c in t_iter(b) = t1 (1 + c (b - 1))")
    admit_per_iteration: int = Field(1, ge=0, description="newcomers per token boundary; 0: as many as arrived")
    seeds: int = Field(200, ge=1, description="draws of the arrivals, averaged (fig8 only)")


def run(point: QueuePoint) -> Outcome:
    """Mean and standard deviation over the draws; a fixed interval has a single draw, and its deviations are 0.

    Series, a row per draw: fig8 has one draw per seed; fig4a one row for each of 1, 2, 4 … `requests` requests.
    """
    import numpy as np
    import pandas as pd

    interval_s = point.interval_ms / 1000
    if point.table == "fig4a":
        from repro.flover.queueing import fixed_arrivals

        counts = sorted({2**i for i in range(point.requests.bit_length())} | {point.requests})
        table = pd.DataFrame([_row(point, fixed_arrivals(count, interval_s), 0) for count in counts])
        sample = table[table.requests == point.requests]
    else:
        from repro.flover.queueing import poisson_arrivals

        seeds = np.random.SeedSequence(point.seed).generate_state(point.seeds).tolist()
        table = pd.DataFrame([_row(point, poisson_arrivals(point.requests, interval_s, s), s) for s in seeds])
        sample = table
    metrics = {}
    for name in sample.columns.drop(["requests", "draw"]):
        unit = "s" if name.endswith("seconds") else "1"
        metrics[name] = Metric(value=float(sample[name].mean()), unit=unit)
        metrics[f"{name}_sd"] = Metric(value=float(sample[name].std(ddof=0)), unit=unit)
    conditions = {"reference": "serial first come, first served with the same single-request time"}
    return Outcome(metrics, evidence="modelled", conditions=conditions, series=table)


def _row(point: QueuePoint, arrivals: "NDArray[np.float64]", draw: int) -> dict[str, float]:
    """One run of the model, and the serial time of the same arrivals."""
    from repro.flover import queueing

    model = queueing.QueueModel(point.single_request_s, point.iterations, point.batch_cost, point.admit_per_iteration)
    result, serial = model.run(arrivals), queueing.serial_seconds(arrivals, point.single_request_s)
    return {
        "requests": len(arrivals),
        "draw": draw,
        "total_seconds": result.total_seconds,
        "serial_seconds": serial,
        "speedup_vs_serial": serial / result.total_seconds,
        "iterations": result.iterations,
        "overlap_fraction": result.overlap_fraction,
        "latency_ratio": float(result.latency_s.mean()) / point.single_request_s,
    }


_MEANS = ["total_seconds", "serial_seconds", "speedup_vs_serial", "iterations", "overlap_fraction", "latency_ratio"]
EXPERIMENT = Experiment(
    summary="Queue model of fused decoding: total time, iterations and overlap at the paper's own request rates",
    parameters=QueuePoint,
    run=run,
    label=lambda point: (
        f"{point.table}-n{point.requests}-{point.interval_ms:g}ms-T{point.single_request_s:g}s-c{point.batch_cost:g}"
    ),
    reports=frozenset([*_MEANS, *(f"{name}_sd" for name in _MEANS), "reference"]),
    timeout_s=120,
    timed=False,
)

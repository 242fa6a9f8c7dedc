"""Run the queue model on the paper's tables."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from repro.experiments.base import Outcome
from repro.experiments.flover_queue import QueueMetrics, QueuePoint
from repro.flover import queueing
from repro.flover.arrivals import RequestShape, fixed_arrivals, poisson_arrivals


def run(point: QueuePoint) -> Outcome:
    """Series, a row per draw: fig8 has one draw per seed; the others have one row for each of 1, 2, 4 … `requests`."""
    interval_s = point.interval_ms / 1000
    if point.table == "fig8":
        seeds = np.random.SeedSequence(point.seed).generate_state(point.seeds).tolist()
        table = pd.DataFrame([_row(point, poisson_arrivals(point.requests, interval_s, s).tolist(), s) for s in seeds])
    else:
        counts = sorted({2**i for i in range(point.requests.bit_length())} | {point.requests})
        table = pd.DataFrame([_row(point, fixed_arrivals(count, interval_s).tolist(), 0) for count in counts])
    drawn = table[table.requests == point.requests].drop(columns=["requests", "draw"])
    metrics = QueueMetrics(**drawn.mean(), **drawn.std(ddof=0).add_suffix("_sd"))
    conditions = {"reference": "serial first come, first served with the same single-request time"}
    return Outcome(metrics, evidence="modelled", conditions=conditions, series=table)


def _row(point: QueuePoint, arrivals: Sequence[float], draw: int) -> dict[str, float]:
    """One run of the model, and the serial time of the same arrivals."""
    # The paper counts `iterations` for a request; the model's first token comes from the prompt, which is free here.
    shapes = [RequestShape(arrival, 1, point.iterations + 1) for arrival in arrivals]
    times = queueing.LinearTimes(point.single_request_s / point.iterations, point.batch_cost)
    found, serial = _policy(point).run(shapes, times), queueing.Fused(slots=1).run(shapes, times).total_seconds
    return {
        "requests": len(arrivals),
        "draw": draw,
        "total_seconds": found.total_seconds,
        "serial_seconds": serial,
        "speedup_vs_serial": serial / found.total_seconds,
        "iterations": found.iterations,
        "overlap_fraction": found.overlap_fraction,
        "latency_ratio": float(found.latency_s.mean()) / point.single_request_s,
        "first_latency_ratio": float(found.latency_s[0]) / point.single_request_s,
    }


def _policy(point: QueuePoint) -> queueing.Policy:
    # Prompts on a stream of their own, as the authors have them.
    fused = {"admit_per_iteration": point.admit_per_iteration, "prefill_apart": True}
    return {
        "fused": queueing.Fused(**fused),
        "serial": queueing.Fused(slots=1, **fused),
        "dynamic": queueing.Batches(window_s=point.window_s),
        "dynamic_concurrent": queueing.ConcurrentBatches(point.window_s),
        "instances": queueing.Instances(),
    }[point.policy]

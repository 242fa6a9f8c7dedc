"""Run the queue model on a figure of the paper or on one setting."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from repro.experiments.base import Outcome
from repro.experiments.flover_queue import QueueMetrics, QueuePoint, figures
from repro.flover import paper, queueing
from repro.flover.arrivals import RequestShape, fixed_arrivals, poisson_arrivals
from repro.flover.queueing import cost


def run(point: QueuePoint) -> Outcome:
    """Series of a figure: a row per printed number. Of a setting: a row per draw, or at a fixed interval one for each
    of 1, 2, 4 … `requests`."""
    return _figure(point) if point.figure else _setting(point)


def _figure(point: QueuePoint) -> Outcome:
    costs = {model: cost.batch_cost(model) for model in paper.MODELS}
    if point.batch_cost is not None:
        costs = dict.fromkeys(paper.MODELS, point.batch_cost)
    table = figures.predicted(point.figure, costs, point.seeds, point.seed)
    used = {"costs": ", ".join(f"{model} {found:.4g}" for model, found in costs.items())}
    return Outcome(QueueMetrics(**figures.judged(table)), evidence="modelled", conditions=used, series=table)


def _setting(point: QueuePoint) -> Outcome:
    interval_s = point.interval_ms / 1000
    batch_cost = cost.batch_cost(point.model) if point.batch_cost is None else point.batch_cost
    if point.arrivals == "poisson":
        seeds = np.random.SeedSequence(point.seed).generate_state(point.seeds).tolist()
        drawn = [(poisson_arrivals(point.requests, interval_s, seed).tolist(), seed) for seed in seeds]
    else:
        counts = sorted({2**i for i in range(point.requests.bit_length())} | {point.requests})
        drawn = [(fixed_arrivals(count, interval_s).tolist(), 0) for count in counts]
    table = pd.DataFrame([_row(point, batch_cost, *each) for each in drawn])
    last = table[table.requests == point.requests].drop(columns=["requests", "draw"])
    metrics = QueueMetrics(**last.mean(), **last.std(ddof=0).add_suffix("_sd"))
    conditions = {"reference": "serial first come, first served with the same single-request time"}
    return Outcome(metrics, "modelled", conditions | {"costs": f"{point.model} {batch_cost:.4g}"}, table)


def _row(point: QueuePoint, batch_cost: float, arrivals: Sequence[float], draw: int) -> dict[str, float]:
    """One run of the model, and the serial time of the same arrivals."""
    alone = paper.MODELS[point.model].single_request_s
    shapes = [RequestShape(arrival, 1, paper.TOKENS + 1) for arrival in arrivals]  # as in `cost.served`
    times = queueing.LinearTimes(alone / paper.TOKENS, batch_cost)
    found, serial = _policy(point).run(shapes, times), queueing.Fused(slots=1).run(shapes, times).total_seconds
    return {
        "requests": len(arrivals),
        "draw": draw,
        "total_seconds": found.total_seconds,
        "serial_seconds": serial,
        "speedup_vs_serial": serial / found.total_seconds,
        "iterations": found.iterations,
        "overlap_fraction": found.overlap_fraction,
        "latency_ratio": float(found.latency_s.mean()) / alone,
        "first_latency_ratio": float(found.latency_s[0]) / alone,
    }


def _policy(point: QueuePoint) -> queueing.Policy:
    return {
        "fused": cost.AUTHORS,
        "serial": queueing.Fused(slots=1),
        "dynamic": queueing.Batches(window_s=point.window_s),
        "dynamic_concurrent": queueing.ConcurrentBatches(point.window_s),
        "instances": queueing.Instances(),
    }[point.policy]

"""The paper's request tables by the queue model: total time over n requests (Fig. 4a), iterations and overlap (v1 Fig. 8), and
the policies of its progress figure."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from repro.experiments.base import Experiment, Outcome, Point
from repro.records.record import Metric

if TYPE_CHECKING:
    from collections.abc import Sequence

    from repro.flover.queueing import Policy

_WINDOWS = ("dynamic", "dynamic_concurrent")


class QueuePoint(Point):
    """`table`: fig4a and progress have arrivals at a fixed interval, fig8 Poisson arrivals whose mean gap is `interval_ms`."""

    table: Literal["fig4a", "fig8", "progress"] = "fig8"
    policy: Literal["fused", "serial", "dynamic", "dynamic_concurrent", "instances"] = Field(
        "fused",
        description="dynamic: one batch at a time; dynamic_concurrent, instances: they share the machine evenly",
    )
    window_s: float = Field(
        0.0, ge=0, description="dynamic: from the first request that waits until its batch is formed"
    )
    requests: int = Field(32, ge=1)
    interval_ms: float = Field(500.0, ge=0)
    single_request_s: float = Field(5.8, gt=0, description="T1: a request alone on the paper's hardware")
    iterations: int = Field(512, ge=1, description="output tokens of every request")
    batch_cost: float = Field(0.02, ge=0, description="c in t_iter(b) = t1 (1 + c (b - 1))")
    admit_per_iteration: int = Field(1, ge=0, description="fused: newcomers per token boundary; 0: as many as arrived")
    seeds: int = Field(200, ge=1, description="draws of the arrivals, averaged (fig8 only)")

    @model_validator(mode="after")
    def _consistent(self) -> "QueuePoint":
        if self.window_s and self.policy not in _WINDOWS:
            raise ValueError(f"window_s is {self.window_s}: only the policies {' and '.join(_WINDOWS)} have one")
        return self


def run(point: QueuePoint) -> Outcome:
    """Mean and standard deviation over the draws; a fixed interval has a single draw, and its deviations are 0.

    Series, a row per draw: fig8 has one draw per seed; the others one row for each of 1, 2, 4 … `requests` requests.
    """
    import numpy as np
    import pandas as pd

    from repro.flover.arrivals import fixed_arrivals, poisson_arrivals

    interval_s = point.interval_ms / 1000
    if point.table == "fig8":
        seeds = np.random.SeedSequence(point.seed).generate_state(point.seeds).tolist()
        table = pd.DataFrame([_row(point, poisson_arrivals(point.requests, interval_s, s).tolist(), s) for s in seeds])
        sample = table
    else:
        counts = sorted({2**i for i in range(point.requests.bit_length())} | {point.requests})
        table = pd.DataFrame([_row(point, fixed_arrivals(count, interval_s).tolist(), 0) for count in counts])
        sample = table[table.requests == point.requests]
    metrics = {}
    for name in sample.columns.drop(["requests", "draw"]):
        unit = "s" if name.endswith("seconds") else "1"
        metrics[name] = Metric(value=float(sample[name].mean()), unit=unit)
        metrics[f"{name}_sd"] = Metric(value=float(sample[name].std(ddof=0)), unit=unit)
    conditions = {"reference": "serial first come, first served with the same single-request time"}
    return Outcome(metrics, evidence="modelled", conditions=conditions, series=table)


def _row(point: QueuePoint, arrivals: "Sequence[float]", draw: int) -> dict[str, float]:
    """One run of the model, and the serial time of the same arrivals."""
    from repro.flover import queueing
    from repro.flover.arrivals import Shape

    # The paper counts `iterations` for a request; the model's first token comes from the prompt, which costs nothing here.
    shapes = [Shape(arrival, 1, point.iterations + 1) for arrival in arrivals]
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


def _policy(point: QueuePoint) -> "Policy":
    from repro.flover import queueing

    if point.policy == "dynamic":
        return queueing.Batches(window_s=point.window_s)
    if point.policy == "dynamic_concurrent":
        return queueing.ConcurrentBatches(point.window_s)
    if point.policy == "instances":
        return queueing.Instances()
    slots = 1 if point.policy == "serial" else 0
    # Prompts on a stream of their own, as the authors have them.
    return queueing.Fused(slots, admit_per_iteration=point.admit_per_iteration, prefill_apart=True)


def _label(point: QueuePoint) -> str:
    policy = "" if point.policy == "fused" else f"-{point.policy}"
    policy += f"{point.window_s:g}s" if point.policy in _WINDOWS else ""
    rates = f"n{point.requests}-{point.interval_ms:g}ms-T{point.single_request_s:g}s-c{point.batch_cost:g}"
    return f"{point.table}{policy}-{rates}"


_MEANS = ["total_seconds", "serial_seconds", "speedup_vs_serial", "iterations", "overlap_fraction", "latency_ratio"]
_MEANS += ["first_latency_ratio"]
EXPERIMENT = Experiment(
    summary="Queue model of fused decoding and its baselines: total time, iterations and overlap at the paper's own request rates",
    parameters=QueuePoint,
    run=run,
    label=_label,
    reports=frozenset([*_MEANS, *(f"{name}_sd" for name in _MEANS), "reference"]),
    timeout_s=120,
    timed=False,
)

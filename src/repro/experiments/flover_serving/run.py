"""Serve a workload, and compare with requests decoded alone."""

import functools
import os
from collections.abc import Sequence

import pandas as pd
import psutil
import torch

from repro.baselines import instances
from repro.baselines.batching import DynamicScheduler, StaticScheduler, serial
from repro.baselines.instances import Served
from repro.experiments.base import Outcome
from repro.experiments.flover_serving import ServingMetrics, ServingPoint, alone, models, prediction, workload
from repro.flover.arrivals import RequestShape
from repro.flover.buffers import LAYOUTS
from repro.flover.engine import Engine, ServingReport
from repro.flover.measured import spread
from repro.flover.queueing.shared import evenly
from repro.flover.request import Request
from repro.flover.scheduler import Scheduler
from repro.flover.workload import summary
from repro.models.llama import Llama


def run(point: ServingPoint) -> Outcome:
    """Serve the workload once in real time, then (untimed) decode requests alone for the comparison."""
    threads = _physical_cores()
    torch.set_num_threads(threads)
    model = models.load(point)

    def asked(interval_s: float) -> tuple[list[RequestShape], list[Request]]:
        shapes = workload.shapes(point, interval_s)
        return shapes, models.requests(point, shapes)

    shapes, requests = asked(point.interval_s)
    capacity = max(request.kv_tokens for request in requests)
    t1 = alone.seconds(model, requests, capacity) if point.interval_t1 or point.window_t1 else 0.0
    if point.interval_t1:
        shapes, requests = asked(point.interval_t1 * t1)
    window_s = point.window_t1 * t1 or point.window_s

    times = prediction.measured(point, model, shapes, capacity) if point.predict else None
    metrics: dict[str, float] = {}
    if point.engine == "instances":
        served = _serve_by_instances(point, requests, capacity, point.instance_threads or threads)
        report, slowdown = served.report, served.slowdown
        metrics["instance_bytes"] = sum(served.instance_bytes) / len(served.instance_bytes)
        metrics["instances_bytes"] = float(sum(served.instance_bytes))
    else:
        _serve(point, model, requests[:2], capacity, 0.0)  # warm-up, thrown away
        report, slowdown = _serve(point, model, requests, capacity, window_s), evenly
    if times is not None:
        found = prediction.predicted(point, shapes, times, capacity, window_s, slowdown)
        metrics |= prediction.compared(found, report)
    every = point.check_tokens and point.engine != "serial"  # which does the same
    lone = alone.decoded(model, requests if every else alone.sample(requests), capacity)
    equal, agreement = alone.agreement(model, report, lone)
    metrics |= summary(report) | agreement
    metrics["latency_first"] = report.generations[0].latency_s
    metrics["single_request_seconds"] = sum(generation.service_s for generation in lone) / len(lone)
    metrics["mean_interval_seconds"] = shapes[-1].arrival_s / max(1, len(shapes) - 1)
    if point.engine == "dynamic":
        metrics["window_seconds"] = window_s
    return Outcome(
        metrics=ServingMetrics(**metrics),
        conditions={
            "weights": models.description(point),
            "threads": f"{point.instance_threads or threads} per instance"
            if point.engine == "instances"
            else str(threads),
            "linear": model.head.layout,
            "kernels": model.kernels.name,
            "scales": workload.description(point),
            "lone_reference": f"{len(lone)} of {len(requests)} requests, decoded alone after the timed run",
        },
        series=_series(report, equal),
    )


def _serve(
    point: ServingPoint, model: Llama, requests: Sequence[Request], capacity: int, window_s: float
) -> ServingReport:
    """One pass over the requests by the point's engine; a rejected request is an error here."""
    layout = LAYOUTS[point.layout if point.engine == "fused" else "window"]
    report = Engine(model, _scheduler(point, window_s), capacity, layout=layout).serve(requests)
    if report.rejected:
        raise RuntimeError(f"{len(report.rejected)} requests were rejected: {report.rejected}")
    return report


def _scheduler(point: ServingPoint, window_s: float) -> Scheduler:
    if point.engine == "serial":
        return serial(point.requests)
    if point.engine == "static":
        return StaticScheduler(point.batch_size, point.requests)
    if point.engine == "dynamic":
        return DynamicScheduler(point.batch_size, point.requests, window_s=window_s)
    return Scheduler(point.max_slots, point.requests, point.admit_per_iteration, prefill_tokens=point.prefill_tokens)


def _serve_by_instances(point: ServingPoint, requests: Sequence[Request], capacity: int, threads: int) -> Served:
    """A process with the model for each request, or as many as the point says."""
    count = point.instances or len(requests)
    paces = spread(count) if point.predict else ()
    return instances.serve(functools.partial(models.load, point), requests, count, capacity, threads, paces)


def _series(report: ServingReport, equal: dict[int, bool]) -> pd.DataFrame:
    """A row per request; `equal` is missing where the request was not decoded alone."""
    return pd.DataFrame(
        [
            {
                "request": generation.request.id,
                "arrival_s": generation.request.arrival_s,
                "prompt_tokens": len(generation.request.prompt),
                "output_tokens": len(generation.tokens),
                "admitted_s": generation.admitted_s,
                "first_token_s": generation.first_token_s,
                "finish_s": generation.finish_s,
                "slot": generation.slot,
                "equal": equal.get(generation.request.id),
            }
            for generation in report.generations
        ]
    ).astype({"equal": "boolean"})


def _physical_cores() -> int:
    """Physical cores this process may use: hyper-threads do not help a decode that waits for memory."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or 1, allowed)

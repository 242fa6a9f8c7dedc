"""Serve a workload, and compare with requests decoded alone."""

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
import psutil
import torch

from repro.baselines import instances
from repro.baselines.batching import DynamicScheduler, StaticScheduler, divergence, lone, serial
from repro.baselines.instances import Served
from repro.experiments.base import Outcome
from repro.experiments.flover_serving import ServingMetrics, ServingPoint, inputs, prediction
from repro.flover.buffers import LAYOUTS
from repro.flover.engine import Engine
from repro.flover.measured import spread
from repro.flover.queueing.shared import evenly
from repro.flover.report import ServingReport, middle, repeated
from repro.flover.request import Generation, Request
from repro.flover.scheduler import Scheduler
from repro.flover.workload import summary
from repro.models.llama import Llama

_SAMPLE = 4
_ROUNDS = 5  # of lone requests, of which T1 is the median
_PASSES, _SHORT_S = 3, 10.0  # over a workload that takes less than so many seconds
_WARM_UP = 16  # tokens of an answer: what is compiled, recorded and allocated by then is all of it


def prepare(point: ServingPoint) -> None:
    """Parse the file of a model that reads text."""
    if point.model == "smollm2-135m":
        inputs.text_tokens()


def run(point: ServingPoint) -> Outcome:
    """Serve the workload in real time, and decode requests alone to compare with: before, where a lone one's time is
    needed or instances take the memory, the others afterwards.

    A workload of less than 10 s is served three times, each time by a new engine (instances: by the same processes), and
    the pass whose total time is the median counts: one pass of half a second is as long as the machine happens to make
    it. All metrics and the series are of that pass, and predictions are compared with it."""
    threads = _physical_cores()
    torch.set_num_threads(threads)
    model = inputs.model(point)
    shapes = inputs.shapes(point, point.interval_s)
    requests = inputs.requests(point, shapes)
    capacity = max(request.kv_tokens for request in requests)
    alone = _alone_before(model, requests, capacity) if point.interval_t1 or point.window_t1 else []
    t1 = _mean_seconds(alone) if alone else 0.0
    if point.interval_t1:
        shapes = inputs.shapes(point, point.interval_t1 * t1)
        requests = inputs.requests(point, shapes)
    window_s = point.window_t1 * t1 or point.window_s
    times = prediction.measured(point, model, shapes, capacity) if point.predict else None
    slowdown = evenly
    optional: dict[str, float] = {}
    chosen = _compared(point, requests)
    if point.engine == "instances":
        alone = _alone(model, chosen, capacity, alone)
        del model  # its memory is for theirs
        served = _serve_by_instances(point, requests, capacity, point.instance_threads or threads)
        passes, slowdown = served.passes, served.slowdown
        optional["instances_bytes"] = float(sum(served.instance_bytes))
        optional["instance_bytes"] = optional["instances_bytes"] / len(served.instance_bytes)
        model = inputs.model(point)
    else:
        _serve(point, model, _shortened(requests[:2]), capacity, 0.0)  # warm-up, thrown away
        passes = repeated(lambda: _serve(point, model, requests, capacity, window_s), _PASSES, _SHORT_S)
    report = middle(passes)
    if times is not None:
        found = prediction.policy(point, capacity, window_s, slowdown).run(shapes, times)
        optional |= prediction.compared(found, summary(report))
    before, alone = len(alone), _alone(model, chosen, capacity, alone)
    answers = {generation.request.id: generation for generation in report.generations}
    gaps = {one.request.id: divergence(model, answers[one.request.id], one) for one in alone}
    metrics = ServingMetrics(
        latency_first=report.generations[0].latency_s,
        single_request_seconds=t1 or _mean_seconds(alone),
        mean_interval_seconds=shapes[-1].arrival_s / max(1, len(shapes) - 1),
        window_seconds=window_s if point.engine == "dynamic" else None,
        fastest_pass_seconds=min(each.total_seconds for each in passes),
        slowest_pass_seconds=max(each.total_seconds for each in passes),
        **_agreement(list(gaps.values()), model.dtype),
        **summary(report),
        **optional,
    )
    conditions = _conditions(point, model, threads)
    conditions["lone_reference"] = f"{len(alone)} of {len(requests)} requests, {before} of them before the timed run"
    return Outcome(metrics, conditions=conditions, series=_series(report, gaps))


def _conditions(point: ServingPoint, model: Llama, threads: int) -> dict[str, str]:
    own = f"{point.instance_threads or threads} per instance" if point.engine == "instances" else f"{threads}"
    computed = {"linear": model.head.layout, "kernels": model.kernels.name}
    return {"weights": inputs.weights(point), "threads": own, **computed, "scales": inputs.scales(point)}


def _serve_by_instances(point: ServingPoint, requests: Sequence[Request], capacity: int, threads: int) -> Served:
    """A process with the model for each request, or as many as the point says."""
    count = point.instances or len(requests)
    paces = spread(count) if point.predict else ()
    build = functools.partial(inputs.model, point)
    return instances.serve(build, requests, count, capacity, threads, paces, passes=_PASSES, short_s=_SHORT_S)


def _serve(
    point: ServingPoint, model: Llama, requests: Sequence[Request], capacity: int, window_s: float
) -> ServingReport:
    """One pass over the requests by the point's engine; a rejected or failed request is an error here."""
    layout = LAYOUTS[point.layout if point.engine == "fused" else "window"]
    report = Engine(model, _scheduler(point, window_s), capacity, layout=layout).serve(requests)
    if report.rejected or report.failed:
        raise RuntimeError(f"requests were rejected: {report.rejected}, or failed: {report.failed}")
    return report


def _scheduler(point: ServingPoint, window_s: float) -> Scheduler:
    if point.engine == "serial":
        return serial(point.requests)
    if point.engine == "static":
        return StaticScheduler(point.batch_size, point.requests)
    if point.engine == "dynamic":
        return DynamicScheduler(point.batch_size, point.requests, window_s=window_s)
    limits = {"admit_per_iteration": point.admit_per_iteration, "prefill_tokens": point.prefill_tokens}
    return Scheduler(point.max_slots, point.requests, token_gap_s=0, **limits)  # the paper's policy


def _compared(point: ServingPoint, requests: Sequence[Request]) -> Sequence[Request]:
    """Those whose answers are decoded alone as well. Serial decoding does the same: one of equal lengths is enough."""
    if point.engine == "serial":
        return _one_if_alike(_sample(requests))
    return requests if point.check_tokens else _sample(requests)


def _sample(requests: Sequence[Request]) -> Sequence[Request]:
    """At most 4: the middle of each quarter of the answer lengths, so that their mean time is near that of all."""
    if len(requests) <= _SAMPLE:
        return requests
    by_length = sorted(requests, key=lambda request: request.max_new_tokens)
    return [by_length[(2 * i + 1) * len(by_length) // (2 * _SAMPLE)] for i in range(_SAMPLE)]


def _one_if_alike(requests: Sequence[Request]) -> Sequence[Request]:
    """One of requests that are all equally long; else all."""
    return requests[:1] if len({(len(r.prompt), r.max_new_tokens) for r in requests}) == 1 else requests


def _shortened(requests: Sequence[Request]) -> Sequence[Request]:
    return [replace(request, max_new_tokens=min(_WARM_UP, request.max_new_tokens)) for request in requests]


def _alone_before(model: Llama, requests: Sequence[Request], capacity: int) -> list[Generation]:
    """Requests alone, whose mean time is T1: a sample of the lengths (one request where all are equal), each of them the
    median of several. Arrivals and windows are made of T1, so one slow moment here would be another load."""
    chosen = _one_if_alike(_sample(requests))
    lone(model, chosen, capacity)  # warm-up, thrown away
    rounds = [lone(model, chosen, capacity) for _ in range(_ROUNDS)]
    return [sorted(same, key=lambda one: one.service_s)[_ROUNDS // 2] for same in zip(*rounds, strict=True)]


def _alone(model: Llama, requests: Sequence[Request], capacity: int, known: Sequence[Generation]) -> list[Generation]:
    """What is known of requests alone, and the others decoded now."""
    ids = {generation.request.id for generation in known}
    others = [request for request in requests if request.id not in ids]
    return [*known, *(lone(model, others, capacity) if others else [])]


def _mean_seconds(generations: Sequence[Generation]) -> float:
    return sum(generation.service_s for generation in generations) / len(generations)


def _agreement(gaps: Sequence[float | None], dtype: torch.dtype) -> dict[str, float]:
    """Metrics of answers beside their lone runs, by what `divergence` says of each. Logits a few roundings apart are a
    near tie: which of them is the larger depends on the order of a sum."""
    apart = [gap for gap in gaps if gap is not None]
    tied = sum(gap < max(1e-3, 8 * torch.finfo(dtype).eps) for gap in apart)
    equal = len(gaps) - len(apart)
    return {
        "tokens_checked": len(gaps),
        "tokens_equal_fraction": equal / len(gaps),
        "tokens_equal_or_tied_fraction": (equal + tied) / len(gaps),
        "largest_gap": max(filter(math.isfinite, apart), default=0.0),
    }


def _series(report: ServingReport, gaps: dict[int, float | None]) -> pd.DataFrame:
    """A row per request; `equal` is missing where the request was not decoded alone."""
    equal = {request: gap is None for request, gap in gaps.items()}
    rows = (
        {
            "request": generation.request.id,
            "arrival_s": generation.request.arrival_s,
            "prompt_tokens": len(generation.request.prompt),
            "output_tokens": len(generation.tokens),
            **{name: getattr(generation, name) for name in ("admitted_s", "first_token_s", "finish_s", "slot")},
            "equal": equal.get(generation.request.id),
        }
        for generation in report.generations
    )
    return pd.DataFrame(rows).astype({"equal": "boolean"})


def _physical_cores() -> int:
    """Physical cores this process may use: hyper-threads do not help a decode that waits for memory. All that it may use
    where the system does not tell them apart."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or allowed, allowed)

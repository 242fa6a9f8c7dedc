"""Serving a language model: fused decoding against serial, static and dynamic batching and concurrent instances on the same requests."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from repro.experiments import _flover_alone, _flover_metrics, _flover_models, _flover_prediction, _flover_workload
from repro.experiments.base import Experiment, Outcome, Point
from repro.records.record import Metric

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from repro.baselines.instances import Served
    from repro.flover.arrivals import Shape
    from repro.flover.engine import Report
    from repro.flover.request import Request
    from repro.flover.scheduler import Scheduler
    from repro.models.llama import Llama


class ServingPoint(Point):
    """Engine, workload and its scales. Lengths and gaps of the Azure trace are multiplied by the scales; ShareGPT has lengths only and gets
    Poisson arrivals; the paper's regular workloads have prompts of 8 tokens and answers of 512 (uniform: 128 to `longest`), multiplied
    by `length_scale`. Fields that end in `_t1` count in the time of a lone request, which is measured before."""

    engine: Literal["fused", "serial", "static", "dynamic", "instances"] = "fused"
    requests: int = Field(32, ge=1)
    workload: Literal["azure", "sharegpt", "fixed", "poisson", "uniform"] = "azure"
    trace_start: int = Field(0, ge=0, description="azure, sharegpt: first row of the slice")
    time_scale: float = Field(0.1, gt=0, description="azure: factor on the gaps between arrivals")
    length_scale: float = Field(0.25, gt=0, description="factor on prompt and answer lengths")
    max_prompt_tokens: int = Field(64, ge=1, description="azure, sharegpt: longer prompts are cut to this")
    max_output_tokens: int = Field(128, ge=1, description="azure, sharegpt: longer answers are cut to this")
    interval_s: float = Field(0.2, ge=0, description="all but azure: (mean) gap between arrivals")
    interval_t1: float = Field(0.0, ge=0, description="the same in lone requests' times; 0: interval_s holds")
    longest: int = Field(512, ge=_flover_workload.PAPER_SHORTEST, description="uniform: longest answer, before scaling")
    max_slots: int = Field(32, ge=1, description="fused: requests decoded at once")
    batch_size: int = Field(8, ge=1, description="static, dynamic: most requests per batch")
    window_s: float = Field(
        0.0, ge=0, description="dynamic: from the first request that waits until its batch is formed"
    )
    window_t1: float = Field(0.0, ge=0, description="the same in lone requests' times; 0: window_s holds")
    instances: int = Field(0, ge=0, description="instances: processes, each with the model; 0 = one per request")
    instance_threads: int = Field(
        0, ge=0, description="instances: threads of each; 0 = all cores, as each has the whole GPU"
    )
    admit_per_iteration: int = Field(0, ge=0, description="fused: 0 = as many as fit; the authors' code: 1")
    layout: Literal["window", "fixed", "shift", "last", "paged"] = Field(
        "window", description="fused: what moves when a request leaves; window is the paper's reordering, fixed none"
    )
    prefill_tokens: int = Field(0, ge=0, description="fused: prompt tokens per iteration; 0 = whole prompts")
    model: _flover_models.Name = "smollm2-135m"
    device: Literal["cpu", "cuda"] = Field("cpu", description="cuda: ROCm as well; skipped where there is no GPU")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="float16: on a GPU only")
    check_tokens: bool = Field(True, description="compare the tokens of all requests, or of 4, with lone runs")
    predict: bool = Field(
        False, description="measure iterations and prompts before, and say what the queue model predicts"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "ServingPoint":
        if self.engine != "dynamic" and (self.window_s or self.window_t1):
            raise ValueError(
                f"window_s is {self.window_s}, window_t1 {self.window_t1}: only the engine dynamic has a window"
            )
        if self.window_s and self.window_t1:
            raise ValueError(f"window_s is {self.window_s} and window_t1 {self.window_t1}: one of them must be 0")
        if (self.instances or self.instance_threads) and self.engine != "instances":
            raise ValueError(
                f"instances is {self.instances}, instance_threads {self.instance_threads}: only for the engine instances"
            )
        if self.interval_t1 and self.workload == "azure":
            raise ValueError(
                f"interval_t1 is {self.interval_t1}: the trace azure has its own gaps, scaled by time_scale"
            )
        if self.dtype == "float16" and self.device == "cpu":
            raise ValueError("dtype is float16 on the device cpu: allowed float32, bfloat16")
        if self.predict and self.layout in ("fixed", "paged"):
            raise ValueError(
                f"predict with layout {self.layout}: the model has neither dead slots nor tables of blocks"
            )
        return self


def run(point: ServingPoint) -> Outcome:
    """Serve the workload once in real time, then (untimed) decode requests alone for the comparison."""
    import torch

    from repro.flover import workload
    from repro.flover.queueing import evenly

    threads = _physical_cores()
    torch.set_num_threads(threads)
    model = _flover_models.load(point)

    def asked(interval_s: float) -> "tuple[list[Shape], list[Request]]":
        shapes = _flover_workload.shapes(point, interval_s)
        return shapes, _flover_models.requests(point, shapes)

    shapes, requests = asked(point.interval_s)
    capacity = max(request.kv_tokens for request in requests)
    t1 = _flover_alone.seconds(model, requests, capacity) if point.interval_t1 or point.window_t1 else 0.0
    if point.interval_t1:
        shapes, requests = asked(point.interval_t1 * t1)
    window_s = point.window_t1 * t1 or point.window_s

    times = _flover_prediction.measured(point, model, shapes, capacity) if point.predict else None
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
        found = _flover_prediction.predicted(point, shapes, times, capacity, window_s, slowdown)
        metrics |= _flover_prediction.compared(found, report)
    every = point.check_tokens and point.engine != "serial"  # which does the same
    alone = _flover_alone.decoded(model, requests if every else _flover_alone.sample(requests), capacity)
    equal, agreement = _flover_alone.agreement(model, report, alone)
    metrics |= workload.summary(report) | agreement
    metrics["latency_first"] = report.generations[0].latency_s
    metrics["single_request_seconds"] = sum(generation.service_s for generation in alone) / len(alone)
    metrics["mean_interval_seconds"] = shapes[-1].arrival_s / max(1, len(shapes) - 1)
    if point.engine == "dynamic":
        metrics["window_seconds"] = window_s
    return Outcome(
        metrics={name: Metric(value=value, unit=_flover_metrics.unit(name)) for name, value in metrics.items()},
        conditions={
            "weights": _flover_models.words(point),
            "threads": f"{point.instance_threads or threads} per instance"
            if point.engine == "instances"
            else str(threads),
            "linear": model.head.layout,
            "kernels": model.kernels.name,
            "scales": _flover_workload.words(point),
            "lone_reference": f"{len(alone)} of {len(requests)} requests, decoded alone after the timed run",
        },
        series=_series(report, equal),
    )


def _serve(
    point: ServingPoint, model: "Llama", requests: "Sequence[Request]", capacity: int, window_s: float
) -> "Report":
    """One pass over the requests by the point's engine; a rejected request is an error here."""
    from repro.flover.buffers import LAYOUTS
    from repro.flover.engine import Engine

    layout = LAYOUTS[point.layout if point.engine == "fused" else "window"]
    report = Engine(model, _scheduler(point, window_s), capacity, layout=layout).serve(requests)
    if report.rejected:
        raise RuntimeError(f"{len(report.rejected)} requests were rejected: {report.rejected}")
    return report


def _scheduler(point: ServingPoint, window_s: float) -> "Scheduler":
    from repro.baselines.batching import DynamicScheduler, StaticScheduler, serial
    from repro.flover.scheduler import Scheduler

    if point.engine == "serial":
        return serial(point.requests)
    if point.engine == "static":
        return StaticScheduler(point.batch_size, point.requests)
    if point.engine == "dynamic":
        return DynamicScheduler(point.batch_size, point.requests, window_s=window_s)
    return Scheduler(point.max_slots, point.requests, point.admit_per_iteration, prefill_tokens=point.prefill_tokens)


def _serve_by_instances(point: ServingPoint, requests: "Sequence[Request]", capacity: int, threads: int) -> "Served":
    """A process with the model for each request, or as many as the point says."""
    import functools

    from repro.baselines import instances
    from repro.flover.measured import spread

    count = point.instances or len(requests)
    paces = spread(count) if point.predict else ()
    return instances.serve(functools.partial(_flover_models.load, point), requests, count, capacity, threads, paces)


def _series(report: "Report", equal: "dict[int, bool]") -> "pd.DataFrame":
    """A row per request; `equal` is missing where the request was not decoded alone."""
    import pandas as pd

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
    import os

    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or 1, allowed)


def _label(point: ServingPoint) -> str:
    engine = f"{point.engine}{point.batch_size}" if point.engine in ("static", "dynamic") else point.engine
    if point.engine == "dynamic":
        engine += f"-{point.window_t1:g}T1" if point.window_t1 else f"-{point.window_s:g}s"
    engine += f"{point.instances}" if point.instances else ""
    engine += f"-threads{point.instance_threads}" if point.instance_threads else ""
    engine += f"-admit{point.admit_per_iteration}" if point.engine == "fused" and point.admit_per_iteration else ""
    if point.engine == "fused":
        engine += f"-{point.layout}" if point.layout != "window" else ""
        engine += f"-prefill{point.prefill_tokens}" if point.prefill_tokens else ""
    lengths = f"{point.longest}" if point.workload == "uniform" else ""
    engine += "-predicted" if point.predict else ""
    engine += f"-{point.model}" if point.model != "smollm2-135m" else ""
    engine += "-gpu" if point.device == "cuda" else ""
    return f"{engine}-{point.workload}{lengths}-n{point.requests}-{point.dtype}"


REPORTS = """latency_first single_request_seconds mean_interval_seconds window_seconds instance_bytes instances_bytes tokens_checked
    tokens_equal_fraction tokens_equal_or_tied_fraction weights threads linear kernels scales lone_reference"""
EXPERIMENT = Experiment(
    summary="Serve a language model: fused decoding against batching and concurrent instances, token for token",
    parameters=ServingPoint,
    run=run,
    label=_label,
    reports=_flover_metrics.SUMMARY | frozenset(REPORTS.split()) | _flover_prediction.METRICS,
    timeout_s=600,
)

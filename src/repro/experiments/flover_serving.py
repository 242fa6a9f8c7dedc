"""Serving a real language model (SmolLM2-135M): fused decoding against serial and static batching on the same requests."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from repro.experiments.base import Experiment, Outcome, Point
from repro.record import Metric

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pandas as pd

    from repro.flover.engine import Report
    from repro.flover.request import Generation, Request
    from repro.flover.workload import Shape
    from repro.models.llama import Llama

_TIE = 1e-3  # logits closer than this are a near tie: which of them is the larger depends on the order of a sum
_SAMPLE = 4  # requests decoded alone when not all are
_PAPER_PROMPT_TOKENS, _PAPER_OUTPUT_TOKENS, _PAPER_SHORTEST = 8, 512, 128
_UNITS = {"tokens_per_s": "tokens/s", "moved_bytes": "bytes", "cache_bytes": "bytes", "output_tokens": "tokens"}
_SAMPLE_UNITS = {"latency": "s", "ttft": "s", "tpot": "s/token"}


class ServingPoint(Point):
    """Engine, workload and its scales. Lengths and gaps of the Azure trace are multiplied by the scales; the paper's regular
    workloads have prompts of 8 tokens and answers of 512 (uniform: 128 to `longest`), multiplied by `length_scale`."""

    engine: Literal["fused", "serial", "static"] = "fused"
    requests: int = Field(32, ge=1)
    workload: Literal["azure", "fixed", "poisson", "uniform"] = "azure"
    trace_start: int = Field(0, ge=0, description="azure: first row of the slice")
    time_scale: float = Field(0.1, gt=0, description="azure: factor on the gaps between arrivals")
    length_scale: float = Field(0.25, gt=0, description="factor on prompt and answer lengths")
    max_prompt_tokens: int = Field(64, ge=1, description="azure: longer prompts are cut to this")
    max_output_tokens: int = Field(128, ge=1, description="azure: longer answers are cut to this")
    interval_s: float = Field(0.2, ge=0, description="all but azure: (mean) gap between arrivals")
    longest: int = Field(512, ge=_PAPER_SHORTEST, description="uniform: longest answer, before scaling")
    max_slots: int = Field(32, ge=1, description="fused: requests decoded at once")
    batch_size: int = Field(8, ge=1, description="static: requests per batch")
    admit_per_iteration: int = Field(0, ge=0, description="fused: 0 = as many as fit; the authors' code: 1")
    layout: Literal["window", "fixed", "shift", "last", "paged"] = Field(
        "window", description="fused: what moves when a request leaves; window is the paper's reordering, fixed none"
    )
    prefill_tokens: int = Field(0, ge=0, description="fused: prompt tokens per iteration; 0 = whole prompts")
    dtype: Literal["float32", "bfloat16"] = "float32"
    check_tokens: bool = Field(True, description="compare the tokens of all requests, or of 4, with lone runs")


def run(point: ServingPoint) -> Outcome:
    """Serve the workload once in real time, then (untimed) decode requests alone for the comparison."""
    import torch

    from repro.flover import workload
    from repro.models import checkpoint
    from repro.models.llama import Llama

    threads = _physical_cores()
    torch.set_num_threads(threads)
    path = checkpoint.smollm2_path()
    model = Llama(*checkpoint.read_gguf(path), getattr(torch, point.dtype))
    shapes = _shapes(point)
    requests = workload.requests(shapes, workload.prompts_from_text(shapes, _text(path), point.seed))
    capacity = max(request.kv_tokens for request in requests)

    _serve(point, model, requests[:2], capacity)  # warm-up, thrown away
    report = _serve(point, model, requests, capacity)
    alone = _alone(point, model, requests, capacity)
    equal, agreement = _agreement(model, report, alone)
    metrics = workload.summary(report) | agreement
    metrics["single_request_seconds"] = sum(generation.service_s for generation in alone) / len(alone)
    metrics["mean_interval_seconds"] = shapes[-1].arrival_s / max(1, len(shapes) - 1)
    return Outcome(
        metrics={name: Metric(value=value, unit=_unit(name)) for name, value in metrics.items()},
        conditions={
            "model": f"SmolLM2-135M-Instruct, weights dequantised from Q4_1 to {point.dtype}",
            "threads": str(threads),
            "linear": "oneDNN packed" if model.head.packed else "plain",
            "kernels": model.kernels.name,
            "scales": _scales(point),
            "lone_reference": f"{len(alone)} of {len(requests)} requests, decoded alone after the timed run",
        },
        series=_series(report, equal),
    )


def _serve(point: ServingPoint, model: "Llama", requests: "Sequence[Request]", capacity: int) -> "Report":
    """One pass over the requests by the point's engine; a rejected request is an error here."""
    from repro.baselines.batching import StaticScheduler, serial
    from repro.flover.buffers import LAYOUTS
    from repro.flover.engine import Engine
    from repro.flover.scheduler import Scheduler

    if point.engine == "fused":
        scheduler = Scheduler(
            point.max_slots, point.requests, point.admit_per_iteration, prefill_tokens=point.prefill_tokens
        )
    elif point.engine == "serial":
        scheduler = serial(point.requests)
    else:
        scheduler = StaticScheduler(point.batch_size, point.requests)
    layout = LAYOUTS[point.layout if point.engine == "fused" else "window"]
    report = Engine(model, scheduler, capacity, layout=layout).serve(requests)
    if report.rejected:
        raise RuntimeError(f"{len(report.rejected)} requests were rejected: {report.rejected}")
    return report


def _alone(point: ServingPoint, model: "Llama", requests: "Sequence[Request]", capacity: int) -> "list[Generation]":
    """Lone greedy decodes: of every request, or of a sample (always for the serial engine, which does the same).

    The sample takes the middle of each quarter of the answer lengths, so that its mean time is near that of all.
    """
    from repro.baselines.batching import lone

    if len(requests) > _SAMPLE and (point.engine == "serial" or not point.check_tokens):
        by_length = sorted(requests, key=lambda request: request.max_new_tokens)
        requests = [by_length[(2 * i + 1) * len(by_length) // (2 * _SAMPLE)] for i in range(_SAMPLE)]
    return lone(model, requests, capacity)


def _agreement(
    model: "Llama", report: "Report", alone: "list[Generation]"
) -> "tuple[dict[int, bool], dict[str, float]]":
    """Per request decoded alone, whether its tokens are the lone ones; and the shares of equal and of nearly tied ones."""
    from repro.baselines.batching import divergence

    served = {generation.request.id: generation for generation in report.generations}
    gaps = {g.request.id: divergence(model, served[g.request.id], g) for g in alone}
    equal = {request: gap is None for request, gap in gaps.items()}
    tied = [gap is None or gap < _TIE for gap in gaps.values()]
    return equal, {
        "tokens_checked": float(len(gaps)),
        "tokens_equal_fraction": sum(equal.values()) / len(gaps),
        "tokens_equal_or_tied_fraction": sum(tied) / len(gaps),
    }


def _shapes(point: ServingPoint) -> "list[Shape]":
    """Arrivals and lengths of the point's workload."""
    from repro import paths
    from repro.flover import workload

    if point.workload == "azure":
        return workload.azure(
            paths.data("azure23_conv.csv"),
            point.requests,
            point.trace_start,
            point.time_scale,
            point.length_scale,
            point.max_prompt_tokens,
            point.max_output_tokens,
        )
    if point.workload == "uniform":
        ends = (max(1, round(tokens * point.length_scale)) for tokens in (_PAPER_SHORTEST, point.longest))
        return workload.uniform(point.requests, point.interval_s, _PAPER_PROMPT_TOKENS, *ends, point.seed)
    output_tokens = max(1, round(_PAPER_OUTPUT_TOKENS * point.length_scale))
    seed = point.seed if point.workload == "poisson" else None
    return workload.regular(point.requests, point.interval_s, _PAPER_PROMPT_TOKENS, output_tokens, seed)


def _scales(point: ServingPoint) -> str:
    """The workload in words, with every factor."""
    if point.workload == "azure":
        return (
            f"Azure 2023 conversations from row {point.trace_start}: gaps x {point.time_scale:g}, lengths x "
            f"{point.length_scale:g}, prompts cut to {point.max_prompt_tokens}, answers to {point.max_output_tokens}"
        )
    answers, arrivals = str(_PAPER_OUTPUT_TOKENS), point.workload
    if point.workload == "uniform":
        answers, arrivals = f"{_PAPER_SHORTEST} to {point.longest}, drawn uniformly,", "fixed"
    return (
        f"{arrivals} arrivals every {point.interval_s:g} s, prompts of {_PAPER_PROMPT_TOKENS} tokens, "
        f"answers of {answers} x {point.length_scale:g} tokens"
    )


def _text(model: "Path") -> list[int]:
    """Token ids of real text to cut prompts from."""
    from repro import paths
    from repro.models import checkpoint

    return checkpoint.tokenizer(model).encode(paths.data("tinyshakespeare.txt").read_text()[:100_000]).ids


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


def _unit(name: str) -> str:
    """Unit of a metric by its name; `1` for counts and shares."""
    if name.endswith("_seconds"):
        return "s"
    return _UNITS.get(name) or _SAMPLE_UNITS.get(name.split("_")[0], "1")


def _physical_cores() -> int:
    """Physical cores this process may use: hyper-threads do not help a decode that waits for memory."""
    import os

    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or 1, allowed)


def _label(point: ServingPoint) -> str:
    engine = f"static{point.batch_size}" if point.engine == "static" else point.engine
    engine += f"-admit{point.admit_per_iteration}" if point.engine == "fused" and point.admit_per_iteration else ""
    if point.engine == "fused":
        engine += f"-{point.layout}" if point.layout != "window" else ""
        engine += f"-prefill{point.prefill_tokens}" if point.prefill_tokens else ""
    lengths = f"{point.longest}" if point.workload == "uniform" else ""
    return f"{engine}-{point.workload}{lengths}-n{point.requests}-{point.dtype}"


REPORTS = """total_seconds tokens_per_s latency_mean latency_p50 latency_p99 ttft_mean ttft_p50 ttft_p99 tpot_mean tpot_p50 tpot_p99
    output_tokens iterations waste_fraction slot_moves moved_bytes cache_bytes single_request_seconds mean_interval_seconds tokens_checked
    tokens_equal_fraction tokens_equal_or_tied_fraction model threads linear kernels scales lone_reference"""
EXPERIMENT = Experiment(
    summary="Serve SmolLM2-135M: fused decoding against serial and static batching, token for token",
    parameters=ServingPoint,
    run=run,
    label=_label,
    reports=frozenset(REPORTS.split()),
    timeout_s=600,
)

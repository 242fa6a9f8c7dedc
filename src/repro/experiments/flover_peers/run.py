"""Serve the same requests with the fused engine, with another server, and with the fused engine again."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from repro import paths
from repro.experiments.base import MissingHardware, Outcome
from repro.experiments.flover_peers import PeersMetrics, PeersPoint, Served, processes
from repro.experiments.flover_peers.catalogue import ENGINES
from repro.experiments.flover_peers.engines.protocol import Job, Request, Result
from repro.experiments.flover_serving import inputs
from repro.flover.arrivals import RequestShape

_LONE = 4  # requests decoded alone for T1
_ROUNDS = 3  # of these, of which T1 is the median
Passes = Mapping[str, Result]


def run(point: PeersPoint) -> Outcome:
    """Each pass is a process of its own, with loading and warm-up before the clock starts; all follow the same arrival
    times, prompts and lengths. MissingHardware, with what would bring it, where the engine's software is not there."""
    if reason := ENGINES[point.engine].missing():
        raise MissingHardware(reason)
    cores = _cores()
    before = processes.busy()
    t1 = _t1(point, cores)
    requests = _requests(point, point.interval_t1 * t1)
    order = {"fused, first": "fused", "peer": point.engine, "fused, second": "fused"}
    passes = {name: _pass(point, engine, requests, cores) for name, engine in order.items()}
    others = processes.share_of_others(before, processes.busy())
    conditions = {
        "weights": inputs.weights(point.served),
        "threads": f"{len(cores)}",
        "version": passes["peer"].version,
        "scales": inputs.scales(point.served),
        "order": "fused, the point's engine, fused; each in a process of its own",
    }
    metrics = compared(requests, passes, t1, others)
    return Outcome(metrics, conditions=conditions, series=_series(requests, passes))


def _cores() -> list[int]:
    """Those that this process may use, a thread each."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _requests(point: PeersPoint, interval_s: float) -> list[Request]:
    shapes: Sequence[RequestShape] = inputs.shapes(point.served, interval_s)
    asked = inputs.requests(point.served, shapes)
    return [Request(r.id, r.arrived_s, list(r.prompt), r.max_new_tokens) for r in asked]


def lone(requests: Sequence[Request]) -> list[Request]:
    """At most 4, to be decoded one after the other: the middle of each quarter of the lengths."""
    if len(requests) <= _LONE:
        return list(requests)
    by_length = sorted(requests, key=lambda request: request.output_tokens)
    return [by_length[(2 * i + 1) * len(by_length) // (2 * _LONE)] for i in range(_LONE)]


def _t1(point: PeersPoint, cores: Sequence[int]) -> float:
    """Seconds of a lone request, the mean over `lone` in the median of several rounds: arrivals are made of it."""
    some = lone(_requests(point, 0.0))
    asked = [replace(request, id=number) for number, request in enumerate(some * _ROUNDS)]
    ends = sorted(answer.finish_s for answer in _pass(point, "serial", asked, cores).requests)
    rounds = np.diff(ends[len(some) - 1 :: len(some)], prepend=0.0)
    return float(np.median(rounds)) / len(some)


def _pass(point: PeersPoint, name: str, requests: list[Request], cores: Sequence[int]) -> Result:
    """Models, and what engines compile, stay in the checkout's cache."""
    from repro.experiments.flover_peers import models  # transformers is there

    engine, cache = ENGINES[name], paths.root() / ".cache" / "peers"
    folder = models.folder_of(point.model, point.dtype, cache)
    file = str(models.gguf_of(folder, point.dtype)) if name == "llama_cpp" else ""
    job = Job(str(folder), file, point.dtype, len(cores), engine.variant, requests)
    return processes.serve(engine, job, cores, cache)


def _total(result: Result) -> float:
    return max(answer.finish_s for answer in result.requests)


def compared(requests: Sequence[Request], passes: Passes, t1: float, others: float) -> PeersMetrics:
    """Metrics of the three passes; `t1`: seconds of a lone request, `others`: share of the cores' time."""
    first, peer, second = (passes[name] for name in ("fused, first", "peer", "fused, second"))
    ours = [served(requests, result).model_dump() for result in (first, second)]
    known = [name for name in ours[0] if None not in (ours[0][name], ours[1][name])]
    equal = equal_share(first, peer)
    return PeersMetrics(
        **served(requests, peer).model_dump(),
        **{f"fused_{name}": (ours[0][name] + ours[1][name]) / 2 for name in known},
        fused_drift=_total(second) / _total(first),
        others_fraction=others,
        single_request_seconds=t1,
        mean_interval_seconds=requests[-1].arrival_s / max(1, len(requests) - 1),
        tokens_equal_fraction=float(np.mean([share == 1 for share in equal])),
        tokens_before_difference=float(np.mean(equal)),
    )


def served(requests: Sequence[Request], result: Result) -> Served:
    """Of one pass; all times but the total count from a request's arrival."""
    arrival = {request.id: request.arrival_s for request in requests}
    latency = [answer.finish_s - arrival[answer.id] for answer in result.requests]
    ttft = [a.first_token_s - arrival[a.id] for a in result.requests if a.first_token_s is not None]
    streamed = len(ttft) == len(latency)
    return Served(
        total_seconds=_total(result),
        tokens_per_s=sum(len(answer.tokens) for answer in result.requests) / _total(result),
        latency_mean=float(np.mean(latency)),
        latency_p50=float(np.percentile(latency, 50)),
        latency_p99=float(np.percentile(latency, 99)),
        ttft_mean=float(np.mean(ttft)) if streamed else None,
        ttft_p99=float(np.percentile(ttft, 99)) if streamed else None,
        peak_bytes=result.peak_bytes,
        load_seconds=result.load_s,
    )


def equal_share(one: Result, other: Result) -> list[float]:
    """Share of each answer before the first token in which two passes differ, in the order of the requests' numbers."""
    pairs = zip(*(sorted(each.requests, key=lambda answer: answer.id) for each in (one, other)), strict=True)
    return [float(np.cumprod(np.equal(a.tokens, b.tokens)).mean()) for a, b in pairs]


def _series(requests: Sequence[Request], passes: Passes) -> pd.DataFrame:
    """A row per request and pass; `first_token_s` is missing where the engine does not tell."""
    asked = {request.id: request for request in requests}
    rows = (
        {
            "server": name,
            "request": answer.id,
            "arrival_s": asked[answer.id].arrival_s,
            "prompt_tokens": len(asked[answer.id].prompt),
            "output_tokens": len(answer.tokens),
            "first_token_s": answer.first_token_s,
            "finish_s": answer.finish_s,
        }
        for name, result in passes.items()
        for answer in sorted(result.requests, key=lambda answer: answer.id)
    )
    return pd.DataFrame(rows).astype({"first_token_s": "float64"})

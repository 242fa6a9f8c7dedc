"""The same requests under each policy, in turns; and what the queue model says of it."""

import numpy as np
import pandas as pd

from repro.baselines.batching import StaticScheduler
from repro.experiments.sarathi_prefill import POLICIES, SWEEPS, PrefillMetrics, PrefillPoint
from repro.flover import queueing, workload
from repro.flover.arrivals import RequestShape
from repro.flover.engine import Engine
from repro.flover.measured import measure
from repro.flover.request import Request
from repro.flover.scheduler import Scheduler
from repro.models.decoder import Decoder

GAP_S = Scheduler.token_gap_s  # of the policy `bounded`: the default


def measured(point: PrefillPoint, model: Decoder) -> tuple[PrefillMetrics, pd.DataFrame]:
    """Each policy twice in each sweep, the second time in the other order, and times of passes before and after: on a
    machine that grows slower no policy gains by its place, nor does the model. The series has a row for each."""
    shapes = [RequestShape(0.0, point.prompt_tokens, point.output_tokens)] * point.requests
    requests = workload.requests(shapes, workload.random_prompts(shapes, model.config.vocab, point.seed))
    capacity = point.prompt_tokens + point.output_tokens
    for policy in POLICIES:  # warm-up, thrown away
        served(point, model, policy, requests[:3], capacity)
    times, rows = [], []
    for sweep in range(point.rounds * SWEEPS):
        times.append(passes(point, model, capacity))
        turns = [*POLICIES, *reversed(POLICIES)]
        place = {"round": sweep // SWEEPS, "sweep": sweep % SWEEPS}
        rows += [{**place, "policy": p, **served(point, model, p, requests, capacity)} for p in turns]
        times.append(passes(point, model, capacity))
    table = pd.DataFrame(rows)
    found = {}
    for policy, runs in table.groupby("policy"):
        medians = runs.drop(columns=["round", "sweep", "policy"]).median().dropna()
        found |= {f"{policy}_{name}": value for name, value in medians.items()}
        predicted = [modelled(point, str(policy), capacity).run(shapes, each).total_seconds for each in times]
        found[f"{policy}_error_seconds"] = float(np.median(predicted)) / medians.seconds - 1
    return PrefillMetrics(**found), table


def served(
    point: PrefillPoint, model: Decoder, policy: str, requests: list[Request], capacity: int
) -> dict[str, float | None]:
    """One pass over the requests."""
    report = Engine(model, scheduler(point, policy), capacity).serve(requests)
    if report.rejected or report.failed:
        raise RuntimeError(f"requests were rejected: {report.rejected}, or failed: {report.failed}")
    return {
        "seconds": report.total_seconds,
        "ttft_mean": float(np.mean([g.ttft_s for g in report.generations])),
        "gap_longest": None if policy == "request_level" else max(g.longest_gap_s for g in report.generations),
    }


def scheduler(point: PrefillPoint, policy: str) -> Scheduler:
    if policy == "request_level":
        return StaticScheduler(point.slots, point.requests)
    limits = {"chunked": {"prefill_tokens": point.chunk, "token_gap_s": 0.0}, "bounded": {"token_gap_s": GAP_S}}
    return Scheduler(point.slots, point.requests, **limits.get(policy, {"token_gap_s": 0.0}))


def modelled(point: PrefillPoint, policy: str, capacity: int) -> queueing.Policy:
    """What the queue model runs in place of the policy."""
    return {
        "chunked": queueing.Fused(point.slots, prefill_tokens=point.chunk),
        "request_level": queueing.Batches(point.slots, capacity=capacity),
        "iteration_level": queueing.Fused(point.slots),
        "bounded": queueing.Fused(point.slots, token_gap_s=GAP_S),
    }[policy]


def passes(point: PrefillPoint, model: Decoder, capacity: int) -> queueing.MeasuredTimes:
    """Times of decoding passes and of chunks, at a grid that spans what the policies come to need."""
    prompts = sorted({min(16, point.prompt_tokens), min(point.chunk, point.prompt_tokens), point.prompt_tokens})
    batches = sorted({1, (point.slots + 1) // 2, point.slots})
    return measure(model, batches, [capacity - 1], prompts, [0, point.prompt_tokens], repeats=3)

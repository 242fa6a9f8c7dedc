"""What the queue model, given times measured on this machine, says about a point of `flover_serving` before it is served."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from repro.experiments.base import Point

if TYPE_CHECKING:
    from repro.flover.arrivals import Shape
    from repro.flover.engine import Report
    from repro.flover.queueing import MeasuredTimes, Policy, QueueRun
    from repro.models.llama import Llama

_CONTEXTS_APART = 64  # stored tokens; attention is a small part of an iteration
METRICS = frozenset(
    f"{what}_{name}" for what in ("predicted", "error") for name in ("total_seconds", "latency_mean", "latency_p99")
)


def measured(point: Point, model: "Llama", shapes: "Sequence[Shape]", capacity: int) -> "MeasuredTimes":
    """Times of iterations and prompts at a grid that spans what the workload can come to need."""
    from repro.flover.measured import measure, spread

    most = {"fused": point.max_slots, "static": point.batch_size, "dynamic": point.batch_size}.get(point.engine, 1)
    shortest = min(min(shape.prompt_tokens for shape in shapes), capacity - 1)
    contexts = sorted({*range(shortest, capacity - 1, _CONTEXTS_APART), capacity - 1})
    prompts = spread(max(shape.prompt_tokens for shape in shapes), min(shape.prompt_tokens for shape in shapes))
    starts = [0]
    if point.prefill_tokens:
        last = prompts[-1] - 1
        starts, prompts = (
            sorted({0, *range(0, last, _CONTEXTS_APART), last}),
            spread(min(point.prefill_tokens, prompts[-1])),
        )
    return measure(model, spread(min(most, len(shapes))), [max(context, 4) for context in contexts], prompts, starts)


def predicted(
    point: Point,
    shapes: "Sequence[Shape]",
    times: "MeasuredTimes",
    capacity: int,
    window_s: float,
    slowdown: Callable[[int], float],
) -> "QueueRun":
    """The point's policy on its requests."""
    return _policy(point, capacity, window_s, slowdown).run(shapes, times)


def _policy(point: Point, capacity: int, window_s: float, slowdown: Callable[[int], float]) -> "Policy":
    from repro.flover import queueing

    if point.engine == "fused":
        return queueing.Fused(point.max_slots, point.admit_per_iteration, point.prefill_tokens)
    if point.engine == "serial":
        return queueing.Fused(slots=1)
    if point.engine == "instances":
        return queueing.Instances(point.instances, slowdown)
    return queueing.Batches(point.batch_size, window_s if point.engine == "dynamic" else None, capacity)


def compared(found: "QueueRun", report: "Report") -> dict[str, float]:
    """Predicted seconds, and how far they are from the measured ones: predicted ÷ measured - 1."""
    import numpy as np

    latency = [generation.latency_s for generation in report.generations]
    pairs = {
        "total_seconds": (found.total_seconds, report.total_seconds),
        "latency_mean": (np.mean(found.latency_s), np.mean(latency)),
        "latency_p99": (np.percentile(found.latency_s, 99), np.percentile(latency, 99)),
    }
    metrics = {f"predicted_{name}": float(ours) for name, (ours, _) in pairs.items()}
    return metrics | {f"error_{name}": float(ours / theirs - 1) for name, (ours, theirs) in pairs.items()}

"""What the queue model predicts for a point of `flover_serving`, given times measured on this machine."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from repro.experiments.flover_serving import ServingPoint
from repro.flover import queueing
from repro.flover.arrivals import RequestShape
from repro.flover.measured import measure, spread
from repro.flover.queueing import MeasuredTimes, Policy, QueueRun
from repro.models.decoder import Decoder


def measured(point: ServingPoint, model: Decoder, shapes: Sequence[RequestShape], capacity: int) -> MeasuredTimes:
    """Times of iterations and prompts at a grid that spans what the workload can come to need."""
    most = {"fused": point.max_slots, "static": point.batch_size, "dynamic": point.batch_size}.get(point.engine, 1)
    shortest, longest = (kind(shape.prompt_tokens for shape in shapes) for kind in (min, max))
    contexts = _apart(min(shortest, capacity - 1), capacity - 1)
    starts, prompts = [0], spread(longest, shortest)
    if point.prefill_tokens:  # prompts of one iteration share them, so a piece may begin anywhere
        starts, prompts = _apart(0, longest - 1), spread(min(point.prefill_tokens, longest))
    return measure(model, spread(min(most, len(shapes))), contexts, prompts, starts)


def _apart(first: int, last: int) -> list[int]:
    """Both, and what is between them at steps of 64 stored tokens: attention is a small part of an iteration."""
    return [*range(first, last, 64), last]


def policy(point: ServingPoint, capacity: int, window_s: float, slowdown: Callable[[int], float]) -> Policy:
    """What the queue model runs in place of the point's engine. `slowdown`: of instances, by how many run."""
    if point.engine == "fused":
        return queueing.Fused(point.max_slots, point.admit_per_iteration, point.prefill_tokens)
    if point.engine == "serial":
        return queueing.Fused(slots=1)
    if point.engine == "instances":
        return queueing.Instances(point.instances, slowdown)
    return queueing.Batches(point.batch_size, window_s if point.engine == "dynamic" else None, capacity)


def compared(found: QueueRun, measured: Mapping[str, float]) -> dict[str, float]:
    """Predicted seconds, and how far they are from the `measured` ones: predicted ÷ measured - 1."""
    predicted = {
        "total_seconds": found.total_seconds,
        "latency_mean": np.mean(found.latency_s),
        "latency_p99": np.percentile(found.latency_s, 99),
    }
    errors = {f"error_{name}": seconds / measured[name] - 1 for name, seconds in predicted.items()}
    return errors | {f"predicted_{name}": seconds for name, seconds in predicted.items()}

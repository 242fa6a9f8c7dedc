"""Batches that form and then run until their longest request is done: by number (static) or by time (dynamic)."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from repro.flover.arrivals import RequestShape
from repro.flover.queueing.result import QueueRun, check_shapes
from repro.flover.queueing.shared import evenly, share
from repro.flover.queueing.times import Times, check_least, pass_s


@dataclass(frozen=True)
class Batches:
    """One batch at a time, of `slots` requests at most (0: no limit), whose answers are handed back together.

    `window_s`: the batch is formed so long after the first of those who wait has come, or sooner when it is full; it
    takes all that have come when it starts. None: static, formed when it is full or when no more will come. `capacity`:
    KV positions of a slot, where the context of a row that is done stops growing; 0 for no end.
    """

    slots: int = 0
    window_s: float | None = None
    capacity: int = 0

    def __post_init__(self) -> None:
        check_least(self, slots=0, capacity=0)
        if self.window_s is not None:
            check_least(self, window_s=0)

    def run(self, shapes: Sequence[RequestShape], times: Times) -> QueueRun:
        """Serve the requests, which are in order of arrival."""
        check_shapes(shapes)
        arrival = [shape.arrival_s for shape in shapes]
        batches, starts, ends, following, now = [], [], [], 0, 0.0
        while following < len(shapes):
            starts.append(max(now, _formed(arrival, following, self.slots, self.window_s)))
            batches.append(_taken(arrival, following, self.slots, starts[-1]))
            now = _end(shapes[batches[-1]], times, starts[-1], self.capacity)
            ends.append(now)
            following = batches[-1].stop
        return _handed_back(shapes, batches, starts, ends)


@dataclass(frozen=True)
class ConcurrentBatches:
    """Dynamic batching where each batch runs at once, beside those that run: as the paper's small windows seem to.

    `slowdown`: how many times longer each takes when so many run; the rest as in `Batches`.
    """

    window_s: float
    slots: int = 0
    slowdown: Callable[[int], float] = evenly
    capacity: int = 0

    def __post_init__(self) -> None:
        check_least(self, window_s=0, slots=0, capacity=0)

    def run(self, shapes: Sequence[RequestShape], times: Times) -> QueueRun:
        """Serve the requests, which are in order of arrival."""
        check_shapes(shapes)
        arrival = [shape.arrival_s for shape in shapes]
        batches, starts, following = [], [], 0
        while following < len(shapes):
            starts.append(_formed(arrival, following, self.slots, self.window_s))
            batches.append(_taken(arrival, following, self.slots, starts[-1]))
            following = batches[-1].stop
        work = [_end(shapes[batch], times, 0.0, self.capacity) for batch in batches]
        return _handed_back(shapes, batches, starts, share(starts, work, self.slowdown).ends)


def _formed(arrival: Sequence[float], first: int, slots: int, window_s: float | None) -> float:
    """When the batch of request `first` and those behind it could start."""
    last = min(first + (slots or len(arrival)), len(arrival)) - 1
    full = last - first + 1 == slots
    if window_s is None:
        return arrival[last]
    closes = arrival[first] + window_s
    return min(closes, arrival[last]) if full else closes


def _taken(arrival: Sequence[float], first: int, slots: int, start: float) -> slice:
    """Requests from `first` on that have come when the batch starts."""
    return slice(first, min(bisect_right(arrival, start), first + (slots or len(arrival))))


def _iterations(batch: Sequence[RequestShape]) -> int:
    return max(shape.output_tokens for shape in batch) - 1


def _end(batch: Sequence[RequestShape], times: Times, start: float, capacity: int) -> float:
    """When the pass over all prompts and every iteration of a batch is done. Dead rows go on."""
    # An answer of one token needs no position for it, so its row stands one before.
    longest = max(min(shape.prompt_tokens, shape.prompt_tokens + shape.output_tokens - 2) for shape in batch)
    context = longest + np.arange(_iterations(batch))
    prompts = pass_s(times, 0, 0, [(shape.prompt_tokens, 0) for shape in batch])
    context = np.minimum(context, capacity - 1) if capacity else context
    decoded = times.decode(len(batch), context) if len(context) else np.zeros(0)
    return float(np.cumsum(np.concatenate(([start, prompts], decoded)))[-1])


def _handed_back(
    shapes: Sequence[RequestShape], batches: Sequence[slice], starts: Sequence[float], ends: Iterable[float]
) -> QueueRun:
    """The run of a policy that streams no tokens: nobody sees one before the end of the batch."""
    admitted, finish = np.zeros(len(shapes)), np.zeros(len(shapes))
    for batch, start, end in zip(batches, starts, ends, strict=True):
        admitted[batch], finish[batch] = start, end
    arrival = np.array([shape.arrival_s for shape in shapes])
    iterations = [_iterations(shapes[batch]) for batch in batches]
    rows = sum(count * (batch.stop - batch.start) for count, batch in zip(iterations, batches, strict=True))
    given = sum(shape.output_tokens - 1 for shape in shapes)
    return QueueRun(arrival, admitted, finish, finish, sum(iterations), rows, rows - given)

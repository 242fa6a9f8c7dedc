"""Batches that form and then run until their longest request is done: by number (static) or by time (dynamic)."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from repro.flover.arrivals import RequestShape
from repro.flover.queueing.result import QueueRun, arrivals_of
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
        check_least(self, slots=0, window_s=0, capacity=0)

    def run(self, shapes: Sequence[RequestShape], times: Times) -> QueueRun:
        formed, ends = [], [0.0]
        for start, batch in _formed(arrivals_of(shapes), self.slots, self.window_s, ends):
            formed.append((start, batch))
            ends.append(_end(shapes[batch], times, start, self.capacity))
        return _handed_back(shapes, formed, ends[1:])


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
        formed = list(_formed(arrivals_of(shapes), self.slots, self.window_s))
        work = [_end(shapes[batch], times, 0.0, self.capacity) for _, batch in formed]
        return _handed_back(shapes, formed, share([start for start, _ in formed], work, self.slowdown).ends)


def _formed(
    arrival: Sequence[float], slots: int, window_s: float | None, ends: Sequence[float] = (0.0,)
) -> Iterator[tuple[float, slice]]:
    """When each batch starts, at the last of `ends` (which may grow meanwhile) or later, and who has come by then."""
    first = 0
    while first < len(arrival):
        end = min(first + (slots or len(arrival)), len(arrival))
        start = arrival[end - 1]
        if window_s is not None:
            closes = arrival[first] + window_s
            start = min(closes, start) if end - first == slots else closes
        start = max(ends[-1], start)
        batch = slice(first, min(bisect_right(arrival, start), end))
        yield start, batch
        first = batch.stop


def _iterations(batch: Sequence[RequestShape]) -> int:
    return max(shape.output_tokens for shape in batch) - 1


def _end(batch: Sequence[RequestShape], times: Times, start: float, capacity: int) -> float:
    """When the pass over all prompts and every iteration of a batch is done. Dead rows go on."""
    # An answer of one token needs no position for it, so its row stands one before.
    longest = max(min(shape.prompt_tokens, shape.prompt_tokens + shape.output_tokens - 2) for shape in batch)
    context = longest + np.arange(_iterations(batch))
    prompts = pass_s(times, 0, 0, [(shape.prompt_tokens, 0) for shape in batch])
    context = np.minimum(context, capacity - 1) if capacity else context
    return float(np.cumsum(np.concatenate(([start, prompts], times.decode(len(batch), context))))[-1])


def _handed_back(
    shapes: Sequence[RequestShape], formed: Iterable[tuple[float, slice]], ends: Iterable[float]
) -> QueueRun:
    """The run of a policy that streams no tokens: nobody sees one before the end of the batch."""
    admitted, finish = np.zeros(len(shapes)), np.zeros(len(shapes))
    iterations = rows = 0
    for (start, batch), end in zip(formed, ends, strict=True):
        admitted[batch], finish[batch] = start, end
        iterations += _iterations(shapes[batch])
        rows += _iterations(shapes[batch]) * (batch.stop - batch.start)
    arrival = np.array([shape.arrival_s for shape in shapes])
    given = sum(shape.output_tokens - 1 for shape in shapes)
    return QueueRun(arrival, admitted, finish, finish, iterations, rows, rows - given)

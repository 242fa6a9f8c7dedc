"""Work that shares a machine: tasks that run at the same time, each slower for the others (processor sharing)."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from repro.flover.arrivals import RequestShape
from repro.flover.queueing.result import QueueRun, arrivals_of
from repro.flover.queueing.times import Times, check_least


def evenly(running: int) -> float:
    """Slow-down where the machine is shared fairly at no cost: k at once take k times as long."""
    return float(running)


@dataclass(frozen=True)
class Shared:
    """Seconds at which each task began and ended, [n]; `clock` and `attained` [m]: how much work a task that always ran
    would have done by then."""

    begins: NDArray[np.float64]
    ends: NDArray[np.float64]
    clock: NDArray[np.float64]
    attained: NDArray[np.float64]

    def when(self, work: NDArray[np.float64]) -> NDArray[np.float64]:
        """When each task had that much of its work done, [n]."""
        reached = np.interp(np.interp(self.begins, self.clock, self.attained) + work, self.attained, self.clock)
        # While nobody runs, one amount of work stands for a stretch of time.
        return np.clip(reached, self.begins, self.ends)


def share(
    starts: Sequence[float], work: Sequence[float], slowdown: Callable[[int], float] = evenly, limit: int = 0
) -> Shared:
    """Tasks that come at `starts` (ascending) and take `work` seconds alone. When k run, each takes `slowdown(k)` times
    as long; at most `limit` run (0: all), the others wait in order."""
    begins, ends = np.zeros(len(work)), np.zeros(len(work))
    running: list[tuple[float, int]] = []  # attained work at which a task is done
    now, attained, following = 0.0, 0.0, 0
    clock, progress = [0.0], [0.0]
    while following < len(work) or running:
        free = following < len(work) and (not limit or len(running) < limit)
        begin = max(now, starts[following]) if free else np.inf
        pace = slowdown(len(running)) if running else np.inf
        end = now + (running[0][0] - attained) * pace if running else np.inf
        if begin < end:
            attained += (begin - now) / pace
            begins[following], now = begin, begin
            heapq.heappush(running, (attained + work[following], following))
            following += 1
        else:
            attained, task = heapq.heappop(running)
            ends[task] = now = end
        clock.append(now)
        progress.append(attained)
    return Shared(begins, ends, np.array(clock), np.array(progress))


@dataclass(frozen=True)
class Instances:
    """Concurrent instances of the model, each of which serves one request at a time (the paper's FasterTransformer):
    `count` of them, 0 for one per request. `slowdown`: how many times longer each takes when so many run."""

    count: int = 0
    slowdown: Callable[[int], float] = evenly

    def __post_init__(self) -> None:
        check_least(self, count=0)

    def run(self, shapes: Sequence[RequestShape], times: Times) -> QueueRun:
        arrival = arrivals_of(shapes)
        prompts = np.array([times.prefill(shape.prompt_tokens) for shape in shapes])
        decoded = [
            np.sum(times.decode(1, shape.prompt_tokens + np.arange(shape.output_tokens - 1))) for shape in shapes
        ]
        shared = share(arrival, (prompts + decoded).tolist(), self.slowdown, self.count)
        iterations = sum(shape.output_tokens - 1 for shape in shapes)
        return QueueRun(np.array(arrival), shared.begins, shared.when(prompts), shared.ends, iterations, iterations)

"""In-flight batching without the paper's reordering: who leaves the middle of the window leaves a dead row."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from repro.flover.arrivals import RequestShape
from repro.flover.queueing.fused import prompts_apart
from repro.flover.queueing.result import QueueRun, arrivals_of
from repro.flover.queueing.times import LinearTimes


@dataclass(frozen=True)
class FixedSlots:
    """As `Fused(admit_per_iteration=1, prefill_apart=True)`, but a freed slot stays in every iteration until it is at
    an edge of the window. Newcomers come above the window. `times` do not depend on the context."""

    def run(self, shapes: Sequence[RequestShape], times: LinearTimes) -> QueueRun:
        arrival, joins = arrivals_of(shapes), prompts_apart(shapes, times)
        admitted, finish = np.zeros(len(shapes)), np.zeros(len(shapes))
        window: deque[int] = deque()  # requests by slot
        ends: dict[int, int] = {}  # of those who are not done: the iteration before which they will be
        now, iteration, rows, dead_rows, following = 0.0, 0, 0, 0, 0
        while following < len(shapes) or window:
            if not window:
                now = max(now, joins[following])
            if following < len(shapes) and joins[following] <= now:
                admitted[following] = now
                window.append(following)
                ends[following] = iteration + shapes[following].output_tokens - 1
                following += 1
            iteration_s = float(times.decode(len(window), np.zeros(1, np.int64))[0])
            steps = min(ends.values()) - iteration
            if following < len(shapes):  # at the first boundary after its prompt the next joins
                steps = min(steps, max(1, math.ceil((joins[following] - now) / iteration_s)))
            now, iteration = now + steps * iteration_s, iteration + steps
            rows, dead_rows = rows + steps * len(window), dead_rows + steps * (len(window) - len(ends))
            for request in [request for request, end in ends.items() if end == iteration]:
                finish[request] = now
                del ends[request]
            while window and window[0] not in ends:
                window.popleft()
            while window and window[-1] not in ends:
                window.pop()
        return QueueRun(np.array(arrival), admitted, np.array(joins), finish, iteration, rows, dead_rows)

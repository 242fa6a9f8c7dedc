"""Pipeline parallelism as a discrete-event model: micro-batches that take unequal times leave stages idle (bubbles;
SARATHI, arXiv 2308.16369).

As many micro-batches are under way as there are stages. Each is a server of its own with `slots` requests, which it
takes from one queue, and its next pass begins when the one before has left the last stage: the next tokens follow from
the last ones. A stage takes its share of a pass's time, and passes go through it one after another.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from repro.flover.arrivals import RequestShape
from repro.flover.queueing.result import arrivals_of
from repro.flover.queueing.times import Times, check_least, pass_s


@dataclass(frozen=True)
class PipelineRun:
    """`total_seconds`: until the last request is done. `idle_s` [stages]: seconds in which a stage waited between its
    first pass and its last. `passes`: of all micro-batches."""

    total_seconds: float
    idle_s: NDArray[np.float64]
    passes: int

    @property
    def bubble_fraction(self) -> float:
        """Share of the stages' time that was idle; 0 where nothing took time."""
        return float(self.idle_s.sum()) / len(self.idle_s) / self.total_seconds if self.total_seconds else 0.0


@dataclass(frozen=True)
class Pipeline:
    """`stages` of equal work, micro-batches of `slots` requests. `chunk`: tokens of a pass, prompts in chunks beside
    those who decode; 0: whole prompts of newcomers beside them (iteration-level scheduling). ValueError for less than
    one stage or slot, or a chunk below 0."""

    stages: int
    slots: int
    chunk: int = 0

    def __post_init__(self) -> None:
        check_least(self, stages=1, slots=1, chunk=0)

    def run(self, shapes: Sequence[RequestShape], times: Times) -> PipelineRun:
        """All requests are there at the start, whenever they arrive. ValueError where they cannot be served, or are not in
        order of arrival."""
        arrivals_of(shapes)
        waiting, passes = deque(shapes), 0
        batches = [_MicroBatch(self) for _ in range(self.stages)]
        free, idle = [0.0] * self.stages, [0.0] * self.stages  # by stage: its latest pass is over; waited for the next
        while batches:
            batch = min(batches, key=lambda each: each.ready_s)  # passes enter the first stage in this order
            seconds = batch.advance(waiting, times)
            if seconds is None:
                batches.remove(batch)
                continue
            now = batch.ready_s
            for stage, over in enumerate(free):
                begin = max(now, over)
                idle[stage] += begin - over if passes else 0.0  # before its first pass a stage waits for nobody's
                free[stage] = now = begin + seconds / self.stages
            batch.ready_s = now
            passes += 1
        return PipelineRun(max(free), np.array(idle), passes)


@dataclass
class _MicroBatch:
    policy: Pipeline
    ready_s: float = 0.0  # when its last pass had left the last stage
    prompts: deque[list[int]] = field(default_factory=deque)  # [tokens, of these done, answer] of those in their prompt
    answers: list[list[int]] = field(default_factory=list)  # [stored tokens, tokens to come] of those who decode

    def advance(self, waiting: deque[RequestShape], times: Times) -> float | None:
        """Seconds of its next pass on one stage that had all layers, and what it changes; None when there is none."""
        chunk, chunks = self.policy.chunk, []
        begun: list[list[int]] = []
        left = max(1, chunk - len(self.answers)) if chunk else float("inf")
        while left > 0:
            if not self.prompts:
                if not waiting or len(self.answers) + len(begun) >= self.policy.slots:
                    break
                shape = waiting.popleft()
                self.prompts.append([shape.prompt_tokens, 0, shape.output_tokens])
            total, done, answer = self.prompts[0]
            tokens = int(min(left, total - done))
            chunks.append((tokens, done))
            left -= tokens
            self.prompts[0][1] += tokens
            if done + tokens == total:
                self.prompts.popleft()
                begun.append([total, answer - 1])
        if not chunks and not self.answers:
            return None
        seconds = pass_s(times, len(self.answers), max((stored for stored, _ in self.answers), default=0), chunks)
        self.answers = [[stored + 1, left - 1] for stored, left in self.answers] + begun
        self.answers = [each for each in self.answers if each[1]]
        return seconds

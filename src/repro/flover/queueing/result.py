"""What the model of a policy is asked and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from repro.flover.arrivals import RequestShape
from repro.flover.queueing.times import Times


@dataclass(frozen=True)
class QueueRun:
    """Seconds from the start of serving, [n] by request: when it was admitted, when its first token was there for the
    user to see, when its answer was handed back. `iterations`: of decoding, in all; `rows`: requests in them, summed
    up; `dead_rows`: those among them that gave no token."""

    arrival_s: NDArray[np.float64]
    admitted_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    iterations: int
    rows: int
    dead_rows: int = 0

    @property
    def total_seconds(self) -> float:
        return float(self.finish_s.max())

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """From arrival until the answer was handed back, [n]."""
        return self.finish_s - self.arrival_s

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        """From arrival to the first token, [n]."""
        return self.first_token_s - self.arrival_s

    @property
    def overlap_fraction(self) -> float:
        """The paper's overlap (v1 Fig. 8): the share of all requests that an average iteration holds; 0 without iterations,
        as prompts give the first tokens."""
        return self.rows / self.iterations / len(self.finish_s) if self.iterations else 0.0


class Policy(Protocol):
    """Who runs when."""

    def run(self, shapes: Sequence[RequestShape], times: Times) -> QueueRun:
        """Serve requests in order of arrival. ValueError when there are none, they are not in that order, one has a
        prompt or an answer of no token, or `MeasuredTimes` do not reach as far."""


def arrivals_of(shapes: Sequence[RequestShape]) -> list[float]:
    """When each request arrives; ValueError where they cannot be served."""
    if not shapes:
        raise ValueError("no request to serve: at least one is needed")
    before = 0.0
    for number, shape in enumerate(shapes):
        if not before <= shape.arrival_s < np.inf:
            raise ValueError(
                f"request {number}: arrival_s is {shape.arrival_s}, must be at least {before:g}: ascending"
            )
        if shape.prompt_tokens < 1 or shape.output_tokens < 1:
            raise ValueError(
                f"request {number}: prompt_tokens is {shape.prompt_tokens} and output_tokens {shape.output_tokens}, "
                "must be at least 1"
            )
        before = shape.arrival_s
    return [shape.arrival_s for shape in shapes]

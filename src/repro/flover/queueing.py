"""Discrete-event model of in-flight batching: when does each of n requests finish, and in how many fused iterations?

An iteration over b requests takes t_iter(b) = t1 · (1 + c·(b − 1)): decoding is bound by reading the weights, which all
requests share, and c is what each further request adds. With arrivals every Δ and c near 0 the total time is the paper's
Fig. 4(a): T1 + Δ·(n − 1). Pure Python; between two events (an arrival, a finish) all iterations are alike, so they are
counted and not stepped through.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["QueueModel", "QueueRun", "fixed_arrivals", "poisson_arrivals", "serial_seconds"]


def fixed_arrivals(requests: int, interval_s: float) -> NDArray[np.float64]:
    """One request every `interval_s`, the first at 0."""
    return np.arange(requests) * interval_s


def poisson_arrivals(requests: int, mean_interval_s: float, seed: int) -> NDArray[np.float64]:
    """Exponential gaps of the given mean, the first request at 0."""
    gaps = np.random.default_rng(seed).exponential(mean_interval_s, requests)
    return np.cumsum(gaps) - gaps[0]


def serial_seconds(arrivals: Sequence[float] | NDArray[np.float64], single_request_s: float) -> float:
    """Time until the last of them is done when one runs after another: 32·T1 for 32 requests that come fast."""
    finish = 0.0
    for arrival in arrivals:
        finish = max(finish, float(arrival)) + single_request_s
    return finish


@dataclass(frozen=True)
class QueueRun:
    """`iterations`: fused iterations in all; `mean_batch`: requests in an iteration on average; `finish_s`: [n] by request."""

    finish_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    iterations: int
    mean_batch: float

    @property
    def total_seconds(self) -> float:
        return float(self.finish_s.max())

    @property
    def overlap_fraction(self) -> float:
        """The paper's overlap (v1 Fig. 8): the share of all requests that an average iteration holds."""
        return self.mean_batch / len(self.finish_s)


@dataclass(frozen=True)
class QueueModel:
    """`single_request_s`: T1, a request alone, `iterations` tokens long; `batch_cost`: c; `admit_per_iteration`: newcomers
    that one token boundary admits, 1 in the authors' code, 0 for as many as have arrived; `slots`: most that run at once,
    0 for no limit."""

    single_request_s: float
    iterations: int = 512
    batch_cost: float = 0.02
    admit_per_iteration: int = 1
    slots: int = 0

    def __post_init__(self) -> None:
        if self.single_request_s <= 0 or self.iterations < 1:
            raise ValueError(
                f"single_request_s is {self.single_request_s} and iterations {self.iterations}: both must be positive"
            )
        if self.batch_cost < 0 or self.admit_per_iteration < 0 or self.slots < 0:
            raise ValueError(f"batch_cost, admit_per_iteration and slots must not be negative, found {self}")

    def iteration_s(self, batch: int) -> float:
        """t_iter(b), seconds."""
        return self.single_request_s / self.iterations * (1 + self.batch_cost * (batch - 1))

    def run(self, arrivals: Sequence[float] | NDArray[np.float64]) -> QueueRun:
        """Serve requests that arrive at `arrivals` (seconds, ascending), first come, first served."""
        arrival = np.asarray(arrivals, dtype=np.float64)
        if len(arrival) == 0 or np.any(np.diff(arrival) < 0) or arrival[0] < 0:
            raise ValueError("arrivals must be at least one time, not negative, ascending")
        limit, slots = self.admit_per_iteration or len(arrival), self.slots or len(arrival)
        finish = np.zeros(len(arrival))
        live: dict[int, int] = {}  # request: iterations it still needs
        now, total, following = 0.0, 0, 0
        while live or following < len(arrival):
            if not live:
                now = max(now, arrival[following])
            arrived = int(np.searchsorted(arrival, now, side="right"))
            newcomers = range(following, min(arrived, following + min(limit, slots - len(live))))
            live |= {request: self.iterations for request in newcomers}
            following += len(newcomers)

            duration = self.iteration_s(len(live))
            steps = min(live.values())
            if following < len(arrival) and len(live) < slots:
                steps = min(steps, max(1, math.ceil((arrival[following] - now) / duration)))
            now += steps * duration
            total += steps
            live = {request: left - steps for request, left in live.items()}
            for request in [request for request, left in live.items() if left == 0]:
                finish[request] = now
                del live[request]
        return QueueRun(finish, finish - arrival, total, len(arrival) * self.iterations / total)

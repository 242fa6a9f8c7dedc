"""When requests come and how long they are: all that the queue model needs to know of a workload."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RequestShape:
    """When a request arrives (seconds) and how long its prompt and its answer are (tokens)."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def fixed_arrivals(requests: int, interval_s: float) -> NDArray[np.float64]:
    """Seconds of arrival, fp64 [requests]: one every `interval_s` seconds, the first at 0."""
    return np.arange(requests, dtype=np.float64) * interval_s


def poisson_arrivals(requests: int, mean_interval_s: float, seed: int) -> NDArray[np.float64]:
    """Seconds of arrival, fp64 [requests]: exponential gaps of `mean_interval_s` on average, the first request at 0."""
    gaps = np.random.default_rng(seed).exponential(mean_interval_s, requests)
    return np.cumsum(gaps) - gaps[:1]  # none of none

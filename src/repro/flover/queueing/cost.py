"""c, the cost of a further request in an iteration, read off what the paper prints of single requests (v2 Fig. 4c).

The paper prints how much longer an average request takes among n than alone. In the queue model that ratio rises with c,
so it gives c; total times (Fig. 4a) are then predicted, without having been used.
"""

import functools

from scipy.optimize import brentq

from repro.flover import paper
from repro.flover.arrivals import RequestShape, fixed_arrivals
from repro.flover.queueing.fused import Fused
from repro.flover.queueing.result import QueueRun
from repro.flover.queueing.times import LinearTimes

AUTHORS = Fused(admit_per_iteration=1, prefill_apart=True)  # [CODE] one newcomer a boundary, prompts on another stream
LARGEST = 1.0  # of a cost: fusing would save nothing


def served(model: str, requests: int, batch_cost: float) -> QueueRun:
    """The paper's requests of a model (a key of `paper.MODELS`) at its fixed interval, by the authors' policy."""
    alone = paper.MODELS[model].single_request_s
    # The paper counts TOKENS iterations for a request; the model's first token comes from the prompt, which is free here.
    arrivals = fixed_arrivals(requests, paper.INTERVAL_S).tolist()
    shapes = [RequestShape(arrival, 1, paper.TOKENS + 1) for arrival in arrivals]
    return AUTHORS.run(shapes, LinearTimes(alone / paper.TOKENS, batch_cost))


def latency_ratio(model: str, requests: int, batch_cost: float) -> float:
    """Mean latency of those requests ÷ that of a request alone."""
    return float(served(model, requests, batch_cost).latency_s.mean()) / paper.MODELS[model].single_request_s


@functools.cache
def batch_cost(model: str, requests: int = paper.REQUESTS) -> float:
    """The c at which the latency ratio of so many requests is the one that Fig. 4(c) prints (8, 16 or 32).

    ValueError for a number of requests that is not printed.
    """
    ratios = paper.printed("FL-F4c", paper.MODELS[model].name)
    if requests not in ratios:
        raise ValueError(f"requests is {requests}, allowed: {', '.join(f'{each:g}' for each in ratios if each)}")
    return float(brentq(lambda c: latency_ratio(model, requests, c) - ratios[requests], 0.0, LARGEST, xtol=1e-6))

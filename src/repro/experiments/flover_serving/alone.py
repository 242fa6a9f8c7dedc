"""Requests decoded alone: how long one takes, and which tokens it should get."""

from collections.abc import Sequence

from repro.baselines.batching import divergence, lone
from repro.flover.engine import ServingReport
from repro.flover.request import Generation, Request
from repro.models.llama import Llama

_TIE = 1e-3  # logits closer than this are a near tie: which of them is the larger depends on the order of a sum
_SAMPLE = 4


def sample(requests: Sequence[Request]) -> Sequence[Request]:
    """At most 4: the middle of each quarter of the answer lengths, so that their mean time is near that of all."""
    if len(requests) <= _SAMPLE:
        return requests
    by_length = sorted(requests, key=lambda request: request.max_new_tokens)
    return [by_length[(2 * i + 1) * len(by_length) // (2 * _SAMPLE)] for i in range(_SAMPLE)]


def decoded(model: Llama, requests: Sequence[Request], capacity: int) -> list[Generation]:
    """Each of the requests, greedily, with nothing beside it."""
    return lone(model, requests, capacity)


def seconds(model: Llama, requests: Sequence[Request], capacity: int) -> float:
    """T1: mean seconds of a request alone, over a sample of the lengths (one request where all are equal)."""
    chosen = sample(requests)
    chosen = chosen[:1] if len({(len(r.prompt), r.max_new_tokens) for r in requests}) == 1 else chosen
    decoded(model, chosen[:1], capacity)  # warm-up, thrown away
    return sum(generation.service_s for generation in decoded(model, chosen, capacity)) / len(chosen)


def agreement(model: Llama, report: ServingReport, alone: list[Generation]) -> tuple[dict[int, bool], dict[str, float]]:
    """Per request decoded alone, whether its tokens are equal; and the shares of equal and of nearly tied requests."""
    served = {generation.request.id: generation for generation in report.generations}
    gaps = {g.request.id: divergence(model, served[g.request.id], g) for g in alone}
    equal = {request: gap is None for request, gap in gaps.items()}
    tied = [gap is None or gap < _TIE for gap in gaps.values()]
    return equal, {
        "tokens_checked": float(len(gaps)),
        "tokens_equal_fraction": sum(equal.values()) / len(gaps),
        "tokens_equal_or_tied_fraction": sum(tied) / len(gaps),
    }

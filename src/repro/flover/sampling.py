"""The next token of every running request in one batch: greedy, or drawn at a temperature from the top k and the top p.

What a request draws depends on its seed and on how many tokens it has, not on its slot or its neighbours. So each draw
takes its own uniform number, a hash of both (SplitMix64's finaliser), and inverts the distribution at it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.flover.fields import number

COLDEST, HOTTEST = 1e-6, 1e6  # temperatures, besides 0: logits divided by them stay numbers in fp32


@dataclass(frozen=True)
class Sampling:
    """How one request's tokens are chosen. RequestError when a value is out of range or no number.

    `temperature`: 0 takes the most likely token and ignores the rest; else logits are divided by it, 1e-6 to 1e6.
    `top_k`: draw among the k most likely, 0 for all; then `top_p`, above 0 and at most 1: among the fewest of these
    whose probabilities sum up to at least p. Tokens as likely as the last that stays, stay too. `seed`: 0 to 2^63 - 1;
    one prompt with one seed gets one answer, so give each request its own where answers should differ.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = f"0 (greedy) or {COLDEST:g} to {HOTTEST:g}"
        plain: dict[str, float] = {
            "temperature": number(
                float, "temperature", self.temperature, allowed, lambda t: t == 0 or COLDEST <= t <= HOTTEST
            ),
            "top_k": number(int, "top_k", self.top_k, "a whole number, 0 (all) or more", lambda k: k >= 0),
            "top_p": number(float, "top_p", self.top_p, "above 0 and at most 1", lambda p: 0 < p <= 1),
            "seed": number(int, "seed", self.seed, "a whole number, 0 to 2^63 - 1", lambda s: 0 <= s < 2**63),
        }
        for key, value in plain.items():  # frozen: plain assignment is refused
            object.__setattr__(self, key, value)


GREEDY = Sampling()


def next_tokens(logits: Tensor, asked: Sequence[tuple[Sampling, int]], argmax: Callable[[Tensor], Tensor]) -> Tensor:
    """int64 [b] from logits [b, vocab]: the next token of each request, -1 where a row's logits hold NaN or their
    largest is infinite. `asked`: how it samples, and how many tokens it has; both are on the host, so greedy requests
    cost nothing. `argmax`: over the last dimension, -1 as said."""
    chosen = argmax(logits)
    kinds: dict[bool, list[int]] = {True: [], False: []}  # rows that draw, by whether from a part of the vocabulary
    for row, (sampling, _) in enumerate(asked):
        if sampling.temperature > 0:
            kinds[bool(sampling.top_k) or sampling.top_p < 1].append(row)
    for cut, rows in kinds.items():
        if rows:
            index = torch.tensor(rows, device=logits.device)
            drawn = _drawn(logits[index].float(), [asked[row] for row in rows], cut)
            chosen[index] = torch.where(chosen[index] < 0, -1, drawn)
    return chosen


def _drawn(logits: Tensor, asked: Sequence[tuple[Sampling, int]], cut: bool) -> Tensor:
    """int64 [n] from logits [n, vocab]; `cut`: some have a top k or top p."""

    def column(values: Iterable[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=logits.device)

    temperature = column((s.temperature for s, _ in asked), torch.float32)[:, None]
    scaled = (logits - logits.max(-1, keepdim=True).values) / temperature
    if cut:  # as many are sorted as the largest k asks for; all where a request has a top p alone
        vocab = logits.shape[1]
        most = min(max(s.top_k or vocab for s, _ in asked), vocab)
        top_k = column((min(s.top_k, vocab) for s, _ in asked), torch.int64)[:, None]
        top_p = column((s.top_p for s, _ in asked), torch.float32)[:, None]
        scaled = scaled.masked_fill(scaled < _lowest(scaled, most, top_k, top_p), -torch.inf)
    point = column((uniform(s.seed, count) for s, count in asked), torch.float64)
    return _inverted(scaled.softmax(-1), point)


def _lowest(scaled: Tensor, most: int, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[n, 1]: the lowest logit that top k and top p leave. Only values are used of what is sorted, never their order:
    that of equal ones depends on how many are asked for, so on the neighbours. So equals of the last stay."""
    values = scaled.topk(most).values
    beyond = (torch.arange(most, device=values.device) >= top_k) & (top_k > 0)
    share = values.masked_fill(beyond, -torch.inf).double().softmax(-1)
    before = share.cumsum(-1) - share
    left = (before < top_p) & ~beyond
    # The most likely token always stays: also where fp32 has no such small p, and in a row of NaN, which counts nowhere.
    return values.gather(1, left.sum(-1, keepdim=True).clamp(min=1) - 1)


def uniform(seed: int, count: int) -> float:
    """In [0, 1): a hash of both, which are below 2^63."""
    return (_mixed(_mixed(seed) + (count + 1) * 0x9E3779B97F4A7C15) >> 11) / 2.0**53  # + 1: 0 is mixed to 0


def _mixed(bits: int) -> int:
    """SplitMix64's finaliser, modulo 2^64."""
    bits %= 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def _inverted(share: Tensor, point: Tensor) -> Tensor:
    """int64 [n]: where the running sum of `share` [n, m] passes `point` [n] of its total; never at a share of 0."""
    running = share.double().cumsum(-1)
    total = running[:, -1:]
    goal = torch.minimum(point[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return (running <= goal).sum(-1)

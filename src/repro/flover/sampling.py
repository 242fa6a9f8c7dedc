"""The next token of every running request in one batch: greedy, or drawn at a temperature from the top k and the top p.

What a request draws depends on its seed and on how many tokens it has, on nothing else: not on the slot where it lies, nor on who
decodes beside it. So each draw takes its own uniform number, a hash of both (SplitMix64's finaliser), and inverts the
distribution at it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

COLDEST = 1e-6  # temperature, besides 0

__all__ = ["GREEDY", "Sampler", "Sampling", "uniform"]


@dataclass(frozen=True)
class Sampling:
    """How one request's tokens are chosen. ValueError when a value is out of range.

    `temperature`: logits are divided by it; 0 takes the most likely token and ignores the rest. `top_k`: draw among the k most
    likely, 0 for all; then `top_p`: among the fewest of these whose probabilities sum up to at least p. Tokens as
    likely as the last that stays, stay too. `seed`: 0 to 2^63 - 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not COLDEST <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}, must be 0 (greedy) or at least {COLDEST:g}")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, must be 0 (all) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}, must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}, allowed: 0 to 2^63 - 1")


GREEDY = Sampling()


class Sampler:
    """Chooses for the requests in `slots` slots, whose parameters it keeps as tensors; greedy until `put`. `given`: int64 [slots], how
    many tokens each has been given."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.temperature = torch.zeros(slots, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self.top_p = torch.ones(slots, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)
        self.given = torch.zeros(slots, dtype=torch.int64, device=device)
        self._of_slot = [GREEDY] * slots  # on the host, so that choosing a way asks the device nothing

    def put(self, slot: int, sampling: Sampling) -> None:
        """A new request in `slot` samples so."""
        self._of_slot[slot] = sampling
        for name in ("temperature", "top_k", "top_p", "seed"):
            getattr(self, name)[slot] = getattr(sampling, name)
        self.given[slot] = 0

    def move(self, moves: list[tuple[int, int]]) -> None:
        """Follow requests from slot to slot."""
        for source, destination in moves:
            self._of_slot[destination] = self._of_slot[source]
            for state in (self.temperature, self.top_k, self.top_p, self.seed, self.given):
                state[destination] = state[source]

    def __call__(self, logits: Tensor, slots: slice) -> Tensor:
        """int64 [b]: the next tokens of the requests in `slots` (b of them), whose logits are [b, vocab]."""
        chosen = logits.argmax(-1)
        given = self.given[slots].clone()
        self.given[slots] += 1
        asked = self._of_slot[slots]
        kinds: dict[bool, list[int]] = {True: [], False: []}  # rows that draw, by whether from a part of the vocabulary
        for row, sampling in enumerate(asked):
            if sampling.temperature > 0:
                kinds[bool(sampling.top_k) or sampling.top_p < 1].append(row)
        for cut, rows in kinds.items():
            if rows:
                index = torch.tensor(rows, device=logits.device)
                at = index + slots.start
                own = logits[index].float()
                scaled = (own - own.max(-1, keepdim=True).values) / self.temperature[at, None]
                point = uniform(self.seed[at], given[index])
                if cut:  # as many are sorted as the largest k asks for; all where a request has a top p alone
                    most = max(asked[row].top_k or logits.shape[1] for row in rows)
                    lowest = self._lowest(scaled, min(most, logits.shape[1]), at)
                    scaled = scaled.masked_fill(scaled < lowest, -torch.inf)
                chosen[index] = _inverted(scaled.softmax(-1), point)
        return chosen

    def _lowest(self, scaled: Tensor, most: int, slots: Tensor) -> Tensor:
        """[n, 1]: the lowest logit that top k and top p leave. Only values are used of what is sorted, never their order: that of equal
        ones depends on how many are asked for, so on the neighbours. Hence equals of the last one stay too."""
        values = scaled.topk(most).values
        top_k = self.top_k[slots, None]
        beyond = (torch.arange(most, device=values.device) >= top_k) & (top_k > 0)
        share = values.masked_fill(beyond, -torch.inf).double().softmax(-1)
        before = share.cumsum(-1) - share  # the first token has nothing before it and always stays
        left = (before < self.top_p[slots, None]) & ~beyond
        return values.gather(1, left.sum(-1, keepdim=True) - 1)


def uniform(seed: Tensor, count: Tensor) -> Tensor:
    """float64 [n] in [0, 1): a hash of two int64 [n]."""
    bits = _mixed(_mixed(seed) + count * _signed(0x9E3779B97F4A7C15))
    return _shifted(bits, 11).double() / 2.0**53


def _mixed(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser; products wrap around modulo 2^64, as it wants."""
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, zeros from the left: torch has signed integers only."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _inverted(share: Tensor, point: Tensor) -> Tensor:
    """int64 [n]: where the running sum of `share` [n, m] passes the part `point` [n] of its total; never at a share of 0."""
    running = share.double().cumsum(-1)
    total = running[:, -1:]
    goal = torch.minimum(point[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return (running <= goal).sum(-1)

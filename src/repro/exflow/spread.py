"""How many tokens to record: what a placement loses on tokens that it has not seen, by how many it was placed by."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro.exflow.placement import evaluate, place
from repro.exflow.search.portfolio import Clock
from repro.exflow.trace import Trace, transitions
from repro.topology import Topology

DRAWS = 2  # random cuts of the sequences into two halves; each half is placed by, and the other one judged
PARTS = (1.0, 0.5, 0.25, 0.125)  # of such a half
SEARCHES = 2 * DRAWS * len(PARTS)
ROUNDS = 3  # of each search
LOSS = 0.01  # of the hops that is worth no more recording


@dataclass(frozen=True)
class Needed:
    """`tokens`: enough for hops per token within LOSS of those that any number would give, by a fit of hops =
    `hops_at_best` + c / tokens to placements by parts of the trace. `recorded`: tokens of the trace. `loss`: by how
    much, as a share, its hops are above `hops_at_best` by this fit.
    `spread`: standard deviation of the hops between draws of sequences, as a share: a fit cannot tell less.
    `load_placed`, `load_held_out`: tokens of the busiest GPU over the even share, mean over layers, of placements by half
    of the sequences: on these and on the others. The difference is what other tokens, and more of them, may change.
    `searches_cut`: of all SEARCHES, those that time ended before their rounds; with any, all numbers are of worse and
    unequal placements."""

    tokens: float
    recorded: float
    hops_at_best: float
    loss: float
    spread: float
    load_placed: float
    load_held_out: float
    searches_cut: int


def tokens_needed(
    trace: Trace, gpus: int | Topology, gpus_per_node: int | None = None, *, seed: int = 0, **options: Any
) -> Needed:
    """Place by one half of the sequences, and by parts of it, and count on the other. `options`: as of `place`, but
    `rounds` is ROUNDS by default. Each of the SEARCHES gets an equal part of what `clock` leaves, so that their
    placements can be compared.

    Raises ValueError as `place` and `Trace.split` do, for instance without sequence boundaries or with one sequence.
    """
    if options.get("rounds") is None:
        options["rounds"] = ROUNDS
    clock = options.pop("clock", None)
    cut, sizes, hops, busiest = 0, list[int](), list[float](), list[list[float]]()
    for draw in range(DRAWS):
        for train, other in _halves(trace, seed + draw):
            judged = transitions(other)
            for part in PARTS:
                some = train if part == 1.0 else train.split(part, seed + draw)[0]
                own = transitions(some)
                part_of_time = None if clock is None else _part(clock, SEARCHES - len(sizes))
                placed = place(own, gpus, gpus_per_node, seed=seed, clock=part_of_time, **options)
                cut += placed.time_limited
                sizes.append(some.tokens)
                hops.append(evaluate(placed, judged).hops_per_token)
                if part == 1.0:
                    busiest.append([evaluate(placed, tokens).max_load for tokens in (own, judged)])
    each = np.array(hops).reshape(-1, len(PARTS))
    fewer, per_token = _fit(np.array(sizes), np.array(hops))
    on_placed, held_out = np.mean(busiest, axis=0)
    return Needed(
        tokens=per_token / (LOSS * fewer) if fewer > 0 else 0.0,
        recorded=float(trace.tokens),
        hops_at_best=fewer,
        loss=per_token / trace.tokens / fewer if fewer > 0 else 0.0,
        spread=float(each[:, 0].std() / each[:, 0].mean()) if each[:, 0].any() else 0.0,
        load_placed=float(on_placed),
        load_held_out=float(held_out),
        searches_cut=cut,
    )


def _part(clock: Clock, parts: int) -> Clock:
    """A clock for one of so many equal parts of what `clock` leaves now."""
    end = time.perf_counter() + clock() / parts
    return lambda: min(clock(), end - time.perf_counter())


def _halves(trace: Trace, seed: int) -> list[tuple[Trace, Trace]]:
    one, other = trace.split(0.5, seed)
    return [(one, other), (other, one)]


def _fit(tokens: np.ndarray, hops: np.ndarray) -> tuple[float, float]:
    """(a, b) of hops = a + b / tokens by least squares, b at least 0."""
    (a, b), *_ = np.linalg.lstsq(np.stack([np.ones(len(tokens)), 1.0 / tokens], axis=1), hops, rcond=None)
    return (float(a), float(b)) if b > 0 else (float(hops.mean()), 0.0)

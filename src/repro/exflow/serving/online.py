"""Slots of experts for a server, by the loads and transitions that it counts: less traffic than EPLB at no more load.

How many copies an expert has is EPLB's choice, and so is the load of the busiest rank in each layer: it is the limit,
where every copy takes an equal part of its expert's tokens. What else counts depends on how tokens travel.

One all-to-all per layer (`place_for_hops`): a token stays where its expert is. Where copies take equal parts, whatever
rank a token comes from, a copy is an expert of its own, with 1/c of the tokens of its c copies and 1/(c·c') of those
that go on to an expert of c' copies. So which rank holds which copy is the problem that `search/` solves, with as many
experts per layer as there are slots; the search begins with EPLB's own answer.

Two all-to-alls (`place_near`): a token goes back to its home rank after each layer, and transitions do not matter. If
it takes the nearest copy, then copies of one expert should lie apart, so that each home has one near: swaps of slots,
from EPLB's answer on, until none helps. Ranks are taken to be home to equally many tokens.
"""

import math
import time

import numpy as np

from repro.compiled import compiled
from repro.exflow.evaluate import check_counts
from repro.exflow.levels import Levels
from repro.exflow.search import portfolio
from repro.exflow.search.problem import ROUNDING, Problem
from repro.exflow.serving import eplb


def place_for_hops(
    load: np.ndarray,
    counts: np.ndarray,
    slots: int,
    levels: Levels,
    groups: int = 1,
    rounds: int = 20,
    time_limit_s: float = math.inf,
    seed: int = 0,
) -> np.ndarray:
    """The expert in each slot, int64 [layers, slots], shared evenly by the ranks of `levels` in their order.

    load     float [layers, E]: tokens of each expert
    counts   float [layers-1, E, E]: tokens that go from an expert to one of the next layer
    groups   of experts, which EPLB packs onto nodes where they share evenly

    In no layer does the busiest rank get more of `load` than under EPLB, and the hops of `counts`, at the costs of
    `levels`, are not more. `seed` and `rounds` fix the result, unless the time limit cuts it short. ValueError for
    numbers that do not divide, and shapes that disagree.
    """
    check_counts(counts)
    if load.shape != (len(counts) + 1, counts.shape[1]):
        raise ValueError(f"load is {load.shape}, transition counts are {counts.shape}: must be of the same experts")
    even, part, weight, cap = eplb.slots_and_tokens(load, slots, groups, _nodes(levels), levels.gpus)
    edges = zip(counts, even[:-1], even[1:], part[:-1], part[1:], strict=True)
    going = np.array([pairs[np.ix_(a, b)] * own[:, None] * next_ for pairs, a, b, own, next_ in edges])
    problem = Problem(going, levels.distances(), cap, weight)
    gpu = np.tile(np.arange(slots) * levels.gpus // slots, (len(even), 1))
    budget = portfolio.Budget(rounds, time.perf_counter() + time_limit_s)
    gpu = portfolio.rounds(problem, budget, np.random.default_rng(seed), gpu)
    assert problem.fits(gpu).all()
    return np.take_along_axis(even, np.argsort(gpu, axis=1, kind="stable"), axis=1)


def place_near(load: np.ndarray, slots: int, levels: Levels, groups: int = 1) -> np.ndarray:
    """As `place_for_hops`, for tokens that come from home ranks and take the nearest copy: their way there, at the
    costs of `levels`, is not longer than under EPLB."""
    even, _, weight, cap = eplb.slots_and_tokens(load, slots, groups, _nodes(levels), levels.gpus)
    for layer, row in enumerate(even):
        _spread(
            row, weight[layer].copy(), load[layer].astype(np.float64), levels.distances(), cap[layer] * (1 + ROUNDING)
        )
    return even


def _nodes(levels: Levels) -> int:
    return levels.gpus // levels.spans[levels.node_level]


@compiled()
def _spread(row: np.ndarray, weight: np.ndarray, load: np.ndarray, distance: np.ndarray, cap: float) -> None:
    """Swap slots of one layer, `row` int64 [slots], with their tokens `weight` [slots], while the way of all tokens,
    `load` [E], to the nearest copy of their expert gets shorter and no rank gets more than `cap`."""
    slots, ranks = len(row), len(distance)
    per_rank = slots // ranks
    held = np.zeros(ranks)
    for slot in range(slots):
        held[slot // per_rank] += weight[slot]
    better = True
    while better:
        better = False
        for i in range(slots):
            for j in range(i):
                a, b, shift = i // per_rank, j // per_rank, weight[i] - weight[j]
                if a == b or row[i] == row[j] or held[a] - shift > cap or held[b] + shift > cap:
                    continue
                before = _way(row, row[i], load, distance) + _way(row, row[j], load, distance)
                row[i], row[j] = row[j], row[i]
                after = _way(row, row[i], load, distance) + _way(row, row[j], load, distance)
                if after < before * (1 - 1e-9):
                    weight[i], weight[j] = weight[j], weight[i]
                    held[a] -= shift
                    held[b] += shift
                    better = True
                else:
                    row[i], row[j] = row[j], row[i]


@compiled()
def _way(row: np.ndarray, expert: int, load: np.ndarray, distance: np.ndarray) -> float:
    """What the tokens of an expert pay from all homes to the nearest copy, times the number of homes."""
    per_rank, total = len(row) // len(distance), 0.0
    for home in range(len(distance)):
        least = np.inf
        for slot in range(len(row)):
            if row[slot] == expert:
                least = min(least, distance[home, slot // per_rank])
        total += least
    return total * load[expert]

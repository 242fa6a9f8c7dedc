"""Pair-Viterbi (numba, cached on disk): the best re-split of two GPUs' experts in all layers at once.

Where affinity is strong, whole paths of experts belong together. Swaps in single layers cannot move a path to another
GPU, since each step on the way costs hops. Arrays as in `problem.py`.
"""

import itertools

import numpy as np

from repro.compiled import compiled
from repro.exflow.search.anneal import random_below
from repro.exflow.search.problem import Problem

EXPERTS = 4  # of each GPU that one re-split moves: C(8, 4) = 70 states; when a GPU has more, some of them take part


@compiled()
def _choose(counts: np.ndarray, placement: np.ndarray, a: int, b: int, take: int, state: np.ndarray) -> np.ndarray:
    """int64 [layers, 2·take]: `take` experts of GPU a, then `take` of GPU b, of each layer. When a GPU has more, a
    random layer gets random ones; going outwards from it, each layer gets those that exchange most tokens with the ones
    chosen next door (times a random factor)."""
    layers = len(placement)
    chosen = np.empty((layers, 2 * take), np.int64)
    start = random_below(layers, state)
    for step in range(layers):
        layer = start + step if start + step < layers else layers - 1 - step
        for side, gpu in enumerate((a, b)):
            own = np.flatnonzero(placement[layer] == gpu)
            score = np.ones(len(own))
            for t in range(2 * take):
                if layer > start:
                    score += counts[layer - 1, chosen[layer - 1, t]][own]
                elif layer < start:
                    score += counts[layer, :, chosen[layer + 1, t]][own]
            for e in range(len(own)):
                score[e] *= random_below(2**31, state) + 1.0
            for t in range(take):
                best = np.argmax(score)
                chosen[layer, side * take + t] = own[best]
                score[best] = -1.0
    return chosen


@compiled()
def _outside(
    counts: np.ndarray, placement: np.ndarray, distance: np.ndarray, a: int, b: int, chosen: np.ndarray
) -> np.ndarray:
    """float64 [layers, 2·take]: what each chosen expert pays to experts that stay put, on GPU a less on GPU b."""
    layers, experts = placement.shape
    nearer = np.empty((layers, experts))  # of a token to an expert that stays put: what it pays from a less from b
    for layer in range(layers):
        nearer[layer] = (distance[:, a] - distance[:, b])[placement[layer]]
        nearer[layer][chosen[layer]] = 0.0
    pays = np.zeros(chosen.shape)
    for layer in range(layers):
        for t, e in enumerate(chosen[layer]):
            for f in range(experts):
                if layer > 0:
                    pays[layer, t] += counts[layer - 1, f, e] * nearer[layer - 1, f]
                if layer < layers - 1:
                    pays[layer, t] += counts[layer, e, f] * nearer[layer + 1, f]
    return pays


@compiled()
def _half_sums(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Sums of all subsets of the first four (`low`) and of the other, at most four, `values` (`high`), by bit mask."""
    for mask in range(1, 16):
        bit = 0
        while not (mask >> bit) & 1:
            bit += 1
        rest = mask & (mask - 1)
        low[mask] = low[rest] + (values[bit] if bit < len(values) else 0.0)
        high[mask] = high[rest] + (values[bit + 4] if bit + 4 < len(values) else 0.0)


@compiled()
def _pair_viterbi(arrays: tuple[np.ndarray, ...], a: int, b: int, chosen: np.ndarray, splits: np.ndarray) -> float:
    """Re-split the experts of GPUs a and b in all layers at once, exactly; returns the cost gained (0: none).

    `chosen` int64 [layers, 2·take <= 8], see `_choose`. `splits` int64 [S], the states of a layer: bit masks of which
    of these experts go to GPU a; the first one is the split as it is. `room` [layers] or [0]: splits that give a GPU
    more tokens are no states, but for the split as it is.
    """
    counts, placement, distance, weight, room = arrays
    pays = _outside(counts, placement, distance, a, b, chosen)
    layers, width = chosen.shape
    states, take = len(splits), width // 2
    cost, arriving = np.zeros(states), np.empty(states)
    source = np.zeros((layers, states), np.int64)
    tokens, benefit = np.empty((width, width)), np.empty(width)
    low, high = np.zeros(16), np.zeros(16)
    present = 0.0
    for layer in range(layers):
        if layer > 0:
            for x in range(width):
                for y in range(width):
                    tokens[x, y] = distance[a, b] * counts[layer - 1, chosen[layer - 1, x], chosen[layer, y]]
            arriving[:] = np.inf
            for s in range(states):
                base = cost[s]  # the whole next layer on b: it is cut from the split's part on a
                for y in range(width):
                    from_a = from_b = 0.0
                    for x in range(width):
                        if (splits[s] >> x) & 1:
                            from_a += tokens[x, y]
                        else:
                            from_b += tokens[x, y]
                    base += from_a
                    benefit[y] = from_b - from_a
                _half_sums(benefit, low, high)
                for r in range(states):
                    total = base + low[splits[r] & 15] + high[splits[r] >> 4]
                    if total < arriving[r]:
                        arriving[r] = total
                        source[layer, r] = s
                if s == 0:
                    present += base - cost[0] + low[splits[0] & 15] + high[splits[0] >> 4]
            cost[:] = arriving
        _half_sums(pays[layer], low, high)
        for r in range(states):
            cost[r] += low[splits[r] & 15] + high[splits[r] >> 4]
        present += low[splits[0] & 15] + high[splits[0] >> 4]
        if len(room) > 0:
            heavy, own = weight[layer][chosen[layer]], weight[layer]
            room_a = room[layer] - (own[placement[layer] == a].sum() - heavy[:take].sum())
            room_b = room[layer] - (own[placement[layer] == b].sum() - heavy[take:].sum())
            _half_sums(heavy, low, high)
            for r in range(1, states):
                on_a = low[splits[r] & 15] + high[splits[r] >> 4]
                if on_a > room_a or heavy.sum() - on_a > room_b:
                    cost[r] = np.inf
    split = np.argmin(cost)
    gain = present - cost[split]
    if gain <= 1e-9 * (1.0 + abs(present)):
        return 0.0
    for layer in range(layers - 1, -1, -1):
        for x in range(width):
            placement[layer, chosen[layer, x]] = a if (splits[split] >> x) & 1 else b
        split = source[layer, split]
    return gain


def pair(problem: Problem, placement: np.ndarray, a: int, b: int, state: np.ndarray) -> float:
    """Re-split GPUs a and b in place; returns the cost gained, 0 when nothing changed. Never breaks a load limit."""
    take = min(problem.experts // problem.gpus, EXPERTS)
    splits = np.array([sum(1 << e for e in on_a) for on_a in itertools.combinations(range(2 * take), take)])
    chosen = _choose(problem.counts, placement, a, b, take, state)
    arrays = (problem.counts, placement, problem.distance, problem.weight, problem.room)
    return _pair_viterbi(arrays, a, b, chosen, splits)

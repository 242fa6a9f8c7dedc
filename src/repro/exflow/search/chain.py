"""What can be solved exactly because layers form a chain.

At one flat cost only the *partition* of a layer into GPUs matters: labels can be matched afterwards, edge by edge, by
an assignment problem. Arrays as in `problem.py`.

  one expert per GPU       the layers separate into a chain of assignment problems
  few partitions (E = 8)   Viterbi over all partitions of each layer
  a pool of placements     Viterbi over the partitions found in them: the best mix of their layers
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
from scipy.optimize import linear_sum_assignment

EXACT_PARTITIONS = 500  # Viterbi over all partitions up to here (E=8 on 4 GPUs: 105; E=12 on 2: 462)

Expired = Callable[[], bool]  # whether the time is over: what is left to do is then left out


def _never() -> bool:
    return False


def assignment_chain(counts: np.ndarray, expired: Expired = _never) -> np.ndarray:
    """Optimal placement of one expert per GPU: each goes to the expert whose tokens it should receive. Layers that are
    left when the time is over are placed as the one before, so that the whole is no worse than rank order."""
    placement = np.tile(np.arange(counts.shape[1]), (len(counts) + 1, 1))
    for layer, pairs in enumerate(counts):
        if expired():
            placement[layer + 1 :] = placement[layer]
            break
        here, there = linear_sum_assignment(pairs, maximize=True)
        placement[layer + 1, there] = placement[layer, here]
    return placement


def count_partitions(experts: int, gpus: int) -> int:
    """Ways to split E experts into unlabelled groups of E/gpus: E! / ((E/gpus)!^gpus · gpus!)."""
    size = experts // gpus
    return math.factorial(experts) // (math.factorial(size) ** gpus * math.factorial(gpus))


def partitions(experts: int, gpus: int) -> np.ndarray:
    """int64 [count_partitions, E]: the group of every expert, for every balanced unlabelled partition."""

    def extend(groups: list[int], group: int) -> Iterator[list[int]]:
        if group == gpus:
            yield groups
            return
        first, *free = [e for e, g in enumerate(groups) if g < 0]
        for others in itertools.combinations(free, experts // gpus - 1):
            yield from extend([group if e == first or e in others else g for e, g in enumerate(groups)], group + 1)

    return np.array(list(extend([-1] * experts, 0)))


def exact_chain(counts: np.ndarray, gpus: int, allowed: np.ndarray | None = None) -> np.ndarray:
    """Optimal placement by Viterbi over all partitions of every layer; `allowed` [partitions, layers]: see below."""
    states = partitions(counts.shape[1], gpus)
    pool = np.broadcast_to(states[:, None], (len(states), len(counts) + 1, states.shape[1]))
    return recombine(counts, pool, gpus, allowed)


def recombine(
    counts: np.ndarray, pool: np.ndarray, gpus: int, allowed: np.ndarray | None = None, expired: Expired = _never
) -> np.ndarray:
    """The best placement that takes every layer's partition from one of the placements in `pool`, int [K, layers, E];
    the first one when the time is over before. `allowed`: bool [K, layers], the partitions that may be taken, at least
    one in each layer; None: all."""
    forbidden = np.zeros((len(pool), pool.shape[1])) if allowed is None else np.where(allowed, 0.0, -np.inf)
    kept = forbidden[:, 0]
    source = np.zeros(pool.shape[1::-1], np.int64)
    for layer, pairs in enumerate(counts):
        if expired():
            return pool[0].copy()
        total = kept[:, None] + _matched(_shared(pairs, pool[:, layer], pool[:, layer + 1], gpus))
        source[layer + 1], kept = total.argmax(axis=0), total.max(axis=0) + forbidden[:, layer + 1]
    state = int(kept.argmax())
    chosen = np.empty(pool.shape[1:], np.int64)
    for layer in range(len(counts), -1, -1):
        chosen[layer] = pool[state, layer]
        state = source[layer, state]
    return match_labels(counts, chosen, gpus, expired)


def _shared(pairs: np.ndarray, here: np.ndarray, there: np.ndarray, gpus: int) -> np.ndarray:
    """float64 [A, B, gpus, gpus]: tokens that go from each GPU to each, for counts `pairs` [E, E] between two layers,
    and `here` int64 [A, E] and `there` int64 [B, E], alternative GPUs of their experts."""
    on = np.eye(gpus)
    leaving = np.tensordot(on[here], pairs, (1, 0))  # [A, gpus, E]
    return np.tensordot(leaving, on[there], (2, 1)).swapaxes(1, 2)


def _matched(shared: np.ndarray) -> np.ndarray:
    """[A, B]: tokens kept under the best matching of labels, for tokens [A, B, gpus, gpus] from each GPU to each."""
    gpus = shared.shape[-1]
    if gpus <= 4:  # few enough permutations to try them all, for all pairs at once
        orders = itertools.permutations(range(gpus))
        return functools.reduce(np.maximum, (shared[:, :, range(gpus), order].sum(axis=-1) for order in orders))
    best = np.empty(shared.shape[:2])
    for a, b in np.ndindex(best.shape):
        best[a, b] = shared[a, b][linear_sum_assignment(shared[a, b], maximize=True)].sum()
    return best


def match_labels(counts: np.ndarray, placement: np.ndarray, gpus: int, expired: Expired = _never) -> np.ndarray:
    """The same partitions with every layer's GPU labels matched best to those of the layer before, or `placement` when
    the time is over before."""
    start, placement = placement, placement.copy()
    for layer, pairs in enumerate(counts):
        if expired():
            return start
        tokens = _shared(pairs, placement[layer : layer + 1], placement[layer + 1 : layer + 2], gpus)[0, 0]
        here, there = linear_sum_assignment(tokens, maximize=True)
        label = np.empty(gpus, np.int64)
        label[there] = here
        placement[layer + 1] = label[placement[layer + 1]]
    return placement

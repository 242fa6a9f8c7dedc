"""Simulated annealing of expert placements by swaps: the general method that ours has to beat.

Written apart from `repro.exflow.search`, and used alone: no assignment problems, no Viterbi, no recombination.
A table of what each expert would keep on each GPU makes a proposal two subtractions; the temperature falls with the
clock, so the schedule fits any time limit.
"""

from time import perf_counter

import numpy as np
from numba import njit

HOT, COLD = (
    0.12,
    0.005,
)  # first and last temperature, in mean tokens per expert: the best of seven pairs on five instances
PIECE = 20_000  # proposals between two looks at the clock: about a millisecond


def anneal(counts: np.ndarray, gpus: int, seed: int, time_limit_s: float) -> np.ndarray:
    """int64 [layers, E]: E/gpus experts per GPU and layer after annealing from a random placement for `time_limit_s`.

    Compilation is not part of the time.
    """
    _compiled()
    start = perf_counter()
    counts = np.ascontiguousarray(counts, np.float64)
    backward = np.ascontiguousarray(counts.transpose(0, 2, 1))
    rng = np.random.default_rng(seed)
    rows = np.tile(np.repeat(np.arange(gpus), counts.shape[1] // gpus), (len(counts) + 1, 1))
    placement = rng.permuted(rows, axis=1)
    state = rng.integers(1, 2**63, 1, dtype=np.uint64)
    table = _table(counts, placement, gpus)
    unit = max(counts.sum(), 1e-300) / placement.size
    best, gained, most = placement.copy(), 0.0, 0.0
    while (done := (perf_counter() - start) / time_limit_s) < 1.0:
        temperature = unit * HOT * (COLD / HOT) ** done
        gained += _swap(counts, backward, placement, table, temperature, PIECE, state)
        if gained > most:
            best, most = placement.copy(), gained
    return best


def _table(counts: np.ndarray, placement: np.ndarray, gpus: int) -> np.ndarray:
    """float64 [layers, gpus, E]: tokens that stay when an expert is on a GPU, both neighbouring layers as they are."""
    eye = np.eye(gpus)
    table = np.zeros((len(placement), gpus, placement.shape[1]))
    for layer, pairs in enumerate(counts):
        table[layer] += (pairs @ eye[placement[layer + 1]]).T
        table[layer + 1] += eye[placement[layer]].T @ pairs
    return table


def _compiled() -> None:
    """Compile, or load from numba's cache, before a clock starts."""
    counts, placement = np.ones((1, 2, 2)), np.array([[0, 1], [0, 1]])
    _swap(counts, counts, placement, _table(counts, placement, 2), 1.0, 1, np.ones(1, np.uint64))


@njit(cache=True)
def _next(state: np.ndarray) -> int:
    """31 random bits (xorshift64*); `state` is uint64 [1], never 0."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33))


@njit(cache=True)
def _swap(
    counts: np.ndarray,
    backward: np.ndarray,
    placement: np.ndarray,
    table: np.ndarray,
    temperature: float,
    proposals: int,
    state: np.ndarray,
) -> float:
    """Propose swaps of two experts of a layer, accept by Metropolis' rule, in place; returns the tokens kept by that.

    `backward` is `counts` with each layer transposed; `table` is kept up to date.
    """
    layers, experts = placement.shape
    total = 0.0
    for _ in range(proposals):
        layer, i, j = _next(state) % layers, _next(state) % experts, _next(state) % experts
        a, b = placement[layer, i], placement[layer, j]
        if a == b:
            continue
        gain = table[layer, b, i] - table[layer, a, i] + table[layer, a, j] - table[layer, b, j]
        if gain < 0.0 and _next(state) * 2.0**-31 >= np.exp(gain / temperature):
            continue
        placement[layer, i], placement[layer, j] = b, a
        total += gain
        for side in range(2):  # tell the layer before and the layer after
            near = layer + 2 * side - 1
            if near < 0 or near >= layers:
                continue
            left, right = (backward[near, i], backward[near, j]) if side == 0 else (counts[layer, i], counts[layer, j])
            on_a, on_b = table[near, a], table[near, b]
            for e in range(experts):
                moved = left[e] - right[e]
                on_a[e] -= moved
                on_b[e] += moved
    return total

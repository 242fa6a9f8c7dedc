"""Compiled loops over pairs of experts, and their random numbers (numba, cached on disk). Arrays as in `problem.py`."""

import numpy as np
from numba import njit


@njit(cache=True)
def random_below(limit: int, state: np.ndarray) -> int:
    """A random integer in 0..limit-1, limit up to 2^31: the upper bits of xorshift64* on `state` (uint64 [1])."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return int((np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33)) * limit) >> 31)


@njit(cache=True)
def shared(pairs: np.ndarray, here: np.ndarray, there: np.ndarray, gpus: int) -> np.ndarray:
    """float64 [A, B, gpus, gpus]: tokens that go from each GPU to each, for counts `pairs` [E, E] between two layers.

    `here` int64 [A, E] and `there` int64 [B, E]: alternative GPUs of the experts of the two layers.
    """
    experts = len(pairs)
    tokens = np.zeros((len(here), len(there), gpus, gpus))
    for a in range(len(here)):
        leaving = np.zeros((gpus, experts))
        for e in range(experts):
            leaving[here[a, e]] += pairs[e]
        for b in range(len(there)):
            for g in range(gpus):
                for f in range(experts):
                    tokens[a, b, g, there[b, f]] += leaving[g, f]
    return tokens


@njit(cache=True)
def exchanged(counts: np.ndarray, placement: np.ndarray, gpus: int) -> np.ndarray:
    """float64 [layers, gpus, E]: tokens that each expert exchanges with all experts next door on each GPU."""
    layers, experts = placement.shape
    tokens = np.zeros((layers, gpus, experts))
    for layer in range(layers - 1):
        for e in range(experts):
            for f in range(experts):
                tokens[layer, placement[layer + 1, f], e] += counts[layer, e, f]
                tokens[layer + 1, placement[layer, e], f] += counts[layer, e, f]
    return tokens

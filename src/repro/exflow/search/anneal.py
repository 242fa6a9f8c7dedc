"""Simulated annealing of a placement (numba, cached on disk): most of the search's time and of its gain.

One step looks at the swaps of an expert with all others of its layer and takes the one that is best after random noise
is added to each. Noise -T·x with x exponentially distributed accepts a single swap exactly as Metropolis does (cost <
T·x); among several it favours the good ones, so that no time is lost on refusals when the placement is cold.
"""

import math
import time
from collections.abc import Callable

import numpy as np

from repro.compiled import compiled
from repro.exflow.search.problem import Problem

STEPS = 16_384  # expert steps between two looks at the clock: some milliseconds
PIECES = 64  # temperatures of an annealing of a fixed number of sweeps
QUENCH_SWEEPS = 30
NOISE = 4096


@compiled()
def random_below(limit: int, state: np.ndarray) -> int:
    """A random integer in 0..limit-1, limit up to 2^31: the upper bits of xorshift64* on `state` (uint64 [1])."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return int((np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33)) * limit) >> 31)


@compiled(fastmath=True)
def _sweeps(arrays: tuple[np.ndarray, ...], temperature: float, slack: float, sweeps: int, state: np.ndarray) -> int:
    """`sweeps` times, let every expert swap with the best of its layer (after noise), if that gains; returns the swaps.
    `table` float32 [layers, G, E] (`Problem.table`) is kept up to date. `room` [layers] or [0]: a swap never takes a
    GPU's load above it. A change has to gain `slack` at least (rounding errors)."""
    forward, backward, placement, table, distance, weight, room, noise = arrays
    layers, experts = placement.shape
    gpus = len(distance)
    limited = len(room) > 0
    own = np.empty((layers, experts), np.float32)  # of `table`, where each expert is
    load = np.zeros((layers, gpus))
    for layer in range(layers):
        for e in range(experts):
            own[layer, e] = table[layer, placement[layer, e], e]
            if limited:
                load[layer, placement[layer, e]] += weight[layer, e]
    here = np.empty(gpus, np.float32)
    delta, change = np.empty(experts, np.float32), np.empty(experts, np.float32)
    never, heat, enough = np.float32(1e30), np.float32(temperature), np.float32(-slack)
    swaps = 0
    for _ in range(sweeps):
        for layer in range(layers):
            gpu, price, pays = placement[layer], table[layer], own[layer]
            for i in range(experts):
                a = gpu[i]
                for g in range(gpus):
                    here[g] = price[g, i] - pays[i]
                here[a] = never  # no swap within a GPU
                there = price[a]
                first = random_below(NOISE, state)
                luck = noise[first : first + experts]
                least = enough
                if limited:
                    for j in range(experts):
                        b = gpu[j]
                        moved = weight[layer, j] - weight[layer, i]
                        full = load[layer, a] + moved > room[layer] or load[layer, b] - moved > room[layer]
                        change[j] = never if full else here[b] + there[j] - pays[j] - heat * luck[j]
                        least = min(least, change[j])
                else:
                    for j in range(experts):
                        change[j] = here[gpu[j]] + there[j] - pays[j] - heat * luck[j]
                        least = min(least, change[j])
                if least >= enough:
                    continue
                j = 0
                while change[j] != least:
                    j += 1
                b = gpu[j]
                gpu[i], gpu[j] = b, a
                pays[i], pays[j] = price[b, i], price[a, j]
                if limited:
                    load[layer, a] += weight[layer, j] - weight[layer, i]
                    load[layer, b] += weight[layer, i] - weight[layer, j]
                swaps += 1
                for near in (layer - 1, layer + 1):
                    if near < 0 or near >= layers:
                        continue
                    tokens = backward[near] if near < layer else forward[layer]
                    for e in range(experts):
                        delta[e] = tokens[i, e] - tokens[j, e]
                    for g in range(gpus):
                        factor = distance[g, b] - distance[g, a]
                        if factor != 0.0:  # at one flat cost only g = a and g = b change
                            for e in range(experts):
                                table[near, g, e] += factor * delta[e]
                    for e in range(experts):
                        own[near, e] = table[near, placement[near, e], e]
    return swaps


def anneal(
    problem: Problem,
    placement: np.ndarray,
    state: np.ndarray,
    hot: float,
    cold: float,
    sweeps: float = math.inf,
    seconds: float = math.inf,
    expired: Callable[[], bool] = lambda: False,
) -> None:
    """Anneal `placement` in place from temperature `hot` to `cold`, units of `problem.scale`; end in a local optimum.
    It cools over `sweeps` or over `seconds`, whichever would end first (one must be finite), and ends at once when
    `expired` says so; while neither `seconds` nor this cuts it, the result depends on `state` alone. A placement that
    keeps the load limit keeps it."""
    start, done = time.perf_counter(), 0
    if expired():
        return
    piece = max(1, min(STEPS // placement.size, int(min(sweeps, 1e9)) // PIECES))
    noise = np.random.default_rng(int(state[0])).exponential(size=NOISE + problem.experts).astype(np.float32)
    table, distance = problem.table(placement).astype(np.float32), problem.distance.astype(np.float32)
    arrays = (problem.forward, problem.backward, placement, table, distance, problem.weight, problem.room, noise)

    def sweep(temperature: float, times: int) -> int:
        return _sweeps(arrays, temperature * problem.scale, 1e-5 * problem.scale, times, state)

    while done < sweeps:
        elapsed = (time.perf_counter() - start) / seconds
        if elapsed >= 1.0 or expired():
            break
        hurried = elapsed > (done + piece) / sweeps  # else the clock must not touch the result
        fraction = elapsed if hurried else done / sweeps
        sweep(hot * (cold / hot) ** fraction, piece)
        done += piece
    for _ in range(QUENCH_SWEEPS):
        if expired() or sweep(0.0, 1) == 0:
            break

"""A limit on the tokens that the busiest GPU of each layer gets: what is possible, and placements that keep it.

Every GPU still holds exactly E/G experts. So the GPU of the hottest expert has at least the load of the E/G - 1 coldest
ones besides. How near one can come to that least load is a partition problem, NP-hard in general. The rule below
(longest processing time first, then swaps) usually ends a fraction of a percent off.
"""

import math

import numpy as np

from repro.exflow.evaluate import busiest
from repro.exflow.search import chain
from repro.exflow.search.problem import ROUNDING, Problem


def evened(row: np.ndarray, weight: np.ndarray, gpus: int, cap: float = 0.0) -> np.ndarray:
    """`row`, GPUs int [E] of experts of `weight` [E], after swaps that bring the busiest GPU down to `cap`, or until no
    swap of one of its experts lowers the larger load of the two GPUs."""
    row = row.copy()
    load = np.bincount(row, weight, gpus)
    while load.max() > cap:
        busy = int(load.argmax())
        inside, outside = np.flatnonzero(row == busy), np.flatnonzero(row != busy)
        if len(outside) == 0:
            break
        shift = weight[inside][:, None] - weight[outside][None, :]
        worse = np.maximum(load[busy] - shift, load[row[outside]][None, :] + shift)
        i, j = np.unravel_index(worse.argmin(), worse.shape)
        if worse[i, j] >= load[busy] * (1 - 1e-12):
            break
        row[inside[i]], row[outside[j]] = row[outside[j]], busy
        load = np.bincount(row, weight, gpus)
    return row


def lightest(weight: np.ndarray, gpus: int) -> np.ndarray:
    """GPUs int64 [E] whose busiest GPU gets about as little as possible: the heaviest expert first onto the GPU with
    the least load of those with a seat left, then swaps; exact where all partitions can be tried (E = 8)."""
    experts = len(weight)
    if 1 < gpus < experts and chain.count_partitions(experts, gpus) <= chain.EXACT_PARTITIONS:
        rows = chain.partitions(experts, gpus)
        return rows[np.argmin([np.bincount(row, weight, gpus).max() for row in rows])]
    row, load, seats = np.empty(experts, np.int64), np.zeros(gpus), np.full(gpus, experts // gpus)
    for expert in np.argsort(-weight, kind="stable"):
        gpu = int(np.where(seats > 0, load, np.inf).argmin())
        row[expert] = gpu
        load[gpu] += weight[expert]
        seats[gpu] -= 1
    return evened(row, weight, gpus)


def least_max_load(weight: np.ndarray, gpus: int) -> np.ndarray:
    """float64 [layers]: the lowest max load, over the even share, that `lightest` finds; `weight` [layers, E]."""
    return busiest(weight, np.array([lightest(own, gpus) for own in weight]), gpus)


def check_max_load(max_load: float | None) -> None:
    """ValueError for a limit that is no number, infinite or below the even share; None: no limit."""
    if max_load is not None and not 1.0 <= max_load < math.inf:
        raise ValueError(f"max_load is {max_load}, must be at least 1: the busiest GPU gets the even share or more")


def check_limit(weight: np.ndarray, gpus: int, max_load: float) -> None:
    """ValueError that names the worst layer and its hottest expert when no placement that keeps `max_load` is found."""
    check_max_load(max_load)
    reached = least_max_load(weight, gpus)
    if reached.max() <= max_load * (1 + ROUNDING):
        return
    layer = int(reached.argmax())
    own, fill = np.sort(weight[layer]) * gpus / weight[layer].sum(), weight.shape[1] // gpus - 1
    expert, alone, forced = int(weight[layer].argmax()), own[-1], own[-1] + own[:fill].sum()
    reason = "no placement can meet it" if forced > max_load else "no placement that meets it was found"
    raise ValueError(
        f"max_load is {max_load:g}: {reason}. In layer {layer} expert {expert} alone takes {alone:.3f} times a GPU's "
        f"even share, {forced:.3f} with the {fill} coldest experts that fill its GPU; the lowest limit found for all "
        f"layers is {math.ceil(reached.max() * (1 - ROUNDING / 2) * 1e4) / 1e4:.4f}"  # rounded up: it can be asked for
    )


def repaired(problem: Problem, placement: np.ndarray) -> np.ndarray:
    """`placement` with layers above the load limit swapped below it, or placed by `lightest` where swaps fail."""
    placement = placement.copy()
    for layer in np.flatnonzero(~problem.fits(placement)):
        weight, cap = problem.weight[layer], problem.room[layer]
        row = evened(placement[layer], weight, problem.gpus, cap)
        if np.bincount(row, weight, problem.gpus).max() > cap:
            row = lightest(weight, problem.gpus)
        placement[layer] = row
    return placement

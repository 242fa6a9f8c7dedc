"""Our placement search on one level of the machine: exact where `_chain.py` can, else a portfolio of local searches.

A local search alternates three moves until none helps: re-assign one layer optimally against both neighbours (`sweep`), match
the labels of neighbouring layers, and re-split two GPUs in all layers at once (`_kernels.pair_viterbi`). It starts from
several placements; then rounds perturb or reheat one, and now and then join the best layers of all (`_chain.recombine`).

Arrays as in `_kernels`.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linear_sum_assignment

from repro.exflow import _kernels
from repro.exflow._chain import (
    EXACT_PARTITIONS,
    assignment_chain,
    contiguous,
    count_partitions,
    exact_chain,
    match_labels,
    recombine,
)
from repro.exflow.evaluate import distances, total_cost

Progress = Callable[[float, str], None]

STARTS = 8  # local optima that the search begins with and keeps
SWAPS_PER_EXPERT = 400  # annealing proposals of one start
VITERBI_EXPERTS = 4  # experts per GPU that one pair-Viterbi re-splits: C(8, 4) = 70 states
RECOMBINE_EVERY, REHEAT_EVERY = 10, 4  # rounds; the others perturb a solution of the pool
REHEAT = (0.2, 0.4)  # temperatures of an annealing that starts from a solution, in mean tokens per expert
PERTURBATIONS = (0.01, 0.03, 0.08)  # share of experts that are swapped before a local search starts again


@dataclass
class Budget:
    """Rounds of local search (what makes a result reproducible) and a deadline (what makes it any-time)."""

    rounds: int
    deadline: float = math.inf  # on time.perf_counter's clock
    progress: Progress | None = None
    text: str = "placing"
    span: tuple[float, float] = (0.0, 1.0)  # of the whole job, for `progress`
    cut: bool = field(default=False)  # the deadline came before the rounds were done

    def expired(self) -> bool:
        late = time.perf_counter() > self.deadline
        self.cut = self.cut or late  # stays, also when the next stage gets a later deadline
        return late

    def report(self, fraction: float) -> None:
        if self.progress is not None:
            low, high = self.span
            self.progress(low + (high - low) * fraction, self.text)


def search(counts: np.ndarray, gpus: int, budget: Budget, seed: int) -> tuple[np.ndarray, bool]:
    """(placement int64 [layers, E], whether it is proven optimal) on `gpus` GPUs at one flat cost, E/gpus experts on each."""
    experts = counts.shape[1]
    if gpus == 1:
        return np.zeros((len(counts) + 1, experts), np.int64), True
    if gpus == experts:
        return assignment_chain(counts), True
    if count_partitions(experts, gpus) <= EXACT_PARTITIONS:
        return exact_chain(counts, gpus), True
    if not counts.any():
        return contiguous(len(counts) + 1, experts, gpus), True
    return _portfolio(counts, gpus, budget, np.random.default_rng(seed)), False


def cost_table(counts: np.ndarray, placement: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """float64 [layers, G, E]: cost of having expert e on GPU g while both neighbouring layers stay."""
    layers, experts = placement.shape
    table = np.zeros((layers, len(distance), experts))
    for layer in range(layers):
        table[layer] = _layer_table(counts, placement, distance, layer)
    return table


def _layer_table(counts: np.ndarray, placement: np.ndarray, distance: np.ndarray, layer: int) -> np.ndarray:
    eye = np.eye(len(distance))
    table = np.zeros((len(distance), placement.shape[1]))
    if layer > 0:
        table += distance @ (eye[placement[layer - 1]].T @ counts[layer - 1])
    if layer < len(counts):
        table += distance @ (counts[layer] @ eye[placement[layer + 1]]).T
    return table


def greedy(counts: np.ndarray, gpus: int, rng: np.random.Generator) -> np.ndarray:
    """A random first layer; then each layer is assigned best to the one before."""
    experts = counts.shape[1]
    seats = np.repeat(np.arange(gpus), experts // gpus)
    placement = np.empty((len(counts) + 1, experts), np.int64)
    placement[0] = rng.permutation(seats)
    for layer, pairs in enumerate(counts):
        kept = pairs.T @ np.eye(gpus)[placement[layer]]
        expert, seat = linear_sum_assignment(kept[:, seats], maximize=True)
        placement[layer + 1, expert] = seats[seat]
    return placement


def sweep(counts: np.ndarray, placement: np.ndarray, distance: np.ndarray, budget: Budget) -> None:
    """Re-assign one layer at a time optimally against both neighbours, to and fro until nothing changes; in place."""
    layers, experts = placement.shape
    seats = np.repeat(np.arange(len(distance)), experts // len(distance))
    changed, order = True, list(range(layers))
    while changed and not budget.expired():
        changed = False
        for layer in order:
            cost = _layer_table(counts, placement, distance, layer)
            expert, seat = linear_sum_assignment(cost.T[:, seats])
            now = cost[placement[layer], np.arange(experts)].sum()
            if cost[seats[seat], expert].sum() < now - 1e-9 * (1.0 + abs(now)):
                placement[layer, expert] = seats[seat]
                changed = True
        order.reverse()


def improve(
    counts: np.ndarray,
    placement: np.ndarray,
    distance: np.ndarray,
    budget: Budget,
    state: np.ndarray,
    flat: bool = True,
) -> float:
    """Local optimum in place: sweeps, label matching (`flat` cost only), pair-Viterbi; returns the cost reached."""
    gpus = len(distance)
    size = placement.shape[1] // gpus
    take = min(size, VITERBI_EXPERTS)
    splits = np.array([sum(1 << e for e in chosen) for chosen in itertools.combinations(range(2 * take), take)])
    stale = np.ones((gpus, gpus), np.bool_)  # pairs of GPUs that a pair-Viterbi may still improve
    cost = total_cost(counts, placement, distance)
    seen = placement.copy()
    while not budget.expired():
        sweep(counts, placement, distance, budget)
        if flat:
            placement[:] = match_labels(counts, placement, gpus)
        touched = placement != seen
        for gpu in np.union1d(placement[touched], seen[touched]):
            stale[gpu], stale[:, gpu] = True, True
        if not flat or size > take:  # others' moves count too, or the next try chooses other experts
            stale[:] = True
        if not budget.expired():
            _kernels.pair_pass(counts, placement, distance, splits, stale, state)
        seen[:] = placement
        before, cost = cost, total_cost(counts, placement, distance)
        if cost >= before - 1e-9 * (1.0 + before):
            break
    return cost


def anneal(
    counts: np.ndarray,
    placement: np.ndarray,
    distance: np.ndarray,
    swaps: int,
    budget: Budget,
    state: np.ndarray,
    hot: float = 1.0,
) -> np.ndarray:
    """Best placement of one annealing run of `swaps` proposals; `hot` in mean tokens per expert, cooled to a hundredth of it."""
    total = max(counts.sum(), 1e-300)
    temperature = hot * total / placement.size
    placement, best = placement.copy(), placement.copy()
    costs = np.full(2, total_cost(counts, placement, distance))
    table = cost_table(counts, placement, distance)
    backward = np.ascontiguousarray(counts.transpose(0, 2, 1))
    piece = 262_144  # proposals between two looks at the clock
    for first in range(0, swaps, piece):
        if budget.expired():
            break
        last = min(first + piece, swaps)
        run = (first, last, swaps, best, costs, state)
        _kernels.anneal(counts, backward, placement, table, distance, temperature, temperature / 100.0, *run)
    return best


def random_state(rng: np.random.Generator) -> np.ndarray:
    """State of the kernels' random numbers: uint64 [1], never 0."""
    return rng.integers(1, 2**63, 1, dtype=np.uint64)


def _portfolio(counts: np.ndarray, gpus: int, budget: Budget, rng: np.random.Generator) -> np.ndarray:
    """Several starts, each a local optimum; then rounds of perturb-and-improve with a recombination now and then."""
    layers, experts = len(counts) + 1, counts.shape[1]
    distance, state = distances(gpus, gpus), random_state(rng)
    pool: list[np.ndarray] = []
    costs: list[float] = []
    for start in range(STARTS):
        placement = greedy(counts, gpus, rng)
        if start % 2:
            placement = rng.permuted(placement, axis=1)
            placement = anneal(counts, placement, distance, SWAPS_PER_EXPERT * layers * experts, budget, state)
        costs.append(improve(counts, placement, distance, budget, state))
        pool.append(placement)
        budget.report((start + 1) / (STARTS + budget.rounds))
        if budget.expired():
            break
    for round_ in range(budget.rounds):
        if budget.expired():
            break
        if round_ % RECOMBINE_EVERY == 0:
            placement = recombine(counts, np.array(pool), gpus)
        else:
            parent = int(np.argmin(costs)) if rng.random() < 0.5 else int(rng.integers(len(pool)))
            placement = _perturbed(pool[parent], rng)
            if round_ % REHEAT_EVERY == 1:
                swaps = SWAPS_PER_EXPERT * placement.size
                placement = anneal(counts, pool[parent], distance, swaps, budget, state, rng.choice(REHEAT))
        cost = improve(counts, placement, distance, budget, state)
        worst = int(np.argmax(costs))
        if cost < costs[worst] and min(abs(cost - other) for other in costs) > 1e-9 * (1.0 + cost):
            pool[worst], costs[worst] = placement, cost
        budget.report((STARTS + round_ + 1) / (STARTS + budget.rounds))
    return pool[int(np.argmin(costs))]


def _perturbed(placement: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A copy in which a few pairs of experts have swapped GPUs."""
    placement = placement.copy()
    layers, experts = placement.shape
    swaps = max(4, int(placement.size * rng.choice(PERTURBATIONS)))
    for layer, i, j in zip(rng.integers(layers, size=swaps), *rng.integers(experts, size=(2, swaps)), strict=True):
        placement[layer, [i, j]] = placement[layer, [j, i]]
    return placement


def compile_kernels() -> None:
    """Compile (or load from numba's cache) before a clock starts: seconds the first time on a machine, then milliseconds."""
    counts = np.ones((1, 4, 4))
    placement, budget, state = contiguous(2, 4, 2), Budget(0), np.ones(1, np.uint64)
    anneal(counts, placement, distances(2, 2), 1, budget, state)
    improve(counts, placement, distances(2, 2), budget, state)

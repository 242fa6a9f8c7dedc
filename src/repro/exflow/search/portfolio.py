"""Our placement search on one set of GPUs: exact where `chain.py` can, else rounds of annealing.

The first rounds anneal from scratch (`anneal.py`). Later ones reheat one of the best placements so far, or disturb a
few experts, and now and then join the best layers of several (`chain.recombine`). Each round ends with moves of many
experts at once until none helps: matching labels, and re-splitting pairs of GPUs (`resplit.py`). Arrays as in
`problem.py`.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from repro.exflow.evaluate import distances
from repro.exflow.paper import contiguous
from repro.exflow.search import chain, resplit
from repro.exflow.search.anneal import anneal
from repro.exflow.search.balance import repaired
from repro.exflow.search.chain import match_labels
from repro.exflow.search.problem import Problem

Progress = Callable[[float, str], None]
Clock = Callable[[], float]  # seconds that are left of a longer job; 0 or less: end now with what was found


def forever() -> float:
    """The clock of a job without an end."""
    return math.inf


HOT, REHEAT, COLD = 0.4, (0.25, 0.35), 0.13  # temperatures, in units of `Problem.scale`
SWEEPS = 1000  # of an annealing when rounds are counted
ANNEALED, GREEDY = 6, 6  # starts: most that are annealed, and the others, which cost little
START_SWEEPS = 10_000  # a timed search rather makes fewer of them than shorter ones
LONE_START, ALL_STARTS, ONE_REHEAT = 0.9, 0.5, 0.05  # shares of the time of a timed search
POOL = 8  # placements that later rounds start from
RECOMBINE_EVERY = 4  # rounds
RECOMBINE_LABELS = 128  # GPUs times placements that are recombined: the work grows with their square and more
REHEAT_EVERY = 3  # rounds; the others disturb
DISTURBED = (0.01, 0.03, 0.08)  # share of experts
BEST = 0.7  # probability that a reheating starts from the best placement; else from any of the pool


@dataclass
class Budget:
    """How long a search goes on: `rounds` (the result is then reproducible), until a deadline, or what comes first."""

    rounds: int | None
    deadline: float = math.inf  # on time.perf_counter's clock
    progress: Progress | None = None
    text: str = "placing"
    span: tuple[float, float] = (0.0, 1.0)  # of the whole job, for `progress`
    cut: bool = False  # the deadline came before the rounds were done
    clock: Clock | None = None

    def left(self) -> float:
        """Seconds until the deadline, or that `clock` leaves, if these are less."""
        seconds = self.deadline - time.perf_counter()
        return seconds if self.clock is None else min(seconds, self.clock())

    def expired(self) -> bool:
        late = self.left() <= 0.0
        self.cut = self.cut or late  # stays, also when the next stage gets a later deadline
        return late

    def report(self, fraction: float) -> None:
        if self.progress is not None:
            low, high = self.span
            self.progress(low + (high - low) * min(fraction, 1.0), self.text)


def check_effort(time_limit_s: float | None, rounds: int | None) -> None:
    """ValueError for a time limit or rounds that no search can keep; None: none is given."""
    if time_limit_s is not None and not 0 < time_limit_s < math.inf:
        raise ValueError(f"time_limit_s is {time_limit_s}, must be positive and finite")
    if rounds is not None and rounds < 0:
        raise ValueError(f"rounds is {rounds}, must be 0 or more")


def search(problem: Problem, budget: Budget, seed: int) -> tuple[np.ndarray, bool]:
    """(placement int64 [layers, E], whether it is proven optimal) of a problem at one flat cost. A layer in which no
    placement within the load limit is found ignores it. The whole costs no more than rank order, repaired to keep the
    limit."""
    counts, layers, experts, gpus = problem.counts, problem.layers, problem.experts, problem.gpus
    if gpus == 1:
        return np.zeros((layers, experts), np.int64), True
    if gpus == experts:
        return chain.assignment_chain(counts, budget.expired), not budget.cut
    if chain.count_partitions(experts, gpus) <= chain.EXACT_PARTITIONS:
        allowed = np.array([problem.fits([row] * layers) for row in chain.partitions(experts, gpus)])
        return chain.exact_chain(counts, gpus, allowed | ~allowed.any(axis=0)), True
    first = repaired(problem, contiguous(layers, experts, gpus))
    if problem.cap is not None:
        problem = replace(problem, cap=np.where(problem.fits(first), problem.cap, 1e300))
    if not counts.any():
        return first, True
    found = rounds(problem, budget, np.random.default_rng(seed))
    return min(found, first, key=problem.cost), False  # rank order, where time or rounds were too few to beat it


def rounds(problem: Problem, budget: Budget, rng: np.random.Generator, start: np.ndarray | None = None) -> np.ndarray:
    """The best placement of the budget's rounds; with `start` (int64 [layers, E]) none begins from scratch. Every layer
    must have placements that keep its `cap` and that `balance.repaired` finds."""
    state = rng.integers(1, 2**63, 1, dtype=np.uint64)  # of the random numbers of annealing; never 0
    began, total = time.perf_counter(), max(budget.left(), 1e-3)
    timed = budget.rounds is None
    pool: Pool = [] if start is None else [(problem.cost(start), start)]
    annealed = _annealed(problem, total) if timed else ANNEALED
    starts = (0, 0) if pool else (annealed, GREEDY)
    for done in itertools.count():
        if done == budget.rounds or (budget.expired() and pool):
            break
        placement, heat = _origin(problem, pool, done, starts, rng, budget.expired)
        if heat is not None:
            share = ONE_REHEAT if done >= sum(starts) else LONE_START if annealed == 1 else ALL_STARTS / annealed
            sweeps, seconds = (math.inf, min(share * total, budget.left())) if timed else (SWEEPS, budget.left())
            limits = (sweeps if heat else 0, max(seconds, 1e-3), budget.expired)
            anneal(problem, placement, state, heat, COLD, *limits)
        placement = improve(problem, placement, budget, state)
        _keep(pool, problem.cost(placement), placement)
        elapsed = time.perf_counter() - began
        budget.report(elapsed / total if budget.rounds is None else (done + 1) / budget.rounds)
    return pool[0][1] if pool else _random(problem, rng)


Pool = list[tuple[float, np.ndarray]]  # costs and placements, best first


def _origin(
    problem: Problem, pool: Pool, done: int, starts: tuple[int, int], rng: np.random.Generator, expired: chain.Expired
) -> tuple[np.ndarray, float | None]:
    """What round `done` begins with: a placement, and how hot to anneal it (0: descend only, None: not at all)."""
    if done < sum(starts):
        return (_random(problem, rng), HOT) if done < starts[0] else (_greedy(problem, rng, expired), 0.0)
    if done % RECOMBINE_EVERY == 0 and len(pool) > 1 and problem.flat:
        several = np.array([placement for _, placement in pool[: max(2, RECOMBINE_LABELS // problem.gpus)]])
        return chain.recombine(problem.counts, several, problem.gpus, expired=expired), None
    source = 0 if rng.random() < BEST else int(rng.integers(len(pool)))
    placement = pool[source][1].copy()
    if done % REHEAT_EVERY == 1:
        return placement, rng.choice(REHEAT)
    _disturb(problem, placement, rng)
    return placement, 0.0


def improve(problem: Problem, placement: np.ndarray, budget: Budget, state: np.ndarray) -> np.ndarray:
    """`placement` after label matching (at one flat cost) and re-splits, until no pair of GPUs gains anything."""
    pairs = list(itertools.combinations(range(problem.gpus), 2))
    stale = set(pairs)  # those that may gain
    some = problem.experts // problem.gpus > resplit.EXPERTS  # take part: the next try chooses others
    gain = math.inf
    while gain > 0.0 and not budget.expired():
        if problem.flat:
            placement = match_labels(problem.counts, placement, problem.gpus, budget.expired)
        gain = 0.0
        for a, b in pairs:
            if (a, b) not in stale or budget.expired():
                continue
            won = resplit.pair(problem, placement, a, b, state)
            gain += won
            if won > 0.0:
                stale |= {pair for pair in pairs if a in pair or b in pair}
            if not some:
                stale.discard((a, b))
    return placement


def _disturb(problem: Problem, placement: np.ndarray, rng: np.random.Generator) -> None:
    """Swap a few pairs of experts in place, where the load limit allows."""
    for _ in range(max(4, int(placement.size * rng.choice(DISTURBED)))):
        layer, (i, j) = int(rng.integers(problem.layers)), rng.integers(problem.experts, size=2)
        row = placement[layer].copy()
        row[[i, j]] = row[[j, i]]
        if problem.row_fits(layer, row):
            placement[layer] = row


def _annealed(problem: Problem, seconds: float) -> int:
    """How many annealings from scratch a search of so many seconds makes: one where each is slow."""
    sweep_s = 1e-9 * problem.layers * problem.experts**2  # a look at E swaps of each expert, 1 ns each
    return int(np.clip(seconds / sweep_s / START_SWEEPS, 1, ANNEALED))


def _greedy(problem: Problem, rng: np.random.Generator, expired: chain.Expired = lambda: False) -> np.ndarray:
    """A random first layer; then each layer is assigned best to the one before, so that whole paths stay together. Or,
    when the time is over, placed as the one before."""
    seats = np.repeat(np.arange(problem.gpus), problem.experts // problem.gpus)
    placement = np.empty((problem.layers, problem.experts), np.int64)
    placement[0] = rng.permutation(seats)
    for layer, pairs in enumerate(problem.counts):
        if expired():
            placement[layer + 1 :] = placement[layer]
            break
        kept = pairs.T @ np.eye(problem.gpus)[placement[layer]]
        expert, seat = linear_sum_assignment(kept[:, seats], maximize=True)
        placement[layer + 1, expert] = seats[seat]
    return repaired(problem, placement)


def _random(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """A random balanced placement that keeps the load limit."""
    placement = rng.permuted(contiguous(problem.layers, problem.experts, problem.gpus), axis=1)
    return repaired(problem, placement)


def _keep(pool: Pool, cost: float, placement: np.ndarray) -> None:
    """Add to the `POOL` best, best first, unless one of the same cost is there: likely the same up to labels."""
    if all(abs(cost - other) > 1e-9 * (1.0 + cost) for other, _ in pool):
        pool.append((cost, placement))
        pool.sort(key=lambda entry: entry[0])
        del pool[POOL:]


def compile_kernels() -> None:
    """Compile, or load from numba's cache, before a clock starts: seconds the first time, then milliseconds."""
    problem = Problem(np.ones((1, 4, 4)), distances(2, 2))
    placement, state = contiguous(2, 4, 2), np.ones(1, np.uint64)
    anneal(problem, placement, state, HOT, COLD, sweeps=1)
    improve(problem, placement, Budget(0), state)

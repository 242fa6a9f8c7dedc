"""Few hops and little load at once, without copies of experts: `python benchmarks/placement_load_bound.py`.

EPLB's placement has a load: tokens of the busiest GPU over the even share, as the mean over layers and in the worst
layer. Proved here is how few hops a placement can have that holds each expert once and is no busier than EPLB's, in mean
and worst layer, on the tokens placed by. It may share the load among layers as it likes.

The proof is that of the semidefinite bound (`repro.exflow.bound.sdp`: any multipliers bound the tokens that are kept), in
which a layer's own part is sharper. There the experts of a GPU are a set whose tokens are at most a limit c, and at least
what is left when the other GPUs get c each. The most that partitions into such sets give at given multipliers is a linear
program over all sets, and any prices of experts bound it. Of all limits c with EPLB's sum those that give most are found
by a dynamic program; what it pays for a limit is rounded down.

Rounds are of fictitious play: multipliers against the mean of all limits so far, then limits against the mean of all
multipliers so far. Every round's bound holds. Columns: the round; `fixed`, hops per token if limits were the round's own,
not EPLB's sum; `bound`, hops per token that are proved; the same over EPLB's hops; seconds so far.
"""

import argparse
import contextlib
import csv
import io
import itertools
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter

import highspy
import numpy as np
from placement_bounds import ROUTINGS

from repro import exflow, paths
from repro.exflow.bound import sdp
from repro.exflow.bound.cuts import Rows, load_rows
from repro.exflow.evaluate import distances, loads, total_cost
from repro.exflow.serving.eplb import slots_and_tokens

MOST_SETS = 10**6
LIMITS = 160  # of each layer, tried by the dynamic program
PARTS = 10000  # of what all layers together can be above their least
ROUNDING = 1e-9  # of the sum of all terms: over 10 times what double precision can lose

Step = tuple[float, float, float]


@dataclass(frozen=True)
class Instance:
    """Transition counts [layers-1, E, E], to be kept on `gpus` GPUs of E/gpus experts of each layer."""

    counts: np.ndarray
    gpus: int

    @cached_property
    def share(self) -> np.ndarray:
        """float64 [layers, E]: tokens of an expert over the even share of a GPU."""
        tokens = loads(self.counts)
        return tokens * self.gpus / tokens.sum(axis=1, keepdims=True)

    @cached_property
    def sets(self) -> np.ndarray:
        """int64 [sets, E/gpus]: experts that a GPU may have."""
        experts = self.counts.shape[1]
        return np.array(list(itertools.combinations(range(experts), experts // self.gpus)))

    @cached_property
    def least(self) -> np.ndarray:
        """float64 [layers]: no load is lower. The coldest experts fill the hottest one's GPU; some GPU has the even share."""
        ordered, others = np.sort(self.share, axis=1), self.sets.shape[1] - 1
        return np.maximum(1.0, ordered[:, -1] + ordered[:, :others].sum(axis=1))

    def fits(self, layer: int, limit: float) -> np.ndarray:
        """bool [sets]: those that a GPU can have where no GPU has more than `limit`."""
        load = self.share[layer][self.sets].sum(axis=1)
        rest = self.gpus - (self.gpus - 1) * limit
        return (load <= limit * (1 + ROUNDING)) & (load >= rest - ROUNDING)

    @cached_property
    def relaxation(self) -> sdp.Relaxation:
        return sdp.even(self.counts / self.counts.max(), self.gpus)

    def hops(self, kept: float) -> float:
        """Hops per token where so much of `relaxation.gains` is kept."""
        return float((self.counts.sum() - kept * self.counts.max()) / self.counts[0].sum())


@dataclass(frozen=True)
class Multipliers:
    """Λ float64 [edges, 2E, 2E]; of triangles Σ price · row, float64 [unknowns], and Σ price · limit."""

    matrices: np.ndarray
    taken: np.ndarray
    paid: float

    def toward(self, other: "Multipliers", step: float) -> "Multipliers":
        mine, theirs = ((own.matrices, own.taken, own.paid) for own in (self, other))
        return Multipliers(*((1 - step) * a + step * b for a, b in zip(mine, theirs, strict=True)))


def multipliers(instance: Instance, limits: np.ndarray, iterations: int) -> tuple[Multipliers, float]:
    """Those of the semidefinite bound that are best in so many iterations, and what is kept, for placements with no more
    load than `limits` [layers] times the even share."""
    rows, never = fitting_rows(instance, limits)
    upper = instance.relaxation.upper.copy()
    upper[never] = 0.0
    problem, check = replace(instance.relaxation, upper=upper), sdp.dual_bound
    looks = itertools.chain(itertools.repeat(1.0, iterations * instance.relaxation.pairs.edges), itertools.repeat(0.0))
    best: list[tuple[float, Multipliers]] = []

    def watched(problem: sdp.Relaxation, matrices: np.ndarray, both: tuple[Rows, Rows], penalty: float) -> float:
        kept, triangles = check(problem, matrices, both, penalty), both[1]
        taken = penalty * triangles.taken(problem.pairs.unknowns)
        if not best or kept < best[0][0]:
            best[:] = [(kept, Multipliers(matrices.copy(), taken, penalty * triangles.paid))]
        return kept

    sdp.dual_bound = watched
    try:
        sdp._solve(problem, rows, lambda: next(looks))  # asked once for each pair of layers
    finally:
        sdp.dual_bound = check
    kept, found = best[0]
    return found, kept


def fitting_rows(instance: Instance, limits: np.ndarray) -> tuple[Rows, np.ndarray]:
    """What follows for pairs of experts: a row for the load of each expert's GPU and one for each three of which two fit
    on a GPU, but not all; and the unknowns of the pairs that do not fit."""
    pairs = instance.relaxation.pairs
    load, experts = load_rows(pairs, instance.share, limits), instance.counts.shape[1]
    index, never = [], []
    for layer, limit in enumerate(limits):
        number, fitting = pairs.within(layer), instance.sets[instance.fits(layer, limit)]
        two, three = np.zeros((experts,) * 2, bool), np.zeros((experts,) * 3, bool)
        for columns in itertools.combinations(range(fitting.shape[1]), 2):
            two[tuple(fitting[:, columns].T)] = True
        for columns in itertools.combinations(range(fitting.shape[1]), 3):
            three[tuple(fitting[:, columns].T)] = True
        i, j = np.triu_indices(experts, 1)
        never.append(number[i, j][~two[i, j]])
        i, j, k = np.array(list(itertools.combinations(range(experts), 3))).T
        apart = ~three[i, j, k] & two[i, j] & two[i, k] & two[j, k]
        index.append(np.stack([number[i, j], number[i, k], number[j, k]], axis=1)[apart])
    triples = np.concatenate(index)
    start = np.concatenate([load.start, load.start[-1] + 3 * np.arange(1, len(triples) + 1)])
    limit, value = np.concatenate([load.limit, np.ones(len(triples))]), np.ones(triples.size)
    rows = Rows(
        np.arange(len(limit)),
        start,
        np.concatenate([load.index, triples.ravel()]),
        np.concatenate([load.value, value]),
        limit,
        np.zeros(len(limit)),
    )
    return rows, np.concatenate(never)


def most_kept(instance: Instance, chosen: Multipliers, mean: float, worst: float) -> tuple[float, np.ndarray]:
    """What any placement with at most these loads keeps, and the limits [layers] that would let it keep so much."""
    pairs, gains = instance.relaxation.pairs, instance.relaxation.gains
    taken = chosen.taken + pairs.vector(chosen.matrices)
    most, rounding = instance.relaxation.spectrum.most(chosen.matrices)
    between = np.maximum(gains[pairs.between] - taken[pairs.between], 0).sum() - taken[pairs.own].sum()
    budget = max(0.0, mean * len(instance.share) - instance.least.sum())
    if mean < instance.least.mean() * (1 - ROUNDING):
        raise ValueError(f"a mean load of {mean} is less than the least, {instance.least.mean()}")
    steps = [list(_steps(instance, layer, taken, budget, worst)) for layer in range(len(instance.share))]
    inside, limits = best_limits(steps)
    size = np.abs(chosen.matrices).sum() + 2 * np.abs(taken).sum() + gains.sum() + abs(chosen.paid)
    return float(chosen.paid + most + between + inside + rounding + ROUNDING * size), limits


def _steps(instance: Instance, layer: int, taken: np.ndarray, budget: float, worst: float) -> Iterator[Step]:
    """(part of the budget at which a step begins, the limit until which it goes, the most that is kept until there).
    Where the program has no solution yet, the next step, of more sets, begins as early."""
    own = -taken[instance.relaxation.pairs.within(layer)]
    parts = np.concatenate([[0.0], np.geomspace(1e-3, 1.0, LIMITS - 1)])
    limits, before = np.minimum(instance.least[layer] + budget * parts, worst), 0.0
    for part, limit, found in zip(parts, limits, most_of_sets(instance, layer, own, limits), strict=True):
        if found is not None:
            yield before, limit, found
            before = part


def most_of_sets(instance: Instance, layer: int, own: np.ndarray, limits: np.ndarray) -> Iterator[float | None]:
    """For each of rising `limits` an upper bound on Σ own[i, j] over the pairs of experts that share a GPU, None where no
    partition into fitting sets was found. Prices prove it: the G sets hold each expert once, so they give at most the
    prices of all experts and G times what a set gives beyond its own."""
    size, solver = instance.sets.shape[1], _one_of_each(len(own))
    worth = sum(own[tuple(instance.sets[:, two].T)] for two in itertools.combinations(range(size), 2))
    known = np.zeros(len(worth), bool)
    for limit in limits:
        fitting = instance.fits(layer, limit)
        new, known = fitting & ~known, fitting
        members, number = instance.sets[new].astype(np.int32).ravel(), int(new.sum())
        start, ones = np.arange(0, len(members), size, dtype=np.int32), np.ones(len(members))
        free = np.full(number, highspy.kHighsInf)
        solver.addCols(number, worth[new], np.zeros(number), free, len(members), start, members, ones)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            yield None
            continue
        prices = np.array(solver.getSolution().row_dual)
        beyond = worth[known] - prices[instance.sets[known]].sum(axis=1)
        yield float(prices.sum() + instance.gpus * beyond.max())


def _one_of_each(experts: int) -> highspy.Highs:
    """A linear program to maximise, without columns yet, that has one of each expert. Columns that are added later leave
    its solution feasible, from which the primal simplex goes on."""
    solver = highspy.Highs()
    for option, value in (("output_flag", False), ("threads", 1), ("simplex_strategy", 4), ("solver", "simplex")):
        assert solver.setOptionValue(option, value) == highspy.HighsStatus.kOk, option
    once, nothing = np.ones(experts), np.empty(0)
    solver.addRows(experts, once, once, 0, np.zeros(experts, np.int32), nothing.astype(np.int32), nothing)
    solver.changeObjectiveSense(highspy.ObjSense.kMaximize)
    return solver


def best_limits(steps: list[list[Step]]) -> tuple[float, np.ndarray]:
    """The most of a step of each layer with begins that add up to at most 1, and the limits of those."""
    best, chosen = np.zeros(PARTS + 1), []
    for layer in steps:
        found, which = np.full(PARTS + 1, -np.inf), np.zeros(PARTS + 1, np.int64)
        for step, (begin, _, kept) in enumerate(layer):
            paid = int(begin * PARTS)
            with_it = best[: PARTS + 1 - paid] + kept
            better = with_it > found[paid:]
            found[paid:][better], which[paid:][better] = with_it[better], step
        best = found
        chosen.append(which)
    left, limits = PARTS, []
    for layer, which in zip(reversed(steps), reversed(chosen), strict=True):
        begin, limit, _ = layer[which[left]]
        limits.append(limit)
        left -= int(begin * PARTS)
    return float(best[-1]), np.array(limits[::-1])


@dataclass(frozen=True)
class Round:
    """A row of the table; `share`: `bound` over EPLB's hops."""

    split: int
    round: int
    fixed: float
    bound: float
    share: float
    seconds: float


def rounds(counts: np.ndarray, gpus: int, last: int, iterations: int, split: int = 0) -> Iterator[Round]:
    """`number` of them, each with so many `iterations` of the semidefinite bound."""
    start, instance, weight = perf_counter(), Instance(counts, gpus), loads(counts)
    experts = weight.shape[1]
    slots, _, _, busiest = slots_and_tokens(weight, experts, 1, 1, gpus)
    eplb = total_cost(counts, np.argsort(slots, axis=1) * gpus // experts, distances(gpus, gpus)) / counts[0].sum()
    load = busiest * gpus / weight.sum(axis=1)
    limits, mean, most = instance.least + (load - instance.least).mean(), None, np.inf
    all_limits = [limits]
    for number in range(1, last + 1):
        found, kept = multipliers(instance, np.mean(all_limits, axis=0), iterations)
        mean = mean.toward(found, 1 / number) if mean else found
        kept_at_load, limits = most_kept(instance, mean, load.mean(), load.max())
        most = min(most, kept_at_load)
        all_limits.append(limits)
        bound = instance.hops(most)
        yield Round(split, number, instance.hops(kept), bound, bound / eplb, perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    names = [name for name, _ in ROUTINGS]
    parser.add_argument("--routing", choices=names, default=names[0], help="a shipped one, of which top-1 is taken")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--splits", type=int, nargs="+", default=[0], help="seeds of the 70 %% of its sequences")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--iterations", type=int, default=300, help="of the semidefinite bound, in a round")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    trace = exflow.load_trace(paths.data(f"{options.routing}.npz")).top(1)
    experts = trace.num_experts
    if experts % options.gpus or math.comb(experts, experts // options.gpus) > MOST_SETS:
        parser.error(
            f"--gpus {options.gpus}: {experts} experts must divide, into sets of which there are {MOST_SETS} at most"
        )
    if options.iterations < sdp.CHECK_EVERY:
        parser.error(
            f"--iterations {options.iterations}: must be {sdp.CHECK_EVERY} or more, after which it is first known"
        )
    with options.csv.open("w", newline="") if options.csv else contextlib.nullcontext(io.StringIO()) as file:
        writer = csv.DictWriter(file, list(Round.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        for split in options.splits:
            counts = exflow.transitions(trace.split(0.7, seed=split)[0])
            for row in rounds(counts, options.gpus, options.rounds, options.iterations, split):
                writer.writerow(asdict(row))
                file.flush()
                print(f"split {split}, {row.round:2}: fixed {row.fixed:.3f}, bound {row.bound:.3f}, ", end="")
                print(f"{row.share:.4f} of EPLB's, {row.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # read when NumPy is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    main()

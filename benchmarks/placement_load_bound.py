"""Few hops and little load at once, without copies of experts: `python benchmarks/placement_load_bound.py`.

EPLB's placement has a load: tokens of the busiest GPU over the even share, as the mean over layers and in the worst
layer. Proved here, for top-1 routing, is how few hops a placement can have on the tokens it is made from, with E/G of the
E experts of each layer on each of G GPUs, each expert once, when it is no busier than EPLB's in mean and worst layer. It
may share the load among layers as it likes.

The proof is that of the semidefinite bound (`repro.exflow.bound.sdp`: any multipliers bound the tokens that are kept), in
which a layer's own part is sharper. There the experts of a GPU are a set whose tokens are at most a limit c, and at least
what is left when the other GPUs get c each. What partitions into such sets give at given multipliers is at most the
optimum of a linear program over all sets, and any prices of experts bound that. Of all limits with EPLB's sum, none above
its worst, those that give most are found by a dynamic program; what it pays for a limit is rounded down.

Rounds are of fictitious play, in which each side answers the mean of what the other has done: multipliers for the mean of
all limits so far, then the limits that give most at the mean of all multipliers so far. Every round's bound holds, and so
does one found before the first, for which no layer is busier than EPLB's worst.

Columns: the split; the round; `fixed`, hops per token if limits were the mean that the round began with; `bound`, the
best so far of what is proved; the same over EPLB's hops; seconds so far.
"""

import argparse
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
from kept import keep
from placement_bounds import ROUTINGS

from repro import exflow, paths
from repro.exflow.bound import sdp
from repro.exflow.bound.cuts import Rows, load_rows
from repro.exflow.evaluate import distances, loads, total_cost
from repro.exflow.serving.eplb import slots_and_tokens

MOST_SETS = 10**6  # of experts of a GPU, which are all listed
LIMITS = 160  # of each layer, tried by the dynamic program
PARTS = 10000  # of what all layers together can be above their least
ROUNDING = 1e-9  # of the sum of all terms without their signs, more than double precision loses; also of loads

Step = tuple[float, float, float]  # begins at this part of the budget, goes until this limit, keeps at most so much


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
        """float64 [layers]: no load is lower. The coldest experts fill the hottest one's GPU; some GPU has at
        least the even share."""
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
    """Λ float64 [edges, 2E, 2E]; of triangles Σ price · row, float64 [unknowns], Σ price · limit, and the sum of the
    terms of both without their signs."""

    matrices: np.ndarray
    taken: np.ndarray
    paid: float
    size: float

    def toward(self, other: "Multipliers", step: float) -> "Multipliers":
        """(1 - step) of these and step of the others, which are multipliers as well."""
        mine, theirs = ((own.matrices, own.taken, own.paid, own.size) for own in (self, other))
        return Multipliers(*((1 - step) * a + step * b for a, b in zip(mine, theirs, strict=True)))


def multipliers(instance: Instance, limits: np.ndarray, iterations: int) -> tuple[Multipliers, float]:
    """Those of the semidefinite bound that are best in so many iterations (of which every 25th is looked at), and what is
    kept, for placements with no more load than `limits` [layers] times the even share. Where no placement keeps these,
    the multipliers are poor, not wrong."""
    rows, never = fitting_rows(instance, limits)
    upper = instance.relaxation.upper.copy()
    upper[never] = 0.0
    problem, check = replace(instance.relaxation, upper=upper), sdp.dual_bound
    # The clock is asked once for each pair of layers: so the same iterations are made on every machine.
    clock = itertools.chain(itertools.repeat(1.0, iterations * instance.relaxation.pairs.edges), itertools.repeat(0.0))
    best: list[tuple[float, Multipliers]] = []

    def watched(problem: sdp.Relaxation, matrices: np.ndarray, rows: tuple[Rows, Rows], penalty: float) -> float:
        kept, (_, triangles) = check(problem, matrices, rows, penalty), rows
        if not best or kept < best[0][0]:
            parts = (triangles.taken(problem.pairs.unknowns), triangles.paid, triangles.size)
            best[:] = [(kept, Multipliers(matrices.copy(), *(penalty * part for part in parts)))]
        return kept

    sdp.dual_bound = watched
    try:
        sdp._solve(problem, rows, lambda: next(clock))
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
    """The most that a placement keeps whose busiest GPU has at most these loads, `mean` over layers and `worst` of them;
    and the limits [layers] at which that was found, which cost a little more than `mean`, as what is paid for them is
    rounded down. ValueError where no placement has so little load."""
    pairs, gains = instance.relaxation.pairs, instance.relaxation.gains
    taken = chosen.taken + pairs.vector(chosen.matrices)
    most, rounding = instance.relaxation.spectrum.most(chosen.matrices)
    between = np.maximum(gains[pairs.between] - taken[pairs.between], 0).sum() - taken[pairs.own].sum()
    least = instance.least
    if mean < least.mean() * (1 - ROUNDING) or worst < least.max() * (1 - ROUNDING):
        raise ValueError(f"a load of {mean} and {worst} is less than the least, {least.mean()} and {least.max()}")
    budget = max(0.0, mean * len(least) - least.sum())
    steps = [list(_steps(instance, layer, taken, budget, worst)) for layer in range(len(least))]
    inside, limits = best_limits(steps)
    size = np.abs(chosen.matrices).sum() + 2 * np.abs(taken).sum() + gains.sum() + chosen.size
    return float(chosen.paid + most + between + inside + rounding + ROUNDING * size), limits


def _steps(instance: Instance, layer: int, taken: np.ndarray, budget: float, worst: float) -> Iterator[Step]:
    """Steps until `budget` above the least load, and no further than `worst`. Where the program has no solution yet, the
    next step, of more sets, begins as early. ValueError where it never has one."""
    own = -taken[instance.relaxation.pairs.within(layer)]
    parts = np.concatenate([[0.0], np.geomspace(1e-3, 1.0, LIMITS - 1)])
    limits, begin = np.minimum(instance.least[layer] + budget * parts, worst), 0.0
    for part, limit, found in zip(parts, limits, most_of_sets(instance, layer, own, limits), strict=True):
        if found is not None:
            yield begin, limit, found
            begin = part
    if found is None:
        raise ValueError(f"layer {layer}: no sets of experts with loads of at most {limits[-1]} hold each expert once")


def most_of_sets(instance: Instance, layer: int, own: np.ndarray, limits: np.ndarray) -> Iterator[float | None]:
    """For each of rising `limits` an upper bound on Σ own[i, j] over the pairs of experts that share a GPU, None where no
    partition into fitting sets was found yet. Prices prove it, whichever: the G sets hold each expert once, so they give
    at most the prices of all experts and G times what a set gives beyond the prices of its own, at most."""
    size, solver = instance.sets.shape[1], _one_of_each(len(own))
    worth = sum(own[tuple(instance.sets[:, two].T)] for two in itertools.combinations(range(size), 2))
    known, prices = np.zeros(len(worth), bool), None
    for limit in limits:
        fitting = instance.fits(layer, limit)
        new, known = fitting & ~known, fitting
        members, number = instance.sets[new].astype(np.int32).ravel(), int(new.sum())
        start, ones = np.arange(0, len(members), size, dtype=np.int32), np.ones(len(members))
        free = np.full(number, highspy.kHighsInf)
        solver.addCols(number, worth[new], np.zeros(number), free, len(members), start, members, ones)
        solver.run()
        if solver.getModelStatus() == highspy.HighsModelStatus.kOptimal:
            prices = np.array(solver.getSolution().row_dual)
        if prices is None:
            yield None
            continue
        beyond = worth[known] - prices[instance.sets[known]].sum(axis=1)
        rounding = ROUNDING * (instance.gpus + 1) * np.abs(prices).sum()
        yield float(prices.sum() + instance.gpus * beyond.max() + rounding)


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
            reached = best[: PARTS + 1 - paid] + kept
            better = reached > found[paid:]
            found[paid:][better], which[paid:][better] = reached[better], step
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
    """A row of the table."""

    split: int
    round: int
    fixed: float
    bound: float
    of_eplb: float
    seconds: float


def rounds(counts: np.ndarray, gpus: int, last: int, iterations: int, split: int = 0) -> Iterator[Round]:
    """The first `last`, each with so many `iterations` of the semidefinite bound."""
    start, instance, weight = perf_counter(), Instance(counts, gpus), loads(counts)
    experts = weight.shape[1]
    slots, _, _, busiest = slots_and_tokens(weight, experts, 1, 1, gpus)
    eplb = total_cost(counts, np.argsort(slots, axis=1) * gpus // experts, distances(gpus, gpus)) / counts[0].sum()
    load = busiest * gpus / weight.sum(axis=1)
    no_busier = np.full(len(load), load.max() * (1 + ROUNDING))
    _, most = multipliers(instance, no_busier, iterations)
    limits, average = instance.least + (load - instance.least).mean(), None
    all_limits = [limits]
    for number in range(1, last + 1):
        found, kept = multipliers(instance, np.mean(all_limits, axis=0), iterations)
        average = average.toward(found, 1 / number) if average else found
        kept_at_load, limits = most_kept(instance, average, load.mean(), load.max())
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
    parser.add_argument("--csv", type=Path, help="add each row to this file as soon as it is there")
    options = parser.parse_args()
    trace = exflow.load_trace(paths.data(f"{options.routing}.npz")).top(1)
    experts = trace.num_experts
    fit = 1 < options.gpus < experts and experts % options.gpus == 0
    if not fit or math.comb(experts, experts // options.gpus) > MOST_SETS:
        wanted = (
            f"must share {experts} experts evenly, more than one each, in at most {MOST_SETS} ways to fill one of them"
        )
        parser.error(f"--gpus {options.gpus}: GPUs {wanted}")
    if options.iterations < sdp.CHECK_EVERY:
        parser.error(
            f"--iterations {options.iterations}: must be {sdp.CHECK_EVERY} or more, as every {sdp.CHECK_EVERY}th is looked at"
        )
    for split in options.splits:
        counts = exflow.transitions(trace.split(0.7, seed=split)[0])
        for row in rounds(counts, options.gpus, options.rounds, options.iterations, split):
            if options.csv:
                keep(options.csv, [asdict(row)])
            print(f"split {split}, {row.round:2}: fixed {row.fixed:.3f}, bound {row.bound:.3f}, ", end="")
            print(f"{row.of_eplb:.4f} of EPLB's, {row.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # read when NumPy is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    main()

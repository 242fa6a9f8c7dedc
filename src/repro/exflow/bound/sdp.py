"""A semidefinite bound on how many tokens any placement keeps on their GPU: two layers at a time, by ADMM.

Let X_l [E, G] be 1 where a GPU holds an expert of layer l and 0 elsewhere. Of two neighbouring layers take the Gram
matrix of their 2E experts, on how many GPUs two experts are together:

    Z_l = [X_l; X_l+1] [X_l; X_l+1]ᵀ = [[A_l, B_l], [B_lᵀ, A_l+1]]
    tokens kept <= Σ_l <counts_l, min(B_l, 1)>,  with one copy of each expert =

What is true of every placement, and is all that the relaxation asks for:
  (1) what eigenvalues know of Z_l: `spectra.py`
  (2) the entries are between bounds, with one copy of each expert 0 and 1, and the A_l of Z_l-1 and of Z_l are the same
      matrix: they are the unknowns y of `pairs.py`
  (3) the linear inequalities of `cuts.py` on y: triangles, and a limit on the load of the GPUs where there is one
Neighbours only share an A, so the layers' chain needs no larger matrix than 2E (a chordal relaxation).

ADMM alternates between (1) and (2) with (3), and moves multipliers Λ_l [n, n] of "both agree". The nearest point of (2)
and (3) is not computed to the end: one sweep over the inequalities' multipliers τ >= 0 goes on where the last one
stopped. The bound does not trust that any of this converged. Every placement has τ·(limits - rows·y) >= 0; added to
what is kept it gives, for any τ >= 0 and any symmetric Λ (weak duality)

    tokens kept  <=  τ·limits  +  Σ_l max over (1) of <Λ_l, Z>  +  max over (2) of kept(y) - <τ·rows, y> - Σ_l <Λ_l, Z_l>

The first maximum is a matter of the largest eigenvalues, and the second of each entry for itself. Early multipliers give
a weak bound, never a wrong one, and `dual_bound` adds what rounding may have taken.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from repro.exflow.bound.cuts import Rows, boxed, find_triangles, load_rows, no_rows
from repro.exflow.bound.pairs import Pairs
from repro.exflow.bound.spectra import EPSILON, Copied, Even

CHECK_EVERY = 25  # iterations between two bounds
FIND_EVERY = 10  # iterations between two searches for triangles
CONVERGED = 1e-3  # of all tokens: between the bound and what the relaxation's own solution keeps
STALLED = 1e-5  # of all tokens: what 20 of these checks must gain, or a converged iteration stops
OVER_RELAXATION = 1.6  # 1.5 to 1.8 is usual for ADMM
PENALTY = 0.05  # at first, for counts scaled to a maximum of 1; it follows the residuals
IMBALANCE = 10.0  # of the two residuals, beyond which the penalty changes
MOST_TRIANGLES = 10**9  # looking for more takes seconds; without them the bound is weaker
START_S = 4e-8  # seconds to the first bound, over (2E)³ and pair of layers: not begun when fewer are left

Clock = Callable[[], float]  # seconds that are left


@dataclass(frozen=True)
class Relaxation:
    """Maximise `gains` · min(y, 1) over (1), which `spectrum` knows, and y between `lower` and `upper`. All three are
    float64 [unknowns]."""

    pairs: Pairs
    spectrum: Even | Copied
    gains: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def even(counts: np.ndarray, gpus: int) -> Relaxation:
    """Of E/gpus experts on every GPU, for `counts` [layers-1, E, E]."""
    pairs = Pairs(len(counts), counts.shape[1])
    gains, lower, upper = np.zeros((3, pairs.unknowns))
    gains[pairs.between], lower[pairs.own], upper[:] = counts, 1.0, 1.0
    return Relaxation(pairs, Even(pairs.experts, gpus), gains, lower, upper)


def copied(counts: np.ndarray, gpus: int, held: int) -> Relaxation:
    """Of `held` experts on every GPU, some of them copies."""
    pairs = Pairs(len(counts), counts.shape[1], bordered=True)
    gains, lower, upper = np.zeros((3, pairs.unknowns))
    gains[pairs.between], lower[pairs.own], upper[:] = counts, 1.0, gpus
    lower[-1] = gpus
    return Relaxation(pairs, Copied(pairs.experts, gpus, held), gains, lower, upper)


def kept_bound(
    counts: np.ndarray, gpus: int, clock: Clock, loads: tuple[np.ndarray, np.ndarray] | None = None
) -> float:
    """Upper bound on the tokens of `counts` [layers-1, E, E] that stay on their GPU of E/gpus experts; 1 < gpus < E.

    The best one met before `clock` says 0 or the iteration converged; infinity when there is no time for any. `loads`:
    (tokens float64 [layers, E] of every expert, most float64 [layers] that a GPU may get), None: no limit.
    """
    if _too_late(counts, clock):
        return math.inf
    scale = float(counts.max())
    problem = even(counts / scale, gpus)
    return scale * _solve(problem, no_rows() if loads is None else load_rows(problem.pairs, *loads), clock)


def kept_bound_of_copies(counts: np.ndarray, gpus: int, held: int, clock: Clock) -> float:
    """The same where each GPU holds `held` experts of each layer, E/gpus < held < E, as copies where that is more."""
    if _too_late(counts, clock):
        return math.inf
    scale = float(counts.max())
    return scale * _solve(copied(counts / scale, gpus, held), no_rows(), clock)


def _too_late(counts: np.ndarray, clock: Clock) -> bool:
    return clock() < START_S * len(counts) * (2 * counts.shape[1]) ** 3


def _solve(problem: Relaxation, limits: Rows, clock: Clock) -> float:
    """Upper bound on what is kept by all y of `problem` that keep `limits`."""
    pairs, spectrum, gains = problem.pairs, problem.spectrum, problem.gains
    total, inverse, best = gains.sum(), 1 / pairs.entries, [math.inf]
    triangles, wanted = no_rows(), 4 * pairs.edges * pairs.experts**3 <= MOST_TRIANGLES
    y = np.clip(np.full(pairs.unknowns, 1.0 / spectrum.gpus), problem.lower, problem.upper)
    matrices, shift, penalty = pairs.matrices(y), np.zeros(pairs.unknowns), PENALTY  # shift: by the inequalities
    dual = np.zeros(matrices.shape)  # scaled: Λ = -penalty · dual, and prices are τ / penalty
    for iteration in itertools.count(1):
        before, gram = y, np.empty(matrices.shape)
        for edge, point in enumerate(matrices - dual):
            if clock() <= 0:
                return best[-1]
            gram[edge] = spectrum.nearest(point)
        dual += OVER_RELAXATION * gram + (1 - OVER_RELAXATION) * matrices
        box = (gains * inverse / penalty, problem.lower, problem.upper)
        wish = pairs.vector(dual) * inverse
        free = wish - shift
        if wanted and iteration % FIND_EVERY == 0:
            triangles = find_triangles(pairs, boxed(free, box), triangles, spectrum.halves)
        limits.ascend(free, inverse, box)
        triangles.ascend(free, inverse, box)
        shift, y = wish - free, boxed(free, box)
        matrices = pairs.matrices(y)
        dual -= matrices
        if iteration % CHECK_EVERY:
            continue
        best.append(min(best[-1], dual_bound(problem, -penalty * dual, (limits, triangles), penalty)))
        if best[-1] - gains @ np.minimum(y, 1) < CONVERGED * total and best[-21:][0] - best[-1] < STALLED * total:
            return best[-1]
        primal = np.linalg.norm(gram - matrices)
        moved = penalty * math.sqrt(pairs.entries @ (y - before) ** 2)
        factor = 1.5 if primal > IMBALANCE * moved else 1 / 1.5 if moved > IMBALANCE * primal else 1.0
        penalty *= factor
        for scaled in (dual, shift, limits.price, triangles.price):
            scaled /= factor
    raise AssertionError


def dual_bound(problem: Relaxation, multiplier: np.ndarray, rows: tuple[Rows, ...], penalty: float) -> float:
    """Upper bound on what is kept by all y of `problem` that keep `rows`, from any symmetric `multiplier` Λ [edges, n, n]
    and τ = `penalty` · price of the rows: see the top of the file.

    Rounded up: sums of n terms are off by at most n ε Σ |terms| (Higham 2002, section 3), eigenvalues as `spectrum` says.
    """
    pairs, gains, lower, upper = problem.pairs, problem.gains, problem.lower, problem.upper
    paid = penalty * sum(each.paid for each in rows)
    taken = penalty * sum(each.taken(pairs.unknowns) for each in rows) + pairs.vector(multiplier)
    kept = [gains * np.minimum(y, 1) - taken * y for y in (lower, upper, np.clip(1.0, lower, upper))]
    most, rounding = problem.spectrum.most(multiplier)
    terms = multiplier.size + pairs.unknowns + sum(len(each.value) for each in rows)
    size = upper.max() * (np.abs(multiplier).sum() + gains.sum() + penalty * sum(each.size for each in rows))
    return float(paid + most + np.max(kept, axis=0).sum() + rounding + EPSILON * terms * size)

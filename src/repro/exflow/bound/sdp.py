"""A semidefinite bound on how many tokens any balanced placement keeps on their GPU: two layers at a time, by ADMM.

Let X_l [E, G] be the one-hot placement of layer l, each GPU holding k = E/G experts. Of two neighbouring layers take
the Gram matrix of their 2E experts, 1 where two experts share a GPU and 0 elsewhere:

    Z_l = [X_l; X_l+1] [X_l; X_l+1]ᵀ = [[A_l, B_l], [B_lᵀ, A_l+1]]
    tokens kept = Σ_l <counts_l, B_l>

What is true of every placement, and is all that the relaxation asks for:
  (1) each row of A and B sums to k, and every GPU holds k experts of either layer. So Z_l = J/G + V R_l Vᵀ with J all
      ones, V [2E, 2E-2] an orthonormal basis of the vectors that sum to zero over either layer, and R_l = 2k times a
      projector of rank G-1 (its GPUs' indicator vectors, less their mean, span G-1 dimensions in which Z_l has
      eigenvalue 2k)
  (2) A and B are between 0 and 1, A's diagonal is 1, and the A_l of Z_l-1 and of Z_l are the same matrix: the entries
      are the unknowns y of `pairs.py`
  (3) the linear inequalities of `cuts.py` on y: triangles, and a limit on the load of the GPUs where there is one
Neighbours only share an A, so the layers' chain needs no larger matrix than 2E (a chordal relaxation).

ADMM alternates between (1) and (2) with (3), and moves multipliers Λ_l [2E, 2E] of "both agree". The nearest point of
(2) and (3) is not computed to the end: one sweep over the inequalities' multipliers τ >= 0 goes on where the last one
stopped. The bound does not trust that any of this converged. Every placement has τ·(limits - rows·y) >= 0; added to
what is kept it gives τ·limits + <c, y>, c being the tokens less what τ takes from them. Hence for any τ >= 0 and any
symmetric Λ (weak duality)

    tokens kept  <=  τ·limits  +  Σ_l max over (1) of <Λ_l, Z>  +  max over (2) of <c, y> - Σ_l <Λ_l, Z_l>

Both maxima have closed forms: <Λ_l, J>/G + 2k times the sum of the G-1 largest eigenvalues of VᵀΛ_lV (Ky Fan), and a
sum of positive parts, as the entries of (2) are independent. Early multipliers give a weak bound, never a wrong one,
and `dual_bound` adds what rounding may have taken.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
from scipy.linalg import block_diag, helmert

from repro.exflow.bound.cuts import Rows, find_triangles, load_rows, no_rows
from repro.exflow.bound.pairs import Pairs

CHECK_EVERY = 25  # iterations between two bounds
FIND_EVERY = 10  # iterations between two searches for triangles
CONVERGED = 1e-3  # of all tokens: between the bound and what the relaxation's own solution keeps
STALLED = 1e-5  # of all tokens: what 20 of these checks must gain, or a converged iteration stops
OVER_RELAXATION = 1.6  # 1.5 to 1.8 is usual for ADMM
PENALTY = 0.05  # at first, for counts scaled to a maximum of 1; it follows the residuals
IMBALANCE = 10.0  # of the two residuals, beyond which the penalty changes
MOST_TRIANGLES = 10**9  # looking for more takes seconds; without them the bound is weaker
START_S = 4e-8  # seconds to the first bound, over (2E)³ and pair of layers: not begun when fewer are left
EPSILON = float(np.finfo(float).eps)

Clock = Callable[[], float]  # seconds that are left


def kept_bound(
    counts: np.ndarray, gpus: int, clock: Clock, loads: tuple[np.ndarray, np.ndarray] | None = None
) -> float:
    """Upper bound on the tokens of `counts` [layers-1, E, E] that stay on their GPU of E/gpus experts; 1 < gpus < E.

    The best one met before `clock` says 0 or the iteration converged; infinity when there is no time for any. `loads`:
    (tokens float64 [layers, E] of every expert, most float64 [layers] that a GPU may get), None: no limit.
    """
    pairs, scale, best = Pairs(len(counts), counts.shape[1]), float(counts.max()), [math.inf]
    if clock() < START_S * pairs.edges * (2 * pairs.experts) ** 3:
        return math.inf
    gains, inverse, basis = pairs.gains(counts / scale), 1 / pairs.entries, sums_to_zero(pairs.experts)
    limits = no_rows() if loads is None else load_rows(pairs, *loads)
    triangles, wanted = no_rows(), 4 * pairs.edges * pairs.experts**3 <= MOST_TRIANGLES
    boxed, matrices = np.full(pairs.unknowns, 1.0 / gpus), pairs.matrices(np.full(pairs.unknowns, 1.0 / gpus))
    shift, penalty = np.zeros(pairs.unknowns), PENALTY  # what the inequalities took off the unknowns
    dual = np.zeros(matrices.shape)  # scaled: Λ = -penalty · dual, and prices are τ / penalty
    for iteration in itertools.count(1):
        before = boxed
        gram = _nearest_gram(matrices - dual, basis, gpus, clock)
        if gram is None:
            return best[-1] * scale
        dual += OVER_RELAXATION * gram + (1 - OVER_RELAXATION) * matrices
        wish = (pairs.vector(dual) + gains / penalty) * inverse
        if wanted and iteration % FIND_EVERY == 0:
            triangles = find_triangles(pairs, np.clip(wish - shift, 0, 1), triangles, gpus == 2)
        free = wish - shift
        limits.ascend(free, inverse)
        triangles.ascend(free, inverse)
        shift, boxed = wish - free, np.clip(free, 0, 1)
        matrices = pairs.matrices(boxed)
        dual -= matrices
        if iteration % CHECK_EVERY:
            continue
        best.append(min(best[-1], dual_bound(-penalty * dual, (limits, triangles), penalty, gains, pairs, gpus, basis)))
        total = counts.sum() / scale
        if best[-1] - gains @ boxed < CONVERGED * total and best[-21:][0] - best[-1] < STALLED * total:
            return best[-1] * scale
        primal = np.linalg.norm(gram - matrices)
        moved = penalty * math.sqrt(pairs.entries @ (boxed - before) ** 2)
        factor = 1.5 if primal > IMBALANCE * moved else 1 / 1.5 if moved > IMBALANCE * primal else 1.0
        penalty *= factor
        for scaled in (dual, shift, limits.price, triangles.price):
            scaled /= factor
    raise AssertionError


def sums_to_zero(experts: int) -> np.ndarray:
    """V, float64 [2E, 2E-2]."""
    return block_diag(helmert(experts).T, helmert(experts).T)


def _nearest_gram(point: np.ndarray, basis: np.ndarray, gpus: int, clock: Clock) -> np.ndarray | None:
    """Projection onto a convex set around (1): eigenvalues between 0 and 2k. Their sum follows from (2). None when
    `clock` said 0 before all were projected."""
    size, gram = point.shape[1] // 2 // gpus, np.empty(point.shape)
    for edge, own in enumerate(point):
        if clock() <= 0:
            return None
        inner = basis.T @ (own - 1.0 / gpus) @ basis
        values, vectors = np.linalg.eigh((inner + inner.T) / 2)
        vectors = basis @ vectors
        gram[edge] = 1.0 / gpus + (vectors * np.clip(values, 0, 2 * size)) @ vectors.T
    return gram


def dual_bound(
    multiplier: np.ndarray,
    rows: tuple[Rows, ...],
    penalty: float,
    gains: np.ndarray,
    pairs: Pairs,
    gpus: int,
    basis: np.ndarray,
) -> float:
    """Upper bound on gains · y from any symmetric `multiplier` Λ [edges, 2E, 2E] and τ = `penalty` · price of `rows`:
    see the top of the file. `gains`: float64 [unknowns]; `basis`: V.

    Rounded up: sums of n terms are off by at most n ε Σ |terms|, eigenvalues of n x n matrices, projected by V, by
    16 n ε times the Frobenius norm (Higham 2002, section 3; LAPACK Users' Guide, section 4.7).
    """
    both = 2 * pairs.experts
    inner = basis.T @ multiplier @ basis
    values = np.linalg.eigvalsh((inner + inner.transpose(0, 2, 1)) / 2)[:, 1 - gpus :]
    paid = penalty * sum(each.paid for each in rows)
    taken = penalty * sum(each.taken(pairs.unknowns) for each in rows)
    agreed = pairs.vector(multiplier)
    positive = np.maximum(gains - taken - agreed, 0).sum()
    diagonal = -np.trace(multiplier, axis1=1, axis2=2).sum()
    bound = paid + multiplier.sum() / gpus + both / gpus * values.sum() + positive + diagonal
    terms = multiplier.size + pairs.unknowns + sum(len(each.value) for each in rows)
    size = np.abs(multiplier).sum() + np.abs(values).sum() * both + np.abs(gains).sum()
    size += penalty * sum(each.size for each in rows)
    spectral = both * 16 * both * np.linalg.norm(multiplier, axis=(1, 2)).sum()
    return float(bound + EPSILON * (terms * size + spectral))

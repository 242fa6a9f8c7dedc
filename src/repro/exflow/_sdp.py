"""A semidefinite bound on how many tokens any balanced placement keeps on their GPU: two layers at a time, by ADMM.

Let X_l [E, G] be the one-hot placement of layer l, each GPU holding k = E/G experts. Of two neighbouring layers take the Gram
matrix of their 2E experts, 1 where two experts share a GPU and 0 elsewhere:

    Z_l = [X_l; X_l+1] [X_l; X_l+1]ᵀ = [[A_l, B_l], [B_lᵀ, A_l+1]],         tokens kept = Σ_l <counts_l, B_l>

What is true of every placement, and is all that the relaxation asks for:
  (1) each row of A and B sums to k, and every GPU holds k experts of either layer. So Z_l = J/G + V R_l Vᵀ with J all ones, V
      [2E, 2E-2] an orthonormal basis of the vectors that sum to zero over either layer, and R_l = 2k times a projector of rank
      G-1 (its GPUs' indicator vectors, less their mean, are orthogonal and have norm² 2k)
  (2) A and B are between 0 and 1, A's diagonal is 1, and the A_l of Z_l-1 and of Z_l are the same matrix
Neighbours only share an A, so the layers' chain needs no larger matrix than 2E (a chordal relaxation).

ADMM alternates between (1) and (2) and moves multipliers Λ_l [2E, 2E] of "both agree". The bound does not trust that it converged.
For any symmetric Λ, by weak duality,

    tokens kept  ≤  Σ_l max over (1) of <Λ_l, Z>  +  max over (2) of Σ_l (<counts_l, B_l> - <Λ_l, Z_l>)

and both maxima are known in closed form: <Λ_l, J>/G + 2k times the sum of the G-1 largest eigenvalues of VᵀΛ_lV (Ky Fan), and a sum of
positive parts, as the entries of (2) are independent. Early multipliers give a weak bound, never a wrong one (up to
rounding, about 1e-12 of the tokens).
"""

import math
import time

import numpy as np
from scipy.linalg import block_diag, helmert

CHECK_EVERY = 25  # iterations between two bounds
TOLERANCE = 1e-6  # residuals, per entry, at which the iteration stops
OVER_RELAXATION = 1.6  # 1.5 to 1.8 is usual for ADMM
PENALTY = 0.3  # at first, for counts scaled to a maximum of 1; it follows the residuals


def kept_bound(counts: np.ndarray, gpus: int, time_limit_s: float) -> float:
    """Upper bound on the tokens of `counts` [layers-1, E, E] that stay on their GPU, E/gpus experts on each; 1 < gpus < E.

    The best bound met before `time_limit_s` is over or the iteration converged; at least one iteration is made.
    """
    deadline = time.perf_counter() + time_limit_s
    edges, experts = counts.shape[:2]
    scale = counts.max()
    weights = counts / scale
    basis = sums_to_zero(experts)
    shape = (edges, 2 * experts, 2 * experts)
    boxed = np.full(shape, 1.0 / gpus)
    boxed[:, np.arange(2 * experts), np.arange(2 * experts)] = 1.0
    dual = np.zeros(shape)  # scaled: Λ = -penalty · dual
    penalty, best, iteration = PENALTY, math.inf, 0
    while True:
        before = boxed
        gram = _nearest_gram(boxed - dual, basis, gpus)
        mixed = OVER_RELAXATION * gram + (1 - OVER_RELAXATION) * boxed
        boxed = _nearest_boxed(mixed + dual, weights / (2 * penalty))
        dual += mixed - boxed
        iteration += 1
        late = time.perf_counter() > deadline
        if iteration % CHECK_EVERY and not late:
            continue
        best = min(best, _dual_bound(-penalty * dual, weights, basis, gpus))
        primal, moved = np.linalg.norm(gram - boxed), penalty * np.linalg.norm(boxed - before)
        if late or max(primal, moved) < TOLERANCE * math.sqrt(boxed.size):
            return best * scale
        factor = 1.5 if primal > 5 * moved else 1 / 1.5 if moved > 5 * primal else 1.0
        penalty, dual = penalty * factor, dual / factor


def sums_to_zero(experts: int) -> np.ndarray:
    """V of the file's header, float64 [2E, 2E-2]."""
    return block_diag(helmert(experts).T, helmert(experts).T)


def _nearest_gram(point: np.ndarray, basis: np.ndarray, gpus: int) -> np.ndarray:
    """Projection onto the convex hull of (1): eigenvalues between 0 and 2k. (Their sum follows from A's diagonal in (2).)"""
    size = point.shape[1] // 2 // gpus
    inner = basis.T @ (point - 1.0 / gpus) @ basis
    values, vectors = np.linalg.eigh((inner + inner.transpose(0, 2, 1)) / 2)
    vectors = basis @ vectors
    return 1.0 / gpus + (vectors * np.clip(values, 0, 2 * size)[:, None]) @ vectors.transpose(0, 2, 1)


def _nearest_boxed(point: np.ndarray, pull: np.ndarray) -> np.ndarray:
    """Minimiser over (2) of ½·distance² to `point` less what is kept; `pull` [edges, E, E]: counts over twice the penalty."""
    edges, experts = pull.shape[:2]
    within, between = _split(point)
    between = np.clip(between / 2 + pull, 0, 1)
    copies = np.full(edges + 1, 2.0)  # of A_l, in the matrices of the edges before and after layer l
    copies[[0, -1]] = 1.0
    within = np.clip(within / copies[:, None, None], 0, 1)
    within[:, np.arange(experts), np.arange(experts)] = 1.0
    return np.block([[within[:-1], between], [between.transpose(0, 2, 1), within[1:]]])


def _split(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sum of the copies of every A [layers, E, E], B plus its transposed copy [edges, E, E]) of matrices [edges, 2E, 2E]."""
    edges, experts = len(matrices), matrices.shape[1] // 2
    within = np.zeros((edges + 1, experts, experts))
    within[:-1] += matrices[:, :experts, :experts]
    within[1:] += matrices[:, experts:, experts:]
    within = (within + within.transpose(0, 2, 1)) / 2
    return within, matrices[:, :experts, experts:] + matrices[:, experts:, :experts].transpose(0, 2, 1)


def _dual_bound(multiplier: np.ndarray, weights: np.ndarray, basis: np.ndarray, gpus: int) -> float:
    """Upper bound on Σ <weights, B> from any symmetric `multiplier` Λ [edges, 2E, 2E]: the two maxima of the file's header."""
    experts = weights.shape[1]
    inner = basis.T @ multiplier @ basis
    values = np.linalg.eigvalsh((inner + inner.transpose(0, 2, 1)) / 2)
    gram = multiplier.sum() / gpus + 2 * (experts // gpus) * values[:, 1 - gpus :].sum()
    within, between = _split(multiplier)
    diagonal = np.trace(within, axis1=1, axis2=2).sum()
    within[:, np.arange(experts), np.arange(experts)] = 0.0
    boxed = np.maximum(weights - between, 0).sum() + np.maximum(-within, 0).sum() - diagonal
    return float(gram + boxed)

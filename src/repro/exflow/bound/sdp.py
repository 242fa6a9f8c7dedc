"""A semidefinite bound on how many tokens any balanced placement keeps on their GPU: two layers at a time, by ADMM.

Let X_l [E, G] be the one-hot placement of layer l, each GPU holding k = E/G experts. Of two neighbouring layers take
the Gram matrix of their 2E experts, 1 where two experts share a GPU and 0 elsewhere:

    Z_l = [X_l; X_l+1] [X_l; X_l+1]ᵀ = [[A_l, B_l], [B_lᵀ, A_l+1]]
    tokens kept = Σ_l <counts_l, B_l> = Σ_l <W_l, Z_l>

with half of counts_l in either corner of W_l. What is true of every placement, and is all that the relaxation asks for:
  (1) each row of A and B sums to k, and every GPU holds k experts of either layer. So Z_l = J/G + V R_l Vᵀ with J all
      ones, V [2E, 2E-2] an orthonormal basis of the vectors that sum to zero over either layer, and R_l = 2k times a
      projector of rank G-1 (its GPUs' indicator vectors, less their mean, span G-1 dimensions in which Z_l has
      eigenvalue 2k)
  (2) A and B are between 0 and 1, A's diagonal is 1, and the A_l of Z_l-1 and of Z_l are the same matrix
  (3) an expert that shares its GPU with two others brings these together: Z_ij + Z_ik - Z_jk <= 1 (triangle
      inequalities)
Neighbours only share an A, so the layers' chain needs no larger matrix than 2E (a chordal relaxation).

ADMM alternates between (1) and (2) and moves multipliers Λ_l [2E, 2E] of "both agree"; now and then multipliers τ >= 0
of (3) go up where it is violated and down where it is not. The bound does not trust that any of this converged. Every
placement has Σ τ·(1 - Z_ij - Z_ik + Z_jk) >= 0; added to what is kept it gives Σ τ + Σ_l <C_l, Z_l>, C_l being W_l less
what τ takes. Hence for any τ >= 0 and any symmetric Λ (weak duality)

    tokens kept  <=  Σ τ  +  Σ_l max over (1) of <Λ_l, Z>  +  max over (2) of Σ_l <C_l - Λ_l, Z_l>

Both maxima have closed forms: <Λ_l, J>/G + 2k times the sum of the G-1 largest eigenvalues of VᵀΛ_lV (Ky Fan), and a
sum of positive parts, as the entries of (2) are independent. Early multipliers give a weak bound, never a wrong one (up
to rounding, about 1e-12 of the tokens).
"""

import math
import time

import numpy as np
from scipy.linalg import block_diag, helmert

CHECK_EVERY = 25  # iterations between two bounds
STALLED = 1e-5  # of all tokens: what 20 of these checks must gain, or the iteration stops
OVER_RELAXATION = 1.6  # 1.5 to 1.8 is usual for ADMM
PENALTY = 0.3  # at first, for counts scaled to a maximum of 1; it follows the residuals
TRIANGLES_FROM, TRIANGLES_EVERY = 50, 10  # iterations at which multipliers of the triangle inequalities are moved
TRIANGLE_STEP, TRIANGLE_DECAY = 0.2, 10  # how far, in penalties: STEP / (1 + moves / DECAY)
MOST_TRIANGLES = 10**8  # numbers; without them the bound is weaker and larger models fit


def kept_bound(counts: np.ndarray, gpus: int, time_limit_s: float) -> float:
    """Upper bound on the tokens of `counts` [layers-1, E, E] that stay on their GPU of E/gpus experts; 1 < gpus < E.

    The best bound met before `time_limit_s` is over or bounds stall; at least one iteration is made. Takes 4 bytes for
    each of the (layers-1)·(2E)³ triangle inequalities, and leaves these out where they are more than MOST_TRIANGLES.
    """
    deadline = time.perf_counter() + time_limit_s
    experts = counts.shape[1]
    scale = counts.max()
    gains = _symmetric(counts / scale)
    basis = sums_to_zero(experts)
    triangles = len(counts) * (2 * experts) ** 3 <= MOST_TRIANGLES
    prices = np.zeros((len(counts), *[2 * experts] * 3) if triangles else 0, np.float32)  # τ of the file's header
    left, paid = gains, 0.0  # C and Σ τ of the file's header
    boxed = np.full(gains.shape, 1.0 / gpus)
    boxed[:, np.arange(2 * experts), np.arange(2 * experts)] = 1.0
    dual = np.zeros(gains.shape)  # scaled: Λ = -penalty · dual
    penalty, iteration, found = PENALTY, 0, [math.inf]
    while True:
        before = boxed
        gram = _nearest_gram(boxed - dual, basis, gpus)
        mixed = OVER_RELAXATION * gram + (1 - OVER_RELAXATION) * boxed
        boxed = _nearest_boxed(mixed + dual + left / penalty)
        dual += mixed - boxed
        iteration += 1
        if triangles and iteration >= TRIANGLES_FROM and iteration % TRIANGLES_EVERY == 0:
            moves = (iteration - TRIANGLES_FROM) // TRIANGLES_EVERY
            taken, paid = move_prices(prices, boxed, penalty * TRIANGLE_STEP / (1 + moves / TRIANGLE_DECAY))
            left = gains - taken
        late = time.perf_counter() > deadline
        if iteration % CHECK_EVERY and not late:
            continue
        found.append(min(found[-1], paid + dual_bound(-penalty * dual, left, basis, gpus)))
        if late or (len(found) > 21 and found[-21] - found[-1] < STALLED * counts.sum() / scale):
            return found[-1] * scale
        primal, moved = np.linalg.norm(gram - boxed), penalty * np.linalg.norm(boxed - before)
        factor = 1.5 if primal > 5 * moved else 1 / 1.5 if moved > 5 * primal else 1.0
        penalty, dual = penalty * factor, dual / factor


def move_prices(prices: np.ndarray, matrices: np.ndarray, step: float) -> tuple[np.ndarray, float]:
    """Move τ of all triangle inequalities along what `matrices` [edges, 2E, 2E] violate, in place.

    `prices`: float32 [edges, 2E, 2E, 2E]; (i, j, k) and (i, k, j) are one. Returns what they take from W, float64
    [edges, 2E, 2E], and Σ τ; both are exact for this τ.
    """
    all_taken, paid = np.zeros(matrices.shape), 0.0
    for edge, (z, own) in enumerate(zip(matrices.astype(np.float32), prices, strict=True)):
        violated = z[:, :, None] + z[:, None, :]
        violated -= z[None] + np.float32(1)
        violated *= np.float32(step)
        own += violated
        np.maximum(own, 0, out=own)
        taken = 2 * own.sum(axis=2, dtype=float) - own.sum(axis=0, dtype=float)
        all_taken[edge] = (taken + taken.T) / 2
        paid += own.sum(dtype=float)
    return all_taken, float(paid)


def sums_to_zero(experts: int) -> np.ndarray:
    """V, float64 [2E, 2E-2]."""
    return block_diag(helmert(experts).T, helmert(experts).T)


def _symmetric(corner: np.ndarray) -> np.ndarray:
    """[[0, corner], [cornerᵀ, 0]] / 2 for every edge."""
    zero = np.zeros_like(corner)
    return np.block([[zero, corner], [corner.transpose(0, 2, 1), zero]]) / 2


def _nearest_gram(point: np.ndarray, basis: np.ndarray, gpus: int) -> np.ndarray:
    """Projection onto a convex set around (1): eigenvalues between 0 and 2k. Their sum follows from (2)."""
    size = point.shape[1] // 2 // gpus
    inner = basis.T @ (point - 1.0 / gpus) @ basis
    values, vectors = np.linalg.eigh((inner + inner.transpose(0, 2, 1)) / 2)
    vectors = basis @ vectors
    return 1.0 / gpus + (vectors * np.clip(values, 0, 2 * size)[:, None]) @ vectors.transpose(0, 2, 1)


def _nearest_boxed(point: np.ndarray) -> np.ndarray:
    """Projection of matrices [edges, 2E, 2E] onto (2)."""
    edges, experts = len(point), point.shape[1] // 2
    within, between = _split(point)
    between = np.clip(between / 2, 0, 1)
    copies = np.full(edges + 1, 2.0)  # of A_l, in the matrices of the edges before and after layer l
    copies[[0, -1]] = 1.0
    within = np.clip(within / copies[:, None, None], 0, 1)
    within[:, np.arange(experts), np.arange(experts)] = 1.0
    return np.block([[within[:-1], between], [between.transpose(0, 2, 1), within[1:]]])


def _split(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sum of the copies of every A [layers, E, E], B plus its transpose [edges, E, E]) of matrices [edges, 2E, 2E]."""
    edges, experts = len(matrices), matrices.shape[1] // 2
    within = np.zeros((edges + 1, experts, experts))
    within[:-1] += matrices[:, :experts, :experts]
    within[1:] += matrices[:, experts:, experts:]
    within = (within + within.transpose(0, 2, 1)) / 2
    return within, matrices[:, :experts, experts:] + matrices[:, experts:, :experts].transpose(0, 2, 1)


def dual_bound(multiplier: np.ndarray, gains: np.ndarray, basis: np.ndarray, gpus: int) -> float:
    """Upper bound on Σ <gains, Z> from any symmetric `multiplier` Λ, both [edges, 2E, 2E]: see the top of the file."""
    experts = gains.shape[1] // 2
    inner = basis.T @ multiplier @ basis
    values = np.linalg.eigvalsh((inner + inner.transpose(0, 2, 1)) / 2)
    gram = multiplier.sum() / gpus + 2 * (experts // gpus) * values[:, 1 - gpus :].sum()
    within, between = _split(gains - multiplier)
    diagonal = np.trace(within, axis1=1, axis2=2).sum()
    within[:, np.arange(experts), np.arange(experts)] = 0.0
    return float(gram + np.maximum(between, 0).sum() + np.maximum(within, 0).sum() + diagonal)

"""What eigenvalues know of a placement: convex sets around the Gram matrices of two neighbouring layers.

`Even`: every GPU holds k = E/G experts of a layer, each expert once. Then Z = [X; X'] [X; X']ᵀ of the one-hot X [E, G]
is J/G + V R Vᵀ with J all ones, V [2E, 2E-2] an orthonormal basis of the vectors that sum to zero over either layer, and
R = 2k times a projector of rank G-1 (its GPUs' indicator vectors, less their mean, span G-1 dimensions in which Z has
eigenvalue 2k).

`Copied`: every GPU holds m experts of a layer, of which other GPUs may hold copies. With x_g [2E] the indicator of what
GPU g holds, W = Σ_g (x_g; 1) (x_g; 1)ᵀ is [[Z, r], [rᵀ, G]] with the numbers of copies r on Z's diagonal. As x_g has m
ones in either layer, W = N R Nᵀ with N [2E+1, 2E-1] an orthonormal basis of what is orthogonal to (1, 0; -m) and
(0, 1; -m), and R has no negative eigenvalue and the trace of W, G·(2m + 1).

Each has `nearest`, the projection of a matrix, and `most`, max <Λ, Z> over the set for symmetric matrices Λ [edges, n, n]
with a bound on its rounding: eigenvalues of n x n matrices, projected by an orthonormal basis, are off by at most 16 n ε
times the Frobenius norm (LAPACK Users' Guide, section 4.7).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import block_diag, helmert, null_space

EPSILON = float(np.finfo(float).eps)


def _inner(matrices: np.ndarray, basis: np.ndarray) -> np.ndarray:
    inner = basis.T @ matrices @ basis
    return (inner + inner.swapaxes(-1, -2)) / 2


def _rounding(multiplier: np.ndarray, trace: float) -> float:
    return 16 * multiplier.shape[1] * EPSILON * trace * float(np.linalg.norm(multiplier, axis=(1, 2)).sum())


@dataclass(frozen=True)
class Even:
    """Of `gpus` GPUs, between which `experts` experts of each layer are shared evenly."""

    experts: int
    gpus: int

    @property
    def halves(self) -> bool:
        """Of three experts two are always together."""
        return self.gpus == 2

    @cached_property
    def basis(self) -> np.ndarray:
        """V, float64 [2E, 2E-2]."""
        return block_diag(helmert(self.experts).T, helmert(self.experts).T)

    def nearest(self, point: np.ndarray) -> np.ndarray:
        """Of all J/G + V R Vᵀ with eigenvalues of R between 0 and 2k. Their sum follows from Z's diagonal."""
        values, vectors = np.linalg.eigh(_inner(point - 1.0 / self.gpus, self.basis))
        vectors = self.basis @ vectors
        return 1.0 / self.gpus + (vectors * np.clip(values, 0, 2 * self.experts // self.gpus)) @ vectors.T

    def most(self, multiplier: np.ndarray) -> tuple[float, float]:
        """<Λ, J>/G and 2k times the sum of the G-1 largest eigenvalues of VᵀΛV (Ky Fan)."""
        values = np.linalg.eigvalsh(_inner(multiplier, self.basis))[:, 1 - self.gpus :]
        found = multiplier.sum() / self.gpus + 2 * self.experts // self.gpus * values.sum()
        added = EPSILON * multiplier.size * float(np.abs(multiplier).sum())
        return float(found), _rounding(multiplier, 2 * self.experts) + added


@dataclass(frozen=True)
class Copied:
    """Of `gpus` GPUs that hold `held` of the `experts` experts of each layer."""

    experts: int
    gpus: int
    held: int
    halves = False

    @cached_property
    def basis(self) -> np.ndarray:
        """N, float64 [2E+1, 2E-1]."""
        ones = block_diag(np.ones((1, self.experts)), np.ones((1, self.experts)))
        return null_space(np.hstack([ones, np.full((2, 1), -float(self.held))]))

    def nearest(self, point: np.ndarray) -> np.ndarray:
        """Of all N R Nᵀ without negative eigenvalues. Their sum follows from the diagonal of W."""
        values, vectors = np.linalg.eigh(_inner(point, self.basis))
        vectors = self.basis @ vectors
        return (vectors * np.maximum(values, 0)) @ vectors.T

    def most(self, multiplier: np.ndarray) -> tuple[float, float]:
        """The trace times the largest eigenvalue of NᵀΛN."""
        trace = self.gpus * (2.0 * self.held + 1)
        values = np.linalg.eigvalsh(_inner(multiplier, self.basis))[:, -1]
        return trace * float(values.sum()), _rounding(multiplier, trace)

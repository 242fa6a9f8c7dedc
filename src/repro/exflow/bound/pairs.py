"""The unknowns of the semidefinite bound: for which pairs of experts, of one layer or of two neighbours, what is asked.

They stand in one vector: for each layer its E experts with themselves, its E(E-1)/2 pairs, then its E² pairs with the
next layer. Or in matrices [edges, n, n], one for each pair of neighbouring layers, in which pairs of an inner layer stand
twice: n = 2E, or 2E+1 with a last row and column that repeat the diagonal. Their corner is the last unknown.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Pairs:
    """`edges`: pairs of neighbouring layers, of `experts` experts each; `bordered`: with that last row and column."""

    edges: int
    experts: int
    bordered: bool = False

    @property
    def stride(self) -> int:
        """Unknowns of a layer and its pairs with the next one."""
        return self._inside + self.experts**2

    @property
    def unknowns(self) -> int:
        """Their number."""
        return self.edges * self.stride + self._inside + self.bordered

    @property
    def _inside(self) -> int:
        return self.experts * (self.experts + 1) // 2

    def within(self, layer: int) -> np.ndarray:
        """int64 [E, E]: the unknowns of one layer."""
        experts, number = self.experts, np.zeros((self.experts, self.experts), np.int64)
        number[np.triu_indices(experts, 1)] = np.arange(experts, self._inside)
        return number + number.T + np.diag(np.arange(experts)) + layer * self.stride

    @cached_property
    def own(self) -> np.ndarray:
        """int64 [layers, E]: the unknowns of experts with themselves."""
        return np.arange(self.experts) + self.stride * np.arange(self.edges + 1)[:, None]

    @cached_property
    def between(self) -> np.ndarray:
        """int64 [edges, E, E]: the unknowns of pairs of neighbouring layers."""
        first = self._inside + np.arange(self.experts**2).reshape(self.experts, self.experts)
        return first + self.stride * np.arange(self.edges)[:, None, None]

    @cached_property
    def number(self) -> np.ndarray:
        """int64 [2E, 2E]: the unknowns of two experts of the first two layers, `stride` more for each later edge."""
        between = self.between[0]
        return np.block([[self.within(0), between], [between.T, self.within(1)]])

    @cached_property
    def _everywhere(self) -> np.ndarray:
        """int64 [edges, n, n]: the unknown of every entry."""
        number = self.number + self.stride * np.arange(self.edges)[:, None, None]
        if not self.bordered:
            return number
        number = np.pad(number, ((0, 0), (0, 1), (0, 1)), constant_values=self.unknowns - 1)
        diagonal = number[:, np.arange(2 * self.experts), np.arange(2 * self.experts)]
        number[:, -1, :-1] = number[:, :-1, -1] = diagonal
        return number

    @cached_property
    def entries(self) -> np.ndarray:
        """float64 [unknowns]: how many entries of the matrices are each unknown."""
        return self.vector(np.ones(self._everywhere.shape))

    def matrices(self, vector: np.ndarray) -> np.ndarray:
        """float64 [edges, n, n] of unknowns."""
        return vector[self._everywhere]

    def vector(self, matrices: np.ndarray) -> np.ndarray:
        """float64 [unknowns]: for each the sum over its entries."""
        return np.bincount(self._everywhere.ravel(), matrices.ravel(), self.unknowns)

"""The unknowns of the semidefinite bound: for which pairs of experts, of one layer or of two neighbours, what is asked.

They stand in one vector: for each layer its E(E-1)/2 pairs, then its E² pairs with the next layer. Or in matrices
[edges, 2E, 2E], one for each pair of neighbouring layers, in which pairs of an inner layer stand twice.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Pairs:
    """`edges`: pairs of neighbouring layers, of `experts` experts each."""

    edges: int
    experts: int

    @property
    def stride(self) -> int:
        """Unknowns of a layer and its pairs with the next one."""
        return self._inside + self.experts**2

    @property
    def unknowns(self) -> int:
        """Their number."""
        return self.edges * self.stride + self._inside

    @property
    def _inside(self) -> int:
        return self.experts * (self.experts - 1) // 2

    @cached_property
    def number(self) -> np.ndarray:
        """int64 [2E, 2E]: the unknown of two experts of the first two layers, `stride` more for each later edge; of an
        expert with itself, which is none, 0."""
        experts, number = self.experts, np.zeros((2 * self.experts, 2 * self.experts), np.int64)
        between = self._inside + np.arange(experts**2).reshape(experts, experts)
        number[:experts, experts:], number[experts:, :experts] = between, between.T
        number[:experts, :experts] = number[experts:, experts:] = self.within(0)
        number[experts:, experts:] += self.stride * (1 - np.eye(experts, dtype=np.int64))
        return number

    def within(self, layer: int) -> np.ndarray:
        """int64 [E, E]: the unknowns of one layer; 0 on the diagonal of layer 0, of no meaning there."""
        number = np.zeros((self.experts, self.experts), np.int64)
        number[np.triu_indices(self.experts, 1)] = np.arange(self._inside)
        return number + number.T + layer * self.stride

    @cached_property
    def entries(self) -> np.ndarray:
        """float64 [unknowns]: how many entries of the matrices are each unknown."""
        return self.vector(np.ones((self.edges, 2 * self.experts, 2 * self.experts)))

    def matrices(self, vector: np.ndarray) -> np.ndarray:
        """float64 [edges, 2E, 2E] of unknowns; 1 on the diagonals."""
        found = vector[self.number + self.stride * np.arange(self.edges)[:, None, None]]
        found[:, np.arange(2 * self.experts), np.arange(2 * self.experts)] = 1.0
        return found

    def vector(self, matrices: np.ndarray) -> np.ndarray:
        """float64 [unknowns]: for each the sum over its entries."""
        experts = self.experts
        both = matrices + matrices.transpose(0, 2, 1)
        found = np.zeros((self.edges + 1, self.stride))
        inside, (i, j) = self._inside, np.triu_indices(experts, 1)
        found[:-1, :inside] = both[:, i, j]
        found[1:, :inside] += both[:, experts + i, experts + j]
        found[:-1, inside:] = both[:, :experts, experts:].reshape(self.edges, -1)
        return found.ravel()[: self.unknowns]

    def gains(self, counts: np.ndarray) -> np.ndarray:
        """float64 [unknowns]: the tokens of `counts` [edges, E, E], which are kept where the unknown is 1."""
        found = np.zeros((self.edges + 1, self.stride))
        found[:-1, self._inside :] = counts.reshape(self.edges, -1)
        return found.ravel()[: self.unknowns]

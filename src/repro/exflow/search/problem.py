"""One placement problem as the search sees it: tokens between experts, costs between GPUs, room on each GPU.

Arrays, throughout the search:
  counts     float64 [layers-1, E, E]   tokens that go from expert a of layer l to expert b of layer l+1
  placement  int64   [layers, E]        GPU of every expert
  distance   float64 [G, G]             cost of one token that moves from one GPU to another; symmetric, zero diagonal
  weight     float64 [layers, E]        tokens that visit each expert (only with a load limit)
  cap        float64 [layers]           most tokens that a GPU may get in each layer (only with a load limit)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from repro.exflow.evaluate import total_cost

ROUNDING = 1e-9  # relative; must not forbid what just fits


@dataclass(frozen=True)
class Problem:
    """Place E/G experts of each layer on each of G GPUs; `cap` None: however many tokens they get."""

    counts: np.ndarray
    distance: np.ndarray
    cap: np.ndarray | None = None
    weight: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))

    @property
    def gpus(self) -> int:
        return len(self.distance)

    @property
    def layers(self) -> int:
        return len(self.counts) + 1

    @property
    def experts(self) -> int:
        return self.counts.shape[1]

    @cached_property
    def flat(self) -> bool:
        """All hops cost the same, so that labels of GPUs may be swapped freely."""
        apart = ~np.eye(self.gpus, dtype=bool)
        return bool((self.distance[apart] == self.distance[0, -1]).all())

    @cached_property
    def room(self) -> np.ndarray:
        """`cap` for the kernels: length 0 stands for no limit."""
        return np.empty(0) if self.cap is None else self.cap * (1 + ROUNDING)

    @cached_property
    def forward(self) -> np.ndarray:
        """Counts in single precision, what annealing works with."""
        return self.counts.astype(np.float32)

    @cached_property
    def backward(self) -> np.ndarray:
        """`forward` transposed: from experts of layer l+1 to those of layer l."""
        return np.ascontiguousarray(self.forward.transpose(0, 2, 1))

    @cached_property
    def scale(self) -> float:
        """A typical change of cost when two experts of a random placement swap GPUs: the unit of temperature."""
        spread = self.counts.var(axis=(1, 2)).mean()
        return float(np.sqrt(4 * self.experts / self.gpus * spread) * self.distance.max()) or 1.0

    def cost(self, placement: np.ndarray) -> float:
        """Tokens times the cost of their hops."""
        return total_cost(self.counts, placement, self.distance)

    def table(self, placement: np.ndarray) -> np.ndarray:
        """float64 [layers, G, E]: cost of having expert e on GPU g while both neighbouring layers stay."""
        on = np.eye(self.gpus)[placement].transpose(0, 2, 1)  # [layers, G, E]
        tokens = np.zeros(on.shape)  # that each expert exchanges with all experts next door on each GPU
        tokens[:-1] += on[1:] @ self.counts.transpose(0, 2, 1)
        tokens[1:] += on[:-1] @ self.counts
        return self.distance @ tokens

    def row_fits(self, layer: int, row: np.ndarray) -> bool:
        """Whether the GPUs `row`, int [E], keep the load limit of the layer."""
        return self.cap is None or bool(np.bincount(row, self.weight[layer], self.gpus).max() <= self.room[layer])

    def fits(self, placement: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        """bool [layers]: whether every GPU keeps the load limit."""
        return np.array([self.row_fits(layer, row) for layer, row in enumerate(placement)])

"""Linear inequalities that every placement keeps, with a multiplier each (numba, cached on disk).

The unknowns are those of `pairs.py`: y_ij is 1 where experts i and j share a GPU and 0 where they do not. A row says
Σ value · y[index] <= limit:

  triangles  an expert that shares its GPU with two others brings these together: y_ij + y_ik - y_jk <= 1; on two GPUs
             also, of three experts two share one: y_ij + y_ik + y_jk >= 1
  loads      the tokens of the GPU on which expert i is, are at most the limit: Σ_j tokens_j · y_ij <= limit - tokens_i

There are (layers-1)·(2E)³/2 triangles. Only those are held that have a multiplier or that were violated when last looked
for.
"""

from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from repro.exflow.bound.pairs import Pairs

VIOLATED = 1e-3  # by how much, to be held
MOST_HELD = 10**6  # triangles: 50 MB; those beyond it are left out, in equal shares of the pairs of layers


@dataclass(frozen=True)
class Rows:
    """n rows: int64 `index` and float64 `value` of row r from start[r] to start[r+1], `limit` and `price` (multiplier
    >= 0) float64 [n]. `name`: int64 [n], of triangles, which; ascending."""

    name: np.ndarray
    start: np.ndarray
    index: np.ndarray
    value: np.ndarray
    limit: np.ndarray
    price: np.ndarray

    def ascend(self, free: np.ndarray, inverse: np.ndarray) -> None:
        """Raise every price whose row is violated, and lower the others to no less than 0, one by one, each as far as
        keeps the row: dual coordinate ascent (Hildreth) towards the point of the rows nearest to `free`. That moves
        along: `free` -= `inverse` · (change of price) · value, where both are float64 [unknowns]; unknowns count as
        clipped to 0 and 1."""
        _ascend(self.start, self.index, self.value, self.limit, self.price, free, inverse)

    def taken(self, unknowns: int) -> np.ndarray:
        """float64 [unknowns]: Σ price · value."""
        out = np.zeros(unknowns)
        _take(self.start, self.index, self.value, self.price, out)
        return out

    @property
    def paid(self) -> float:
        """Σ price · limit."""
        return float(self.price @ self.limit)

    @property
    def size(self) -> float:
        """Σ of the terms of `taken` and of `paid` without their signs."""
        lengths = np.add.reduceat(np.abs(self.value), self.start[:-1]) if len(self.price) else self.price
        return float(self.price @ (lengths + np.abs(self.limit)))


def no_rows() -> Rows:
    """Rows of length 0."""
    none, number = np.empty(0), np.empty(0, np.int64)
    return Rows(number, np.zeros(1, np.int64), number, none, none, none)


def load_rows(pairs: Pairs, weight: np.ndarray, cap: np.ndarray) -> Rows:
    """The rows of a limit `cap` float64 [layers] on the tokens of every GPU, for tokens `weight` [layers, E]."""
    experts = pairs.experts
    index, value, limit = [], [], []
    for layer, (tokens, most) in enumerate(zip(weight, cap, strict=True)):
        for expert in range(experts if most > 0 else 0):
            others = np.flatnonzero(np.arange(experts) != expert)
            index.append(pairs.within(layer)[expert, others])
            value.append(tokens[others] / most)
            limit.append(1.0 - tokens[expert] / most)
    rows = len(limit)
    start = np.arange(rows + 1) * (experts - 1)
    empty = no_rows()
    found = (np.concatenate(part) if rows else none for part, none in ((index, empty.index), (value, empty.value)))
    return Rows(np.arange(rows), start, *found, np.array(limit), np.zeros(rows))


def find_triangles(pairs: Pairs, unknown: np.ndarray, known: Rows, two_gpus: bool) -> Rows:
    """The triangles that `unknown`, float64 [unknowns], violates, and those of `known` that have a price."""
    known = _with(known, known.price > 0)
    room = MOST_HELD // pairs.edges
    parts = []
    for edge in range(pairs.edges):
        last = edge == pairs.edges - 1
        parts.append(
            _find(unknown, pairs.number, edge * pairs.stride, edge, last, two_gpus, known.name, known.price, room)
        )
    name, index, value, limit, price = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Rows(name, 3 * np.arange(len(name) + 1), index.ravel(), value.ravel(), limit, price)


def _with(rows: Rows, chosen: np.ndarray) -> Rows:
    """Names and prices of the rows `chosen`, bool [n]."""
    return replace(rows, name=rows.name[chosen], price=rows.price[chosen])


@njit(cache=True)
def _find(unknown, number, offset, edge, last, two_gpus, known, known_price, room):  # type: ignore[no-untyped-def]
    """Names, indices [n, 3], values [n, 3], limits and prices of the triangles of one pair of layers; those inside the
    second layer belong to the next pair."""
    both = len(number)
    experts, kinds = both // 2, 4 if two_gpus else 3
    name, price, limit = np.empty(room, np.int64), np.empty(room), np.empty(room)
    index, value = np.empty((room, 3), np.int64), np.empty((room, 3))
    n, triangle = 0, edge * kinds * (both * (both - 1) * (both - 2) // 6)
    seen = np.searchsorted(known, triangle)
    sides = np.empty(3, np.int64)
    for i in range(both):
        if i >= experts and not last:
            break
        for j in range(i + 1, both):
            sides[0] = offset + number[i, j]
            for k in range(j + 1, both):
                sides[1], sides[2] = offset + number[i, k], offset + number[j, k]
                total = unknown[sides[0]] + unknown[sides[1]] + unknown[sides[2]]
                for kind in range(kinds):
                    violated = total - 2 * unknown[sides[kind]] - 1 if kind < 3 else 1 - total
                    own = 0.0
                    if seen < len(known) and known[seen] == triangle:
                        own = known_price[seen]
                        seen += 1
                    if (own > 0 or violated > VIOLATED) and n < room:
                        name[n], price[n], limit[n] = triangle, own, 1.0 if kind < 3 else -1.0
                        for side in range(3):
                            index[n, side] = sides[side]
                            value[n, side] = 1.0 if kind < 3 and side != kind else -1.0
                        n += 1
                    triangle += 1
    return name[:n].copy(), index[:n].copy(), value[:n].copy(), limit[:n].copy(), price[:n].copy()


@njit(cache=True)
def _ascend(start, index, value, limit, price, free, inverse):  # type: ignore[no-untyped-def]
    for row in range(len(limit)):
        violated, length = -limit[row], 0.0
        for t in range(start[row], start[row + 1]):
            at = index[t]
            violated += value[t] * min(max(free[at], 0.0), 1.0)
            length += value[t] * value[t] * inverse[at]
        change = max(violated / length, -price[row]) if length > 0 else 0.0
        if change != 0.0:
            price[row] += change
            for t in range(start[row], start[row + 1]):
                free[index[t]] -= change * value[t] * inverse[index[t]]


@njit(cache=True)
def _take(start, index, value, price, out):  # type: ignore[no-untyped-def]
    for row in range(len(price)):
        for t in range(start[row], start[row + 1]):
            out[index[t]] += price[row] * value[t]

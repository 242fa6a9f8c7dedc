"""Linear inequalities that every placement keeps, with a multiplier each (numba, cached on disk).

The unknowns are those of `pairs.py`: y_ij is on how many GPUs experts i and j are together, y_ii on how many i is. A row
says Σ value · y[index] <= limit:

  pairs      where i and j are together, i is: y_ij <= y_ii
  triangles  where i is together with j and with k, these are together, but for GPUs that hold i: y_ij + y_ik - y_jk <=
             y_ii; with one copy of each expert on two GPUs also, of three experts two are: y_ij + y_ik + y_jk >= 1
  loads      the tokens of the GPU on which expert i is, are at most the limit: Σ_j tokens_j · y_ij <= limit - tokens_i

There are (layers-1)·(2E)³/2 triangles. Only those are held that have a multiplier or that were violated when last looked
for.
"""

from dataclasses import dataclass, replace

import numpy as np

from repro.compiled import compiled
from repro.exflow.bound.pairs import Pairs

VIOLATED = 1e-3  # by how much, to be held
MOST_HELD = 10**6  # triangles: 100 MB; those beyond it are left out, in equal shares of the pairs of layers

Box = tuple[np.ndarray, np.ndarray, np.ndarray]  # bonus, lower, upper: float64 [unknowns]


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

    def ascend(self, free: np.ndarray, inverse: np.ndarray, box: Box) -> None:
        """Raise every price whose row is violated at `boxed(free, box)`, and lower the others to no less than 0, one by
        one, each as far as keeps the row or less: dual coordinate ascent (Hildreth). `free` moves along, by `inverse` ·
        (change of price) · value; both are float64 [unknowns]."""
        _ascend(self.start, self.index, self.value, self.limit, self.price, free, inverse, box)

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
    experts, first = pairs.experts, pairs.within(0)
    index, value, limit = [], [], []
    for layer, (tokens, most) in enumerate(zip(weight, cap, strict=True)):
        for expert in range(experts if most > 0 else 0):
            others = np.flatnonzero(np.arange(experts) != expert)
            index.append(first[expert, others] + layer * pairs.stride)
            value.append(tokens[others] / most)
            limit.append(1.0 - tokens[expert] / most)
    if not limit:
        return no_rows()
    rows = np.arange(len(limit) + 1)
    start = rows * (experts - 1)
    return Rows(rows[:-1], start, np.concatenate(index), np.concatenate(value), np.array(limit), np.zeros(len(limit)))


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
    return Rows(name, 4 * np.arange(len(name) + 1), index.ravel(), value.ravel(), limit, price)


def _with(rows: Rows, chosen: np.ndarray) -> Rows:
    """Names and prices of the rows `chosen`, bool [n]."""
    return replace(rows, name=rows.name[chosen], price=rows.price[chosen])


@compiled()
def _find(
    unknown: np.ndarray,
    number: np.ndarray,
    offset: int,
    edge: int,
    last: bool,
    two_gpus: bool,
    known: np.ndarray,
    known_price: np.ndarray,
    room: int,
) -> tuple[np.ndarray, ...]:
    """Names, indices [n, 4], values [n, 4], limits and prices of the rows of one pair of layers; those inside the
    second layer belong to the next pair. An index may stand there with value 0."""
    both = len(number)
    experts, kinds = both // 2, 4 if two_gpus else 3
    name, price, limit = np.empty(room, np.int64), np.empty(room), np.empty(room)
    index, value = np.empty((room, 4), np.int64), np.empty((room, 4))
    n, row = 0, edge * both**3
    seen = np.searchsorted(known, row)
    for i in range(both):
        if i >= experts and not last:
            break
        for j in range(i + 1, both):
            pair = offset + number[i, j]
            for k in range(j, both):
                # The sides ij, ik, jk of a triangle with the third corner opposite to each; k = j stands for the pair.
                sides = (pair, offset + number[i, k], offset + number[j, k])
                corners = (offset + number[k, k], offset + number[j, j], offset + number[i, i])
                total = unknown[sides[0]] + unknown[sides[1]] + unknown[sides[2]]
                for kind in range(kinds if k > j else 2):
                    if k == j:
                        violated = unknown[pair] - unknown[corners[1 + kind]]
                    elif kind < 3:
                        violated = total - 2 * unknown[sides[kind]] - unknown[corners[kind]]
                    else:
                        violated = 1 - total
                    price_known = 0.0
                    if seen < len(known) and known[seen] == row:
                        price_known = known_price[seen]
                        seen += 1
                    if (price_known > 0 or violated > VIOLATED) and n < room:
                        name[n], price[n], limit[n] = row, price_known, 0.0 if kind < 3 else -1.0
                        for side in range(3):
                            index[n, side] = sides[side]
                            value[n, side] = 1.0 if kind < 3 and side != kind else -1.0
                        index[n, 3], value[n, 3] = corners[min(kind, 2)], -1.0 if kind < 3 else 0.0
                        if k == j:
                            value[n] = 0.0
                            index[n, 0], value[n, 0] = pair, 1.0
                            index[n, 3], value[n, 3] = corners[1 + kind], -1.0
                        n += 1
                    row += 1
    return name[:n].copy(), index[:n].copy(), value[:n].copy(), limit[:n].copy(), price[:n].copy()


@compiled()
def _boxed(free: float, bonus: float, lower: float, upper: float) -> float:
    raised = free + bonus
    if raised > 1.0:
        raised = max(free, 1.0)
    return min(max(raised, lower), upper)


@compiled()
def boxed(free: np.ndarray, box: Box) -> np.ndarray:
    """Of every unknown the y between its `lower` and `upper` that maximises bonus · min(y, 1) - (y - free)² / 2."""
    bonus, lower, upper = box
    found = np.empty(len(free))
    for each in range(len(free)):
        found[each] = _boxed(free[each], bonus[each], lower[each], upper[each])
    return found


@compiled()
def _ascend(
    start: np.ndarray,
    index: np.ndarray,
    value: np.ndarray,
    limit: np.ndarray,
    price: np.ndarray,
    free: np.ndarray,
    inverse: np.ndarray,
    box: Box,
) -> None:
    bonus, lower, upper = box
    for row in range(len(limit)):
        violated, length = -limit[row], 0.0
        for t in range(start[row], start[row + 1]):
            at = index[t]
            if value[t] != 0.0:
                violated += value[t] * _boxed(free[at], bonus[at], lower[at], upper[at])
                length += value[t] * value[t] * inverse[at]
        change = max(violated / length, -price[row]) if length > 0 else 0.0
        if change != 0.0:
            price[row] += change
            for t in range(start[row], start[row + 1]):
                free[index[t]] -= change * value[t] * inverse[index[t]]


@compiled()
def _take(start: np.ndarray, index: np.ndarray, value: np.ndarray, price: np.ndarray, out: np.ndarray) -> None:
    for row in range(len(price)):
        for t in range(start[row], start[row + 1]):
            out[index[t]] += price[row] * value[t]

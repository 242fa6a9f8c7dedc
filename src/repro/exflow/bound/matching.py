"""The heaviest regular bipartite graph between two layers, an upper bound on the tokens kept (numba, cached on disk)."""

import numpy as np

from repro.compiled import compiled
from repro.exflow.search.portfolio import Clock, forever

WORK = 10**7  # steps of a b-matching between two looks at the clock: some 10 ms


def b_matching(pairs: np.ndarray, degree: int) -> float:
    """Weight of the heaviest `degree`-regular bipartite graph on weights `pairs` [E, E], each pair taken at most once:
    the value of a solution of the dual linear program, an upper bound even where rounding left it beside the
    optimum."""
    return b_matching_within(pairs, degree, forever)[0]


def b_matching_within(pairs: np.ndarray, degree: int, clock: Clock) -> tuple[float, bool]:
    """(`b_matching`, True), or (an upper bound on it, False) once `clock`, the seconds that are left, says 0.

    Of all prices of rows and columns, float64 [n] each, `row` and `column` become those that make `dual_value` least.
    """
    weight = np.ascontiguousarray(pairs, np.float64)
    n = len(weight)
    row, column = weight.max(axis=1), np.zeros(n)
    free, chosen = np.full(n, degree), np.zeros((n, n), np.bool_)  # columns still to be given; pairs of the graph
    done = 0
    while done < n * degree and clock() > 0.0:
        done = _augment(weight, degree, row, column, free, chosen, done)
    if done < n * degree:  # any prices bound; of the rows' these are the best for the columns'
        row = np.partition(weight - column, n - degree, axis=1)[:, n - degree]
    return dual_value(weight, degree, row, column), done == n * degree


@compiled()
def _augment(
    weight: np.ndarray,
    degree: int,
    row: np.ndarray,
    column: np.ndarray,
    free: np.ndarray,
    chosen: np.ndarray,
    done: int,
) -> int:
    """Give rows their columns after the first `done` of all n · degree; returns how many have theirs after WORK steps.

    As in the Hungarian method, rows get their columns one by one, each along a cheapest augmenting path (Dijkstra on
    reduced costs price + price - weight, kept >= 0 outside the graph and <= 0 inside).
    """
    n, work = len(weight), 0
    distance, settled, source = np.empty(2 * n), np.empty(2 * n, np.bool_), np.empty(2 * n, np.int64)
    while done < n * degree and work < WORK:
        start = done // degree
        distance[:], settled[:] = np.inf, False
        distance[start] = 0.0
        while True:
            work += n
            node = int(np.argmin(np.where(settled, np.inf, distance)))
            settled[node] = True
            if node >= n:
                j = node - n
                if free[j] > 0:
                    break
                for i in range(n):
                    if chosen[i, j] and not settled[i]:
                        through = distance[node] + max(weight[i, j] - row[i] - column[j], 0.0)
                        if through < distance[i]:
                            distance[i], source[i] = through, node
            else:
                for j in range(n):
                    if not chosen[node, j] and not settled[n + j]:
                        through = distance[node] + max(row[node] + column[j] - weight[node, j], 0.0)
                        if through < distance[n + j]:
                            distance[n + j], source[n + j] = through, node
        nearer = np.where(settled, distance[node] - distance, 0.0)
        row -= nearer[:n]
        column += nearer[n:]
        free[node - n] -= 1
        while node != start:  # every pair on the path is taken, or given back
            before = source[node]
            i, j = min(node, before), max(node, before) - n
            chosen[i, j] = not chosen[i, j]
            node = before
        done += 1
    return done


def dual_value(pairs: np.ndarray, degree: int, row: np.ndarray, column: np.ndarray) -> float:
    """Upper bound from any prices `row`, `column` [E]: degree · all prices + what pairs are worth beyond them."""
    surplus = np.maximum(pairs - row[:, None] - column[None, :], 0.0)
    return float(degree * (row.sum() + column.sum()) + surplus.sum())

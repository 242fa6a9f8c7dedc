"""Compiled loops of the b-matching bound (numba, cached on disk): a min-cost flow by shortest augmenting paths."""

import numpy as np
from numba import njit


@njit(cache=True)
def b_matching_prices(weight: np.ndarray, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Prices of rows and columns, float64 [n] each, of the heaviest `degree`-regular bipartite graph on `weight`.

    They solve the dual of the linear program: of all prices these make `bound.dual_value` least. As in the Hungarian
    method, rows get their columns one by one, each along a cheapest augmenting path (Dijkstra on reduced costs price +
    price - weight, which are kept >= 0 outside the graph and <= 0 inside).
    """
    n = len(weight)
    chosen = np.zeros((n, n), np.bool_)
    row, column = np.array([weights.max() for weights in weight]), np.zeros(n)
    free = np.full(n, degree)  # what each column still takes
    distance, done, source = np.empty(2 * n), np.empty(2 * n, np.bool_), np.empty(2 * n, np.int64)
    for start in range(n):
        for _ in range(degree):
            distance[:], done[:] = np.inf, False
            distance[start] = 0.0
            while True:
                node = int(np.argmin(np.where(done, np.inf, distance)))
                done[node] = True
                if node >= n:
                    j = node - n
                    if free[j] > 0:
                        break
                    for i in range(n):
                        if chosen[i, j] and not done[i]:
                            through = distance[node] + max(weight[i, j] - row[i] - column[j], 0.0)
                            if through < distance[i]:
                                distance[i], source[i] = through, node
                else:
                    for j in range(n):
                        if not chosen[node, j] and not done[n + j]:
                            through = distance[node] + max(row[node] + column[j] - weight[node, j], 0.0)
                            if through < distance[n + j]:
                                distance[n + j], source[n + j] = through, node
            length = distance[node]
            for i in range(n):
                if done[i]:
                    row[i] -= length - distance[i]
                if done[n + i]:
                    column[i] += length - distance[n + i]
            free[node - n] -= 1
            while node != start:
                i = source[node]
                chosen[i, node - n] = True
                node = i
                if node != start:
                    j = source[node]
                    chosen[node, j - n] = False
                    node = j
    return row, column

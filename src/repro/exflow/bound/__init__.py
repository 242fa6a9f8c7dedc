"""Proven lower bounds on the crossing fraction of any balanced placement: how far a placement can be from the best one.

For each pair of layers the pairs of experts on one GPU form a (E/P)-regular bipartite graph, and they come from two
balanced partitions. Each fact bounds the tokens that can be kept:

  b-matching    the heaviest (E/P)-regular bipartite graph, a linear program with integral vertices
  spectrum      sum/P plus E/P times the P-1 largest singular values of the doubly centred counts (Donath-Hoffman)
  semidefinite  both facts at once, and that both sides of a layer see the same partition (`sdp.py`); takes seconds

Where Viterbi over all partitions is affordable (`../search/chain.py`), the optimum itself is the bound. A bound holds
for the counts it was computed from (the training tokens): on other tokens the best placement may cross less.
"""

import numpy as np
from numba import njit
from threadpoolctl import threadpool_limits

from repro.exflow.bound import sdp
from repro.exflow.evaluate import distances, total_cost
from repro.exflow.search import chain


def lower_bound(counts: np.ndarray, gpus: int, time_limit_s: float = 0.0) -> float:
    """Crossing fraction on `counts` [layers-1, E, E] that no placement of E/gpus experts per GPU and layer can beat.

    The best of all bounds above. `time_limit_s` is for the semidefinite one, which 0 leaves out; it stops earlier when
    it stalls (24 layers of 32 experts: 5 s on one core; above E = 64 few iterations fit). The other bounds take
    milliseconds (58 layers of 256 experts: 2 s) and are the same every time.

    Hops inside and between nodes count alike; for hops between nodes, give the number of nodes as `gpus`. ValueError
    when E is no multiple of gpus, the counts are all zero, or the time limit is negative.
    """
    experts = counts.shape[1]
    if gpus < 1 or experts % gpus:
        raise ValueError(f"{experts} experts per layer cannot be shared evenly by {gpus} GPUs")
    if not counts.any():
        raise ValueError("the counts have no tokens")
    if not time_limit_s >= 0:
        raise ValueError(f"time_limit_s is {time_limit_s}, must be 0 or more")
    if gpus == 1:
        return 0.0
    # Matrices are small: where other processes compute too, more threads make this several times slower.
    with threadpool_limits(1, user_api="blas"):
        if gpus < experts and chain.count_partitions(experts, gpus) <= chain.EXACT_PARTITIONS:
            best = chain.exact_chain(counts, gpus)
            return total_cost(counts, best, distances(gpus, gpus)) / counts.sum()
        kept = sum(min(b_matching(pairs, experts // gpus), spectrum(pairs, gpus)) for pairs in counts)
        if time_limit_s > 0 and gpus < experts:  # with one expert per GPU the b-matching is the optimum
            kept = min(kept, sdp.kept_bound(counts, gpus, time_limit_s))
    return max(0.0, 1.0 - kept / counts.sum())


def gap(crossing_fraction: float, bound: float) -> float:
    """(crossing - bound) / crossing: no placement can avoid more than this share of the crossings; 0 is optimal."""
    return (crossing_fraction - bound) / crossing_fraction if crossing_fraction > 0 else 0.0


def b_matching(pairs: np.ndarray, degree: int) -> float:
    """Weight of the heaviest `degree`-regular bipartite graph on weights `pairs` [E, E], each pair taken at most once:
    the value of a solution of the dual linear program, an upper bound even where rounding left it beside the
    optimum."""
    row, column = b_matching_prices(np.ascontiguousarray(pairs, np.float64), degree)
    return dual_value(pairs, degree, row, column)


@njit(cache=True)
def b_matching_prices(weight: np.ndarray, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Prices of rows and columns, float64 [n] each, of the heaviest `degree`-regular bipartite graph on `weight`.

    Of all prices these make `dual_value` least. As in the Hungarian method, rows get their columns one by one,
    each along a cheapest augmenting path (Dijkstra on reduced costs price + price - weight, kept >= 0 outside the graph
    and <= 0 inside).
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
            nearer = np.where(done, distance[node] - distance, 0.0)
            row -= nearer[:n]
            column += nearer[n:]
            free[node - n] -= 1
            while node != start:  # every pair on the path is taken, or given back
                before = source[node]
                i, j = min(node, before), max(node, before) - n
                chosen[i, j] = not chosen[i, j]
                node = before
    return row, column


def dual_value(pairs: np.ndarray, degree: int, row: np.ndarray, column: np.ndarray) -> float:
    """Upper bound from any prices `row`, `column` [E]: degree · all prices + what pairs are worth beyond them."""
    surplus = np.maximum(pairs - row[:, None] - column[None, :], 0.0)
    return float(degree * (row.sum() + column.sum()) + surplus.sum())


def spectrum(pairs: np.ndarray, gpus: int) -> float:
    """Upper bound on tokens kept between two balanced partitions of the experts of `pairs` [E, E] into `gpus`."""
    centred = pairs - pairs.mean(axis=0, keepdims=True)
    centred -= centred.mean(axis=1, keepdims=True)
    singular = np.linalg.svd(centred, compute_uv=False)
    return float(pairs.sum() / gpus + len(pairs) // gpus * singular[: gpus - 1].sum())

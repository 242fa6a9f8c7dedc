"""Proven lower bounds on the crossing fraction of any balanced placement: how far a placement can be from the best one.

For each pair of layers the pairs of experts on one GPU form a (E/P)-regular bipartite graph, and they come from two
balanced partitions. Each fact bounds the tokens that can be kept:

  b-matching    the heaviest (E/P)-regular bipartite graph, a linear program with integral vertices
  spectrum      sum/P plus E/P times the P-1 largest singular values of the doubly centred counts (Donath-Hoffman)
  semidefinite  both facts at once, and that both sides of a layer see the same partition (`sdp.py`); takes seconds

Where Viterbi over all partitions is affordable (`../search/chain.py`), the optimum itself is the bound. A bound holds
for the counts it was computed from (the training tokens): on other tokens the best placement may cross less.
"""

import math

import numpy as np
from numba import njit
from threadpoolctl import threadpool_limits

from repro.exflow.bound import sdp
from repro.exflow.evaluate import check_counts, distances, total_cost
from repro.exflow.search import chain
from repro.exflow.search.portfolio import Clock, forever

WORK = 10**7  # steps of a b-matching between two looks at the clock: some 10 ms
SPECTRUM_S = 1e-9  # seconds that a spectrum takes, over E³: it is not begun when fewer are left


def lower_bound(counts: np.ndarray, gpus: int, time_limit_s: float = 0.0) -> float:
    """Crossing fraction on `counts` [layers-1, E, E] that no placement of E/gpus experts per GPU and layer can beat.

    The best of all bounds above. `time_limit_s` is for the semidefinite one, which 0 leaves out; it stops earlier when
    it stalls (24 layers of 32 experts: 5 s on one core; above E = 64 few iterations fit). The other bounds take
    milliseconds (58 layers of 256 experts: 2 s; a pair of layers of 512: half a minute) and are the same every time.

    Hops inside and between nodes count alike; for hops between nodes, give the number of nodes as `gpus`. ValueError
    when E is no multiple of gpus, the counts are not such counts, or the time limit is negative.
    """
    return lower_bound_within(counts, gpus, time_limit_s)[0]


def lower_bound_within(
    counts: np.ndarray, gpus: int, time_limit_s: float = 0.0, clock: Clock = forever
) -> tuple[float, float]:
    """(what was proved, share of the pairs of layers whose bounds are complete) when `clock`, the seconds that are left
    of a longer job, says 0. Arguments and errors of `lower_bound`, which this is where the share is 1. A pair that is
    not complete is bounded by what each expert keeps of the experts that it exchanges most tokens with."""
    check_counts(counts)
    experts = counts.shape[1]
    if gpus < 1 or experts % gpus:
        raise ValueError(f"{experts} experts per layer cannot be shared evenly by {gpus} GPUs")
    if not time_limit_s >= 0:
        raise ValueError(f"time_limit_s is {time_limit_s}, must be 0 or more")
    if gpus == 1:
        return 0.0, 1.0
    # Matrices are small: where other processes compute too, more threads make this several times slower.
    with threadpool_limits(1, user_api="blas"):
        if gpus < experts and chain.count_partitions(experts, gpus) <= chain.EXACT_PARTITIONS:
            best = chain.exact_chain(counts, gpus)
            return total_cost(counts, best, distances(gpus, gpus)) / counts.sum(), 1.0
        kept, share = _kept(counts, gpus, clock)
        if time_limit_s > 0 and gpus < experts and share == 1:  # with one expert per GPU the b-matching is the optimum
            kept = min(kept, sdp.kept_bound(counts, gpus, time_limit_s))
    return max(0.0, 1.0 - kept / counts.sum()), share


def _kept(counts: np.ndarray, gpus: int, clock: Clock) -> tuple[float, float]:
    """(upper bound on the tokens kept, share of complete pairs). All spectra come first: they are sooner done."""
    degree, kept, complete = counts.shape[1] // gpus, 0.0, 0
    spectra = [spectrum(pairs, gpus) if SPECTRUM_S * counts.shape[1] ** 3 < clock() else math.inf for pairs in counts]
    for pairs, spectral in zip(counts, spectra, strict=True):
        matched, done = b_matching_within(pairs, degree, clock)
        kept += min(matched, spectral)
        complete += done and spectral < math.inf
    return kept, complete / len(counts)


def gap(crossing_fraction: float, bound: float) -> float:
    """(crossing - bound) / crossing: no placement can avoid more than this share of the crossings; 0 is optimal."""
    return (crossing_fraction - bound) / crossing_fraction if crossing_fraction > 0 else 0.0


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


@njit(cache=True)
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


def spectrum(pairs: np.ndarray, gpus: int) -> float:
    """Upper bound on tokens kept between two balanced partitions of the experts of `pairs` [E, E] into `gpus`."""
    centred = pairs - pairs.mean(axis=0, keepdims=True)
    centred -= centred.mean(axis=1, keepdims=True)
    singular = np.linalg.svd(centred, compute_uv=False)
    return float(pairs.sum() / gpus + len(pairs) // gpus * singular[: gpus - 1].sum())

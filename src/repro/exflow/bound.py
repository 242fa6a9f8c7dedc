"""Proven lower bounds on the crossing fraction of any balanced placement: how far a placement can be from the best one.

An expert keeps its tokens only with the E/P experts of the next layer on its own GPU. So for each pair of layers the kept pairs
form a (E/P)-regular bipartite graph, and they also come from two balanced partitions. Each fact alone bounds what can be kept:

  b-matching  the heaviest (E/P)-regular bipartite graph, a linear program with integral vertices
  spectrum    sum/P plus E/P times the P-1 largest singular values of the doubly centred counts (Donath-Hoffman)

Where Viterbi over all partitions is affordable (`_chain.py`), the optimum itself is the bound. A bound holds for the counts it was
computed from (the training tokens): on other tokens the best placement may cross less.
"""

import numpy as np
import scipy.sparse as sp
from scipy.optimize import linprog

from repro.exflow import _chain
from repro.exflow.evaluate import distances, total_cost


def lower_bound(counts: np.ndarray, gpus: int) -> float:
    """Crossing fraction on `counts` [layers-1, E, E] that no placement of E/gpus experts per GPU and layer can beat.

    Hops inside and between nodes count alike. ValueError when E is no multiple of gpus.
    """
    experts = counts.shape[1]
    if gpus < 1 or experts % gpus:
        raise ValueError(f"{experts} experts per layer cannot be shared evenly by {gpus} GPUs")
    if gpus == 1:
        return 0.0
    if gpus < experts and _chain.count_partitions(experts, gpus) <= _chain.EXACT_PARTITIONS:
        best = _chain.exact_chain(counts, gpus)
        return total_cost(counts, best, distances(gpus, gpus)) / counts.sum()
    kept = sum(min(b_matching(pairs, experts // gpus), spectrum(pairs, gpus)) for pairs in counts)
    return max(0.0, 1.0 - kept / counts.sum())


def gap(crossing_fraction: float, bound: float) -> float:
    """(crossing - bound) / crossing: at most this share of the crossings could be avoided by any placement; 0 is optimal."""
    return (crossing_fraction - bound) / crossing_fraction if crossing_fraction > 0 else 0.0


def b_matching(pairs: np.ndarray, degree: int) -> float:
    """Weight of the heaviest `degree`-regular bipartite graph on weights `pairs` [E, E], each pair taken at most once.

    What is returned is the value of the solver's dual solution, made feasible: by weak duality an upper bound even if the
    solver stopped short of the optimum.
    """
    experts = len(pairs)
    ends = sp.vstack(
        [sp.kron(sp.eye_array(experts), np.ones((1, experts))), sp.kron(np.ones((1, experts)), sp.eye_array(experts))]
    )
    solved = linprog(-pairs.ravel(), A_eq=ends.tocsr(), b_eq=np.full(2 * experts, degree), bounds=(0, 1))
    assert solved.status == 0, solved.message
    row, column = np.split(-solved.eqlin.marginals, 2)
    return dual_value(pairs, degree, row, column)


def dual_value(pairs: np.ndarray, degree: int, row: np.ndarray, column: np.ndarray) -> float:
    """Upper bound from any prices `row`, `column` [E] of the experts: degree · all prices + what pairs are worth beyond them."""
    surplus = np.maximum(pairs - row[:, None] - column[None, :], 0.0)
    return float(degree * (row.sum() + column.sum()) + surplus.sum())


def spectrum(pairs: np.ndarray, gpus: int) -> float:
    """Upper bound on tokens kept between two balanced partitions of the experts of `pairs` [E, E] into `gpus` groups."""
    centred = pairs - pairs.mean(axis=0, keepdims=True)
    centred -= centred.mean(axis=1, keepdims=True)
    singular = np.linalg.svd(centred, compute_uv=False)
    return float(pairs.sum() / gpus + len(pairs) // gpus * singular[: gpus - 1].sum())

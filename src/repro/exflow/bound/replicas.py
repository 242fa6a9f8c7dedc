"""A proven lower bound where GPUs hold copies of experts (redundant experts): a linear program over all layers.

A token that goes from expert a to expert b stays on its GPU only if some GPU holds both: let M_ab be 1 then. Say each
GPU holds at most m experts of a layer, and expert a has r_a copies, 1 <= r_a <= G, together at most G·m. Each copy of a
lies beside at most m experts of the next layer, and each copy of b beside m of the layer before:

    tokens kept = Σ counts · M,   Σ_b M_ab <= m·r_a,   Σ_a M_ab <= m·r_b,   M <= 1

Both pairs of layers that a layer is in see the same copies. For any prices p_a, q_b >= 0 of these rows (weak duality)

    tokens kept <= Σ max(0, counts_ab - p_a - q_b) + m · Σ over layers of the most that Σ_a r_a·(p_a + q_a) can be

and the last maximum gives every expert one copy and all further copies to those with the highest price. So the bound
does not trust the solver. Without copies (m = E/G) it is nearly the b-matching bound. That whatever lies beside an
expert is one of few sets is not asked for: the bound is valid, not tight.
"""

import numpy as np
import scipy.sparse as sp

from repro.exflow import highs
from repro.exflow.evaluate import check_counts

PROGRAM_S = 1e-5  # seconds that building the program takes, over its pairs: it is not begun when fewer are left


def replicated_bound(counts: np.ndarray, gpus: int, held: int, time_limit_s: float = 30.0) -> float:
    """Crossing fraction on `counts` [layers-1, E, E] that no placement on `gpus` GPUs can beat, whatever copies of
    experts it has and however it shares tokens among them, when a GPU holds at most `held` different experts of a layer
    (E/gpus + extra slots). 0 where the program is not solved within `time_limit_s`. For hops between nodes, give their
    number and what one holds. ValueError when the GPUs cannot hold all experts, or the counts are not such counts."""
    check_counts(counts)
    experts = counts.shape[1]
    if gpus < 1 or not experts <= gpus * held:
        raise ValueError(f"{gpus} GPUs with {held} experts of a layer each cannot hold all {experts}")
    if not time_limit_s >= 0:
        raise ValueError(f"time_limit_s is {time_limit_s}, must be 0 or more")
    if held >= experts or time_limit_s < PROGRAM_S * counts.size:
        return 0.0
    scaled = counts / counts.max()
    prices = highs.row_prices(_program(scaled, gpus, held), time_limit_s)
    if prices is None:
        return 0.0
    row, column = np.maximum(-prices[: 2 * len(counts) * experts], 0.0).reshape(2, len(counts), experts)
    return max(0.0, 1.0 - kept_bound(scaled, gpus, held, row, column) / scaled.sum())


def kept_bound(counts: np.ndarray, gpus: int, held: int, row: np.ndarray, column: np.ndarray) -> float:
    """Upper bound on the tokens kept, from any prices p = `row` and q = `column` >= 0, float64 [layers-1, E]; rounded
    up: a sum of n terms is off by at most n ε times their sum, as none is negative."""
    experts = counts.shape[1]
    price = np.zeros((len(counts) + 1, experts))
    price[:-1] += row
    price[1:] += column
    full, rest = divmod(gpus * held - experts, max(gpus - 1, 1))  # experts with a copy on each GPU, copies of the next
    dearest = np.sort(price, axis=1)[:, ::-1]
    copies = dearest[:, :full].sum() * (gpus - 1) + (dearest[:, full].sum() * rest if full < experts else 0.0)
    surplus = np.maximum(counts - row[:, :, None] - column[:, None, :], 0.0).sum()
    kept = float(surplus + held * (price.sum() + copies))
    return kept + np.finfo(float).eps * counts.size * (kept + float(counts.sum()))


def _program(counts: np.ndarray, gpus: int, held: int) -> highs.Program:
    """Its unknowns: M of all pairs, then (r - 1)/(G - 1) of all experts; its rows: those of p, of q, copies."""
    edges, experts, _ = counts.shape
    pairs, own = sp.identity(edges), sp.identity(experts)
    ones = np.ones((1, experts))
    share = held * (gpus - 1)
    first, second = sp.eye(edges, edges + 1), sp.eye(edges, edges + 1, 1)
    matrix = sp.block_array(
        [
            [sp.kron(pairs, sp.kron(own, ones)), sp.kron(first, -share * own)],
            [sp.kron(pairs, sp.kron(ones, own)), sp.kron(second, -share * own)],
            [None, sp.kron(sp.identity(edges + 1), (gpus - 1) * ones)],
        ],
        format="csc",
    )
    upper = np.concatenate([np.full(2 * edges * experts, float(held)), np.full(edges + 1, gpus * held - experts * 1.0)])
    objective = np.concatenate([-counts.ravel(), np.zeros((edges + 1) * experts)])
    return highs.Program(objective, sp.csc_array(matrix), np.full(len(upper), -np.inf), upper, 0)

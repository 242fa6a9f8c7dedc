"""The paper's integer program (Eq. 8-12, see `placement.py`) for one stage, on aggregated transition counts, with HiGHS."""

import math
from dataclasses import dataclass

import highspy
import numpy as np
import scipy.sparse as sp

from repro.exflow.evaluate import distances, total_cost
from repro.exflow.search.chain import contiguous


@dataclass(frozen=True)
class Solution:
    """`group` int64 [layers, n]; `hops` (objective) and the solver's lower bound, in tokens; `gap` = (hops - bound) / hops."""

    group: np.ndarray
    hops: float
    bound: float
    time_limited: bool

    @property
    def gap(self) -> float:
        return (self.hops - self.bound) / self.hops if self.hops > 0 else 0.0


def build(counts: np.ndarray, parts: int) -> tuple[np.ndarray, sp.csc_array, np.ndarray, np.ndarray, int]:
    """(objective, matrix, row lower, row upper, number of x): columns are x^p_{i,j} in order (j, i, p), then R per pair of experts.

    Pairs that no token takes have no R.
    """
    layers, experts = len(counts) + 1, counts.shape[1]
    x = np.arange(layers * experts * parts).reshape(layers, experts, parts)
    layer, a, b = np.nonzero(counts)
    hop = x.size + np.arange(len(layer))
    rows, columns, values, lower, upper = [], [], [], [], []

    def add(column_sets: np.ndarray, coefficients: list[int], low: float, high: float) -> None:
        """One row per line of `column_sets`, all with the same coefficients and limits."""
        first, count = sum(map(len, lower)), len(column_sets)
        rows.append(np.repeat(np.arange(first, first + count), column_sets.shape[1]))
        columns.append(column_sets.ravel())
        values.append(np.tile(np.array(coefficients, float), count))
        lower.append(np.full(count, low))
        upper.append(np.full(count, high))

    add(x.transpose(0, 2, 1).reshape(-1, experts), [1] * experts, experts // parts, experts // parts)  # balance
    add(x.reshape(-1, parts), [1] * parts, 1, 1)  # one place per expert
    for part in range(parts if parts > 2 else 1):  # R ≥ ±(x_a - x_b); of two parts, the second repeats the first
        ends = np.stack([hop, x[layer, a, part], x[layer + 1, b, part]], axis=1)
        add(ends, [1, -1, 1], 0, math.inf)
        add(ends, [1, 1, -1], 0, math.inf)
    objective = np.concatenate([np.zeros(x.size), counts[layer, a, b]])
    shape = (sum(map(len, lower)), len(objective))
    matrix = sp.csc_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=shape)
    return objective, matrix, np.concatenate(lower), np.concatenate(upper), x.size


def solve(counts: np.ndarray, parts: int, time_limit_s: float, seed: int = 0) -> Solution:
    """Solve one stage; `counts` float64 [layers-1, n, n], n a multiple of `parts`.

    The solver starts from rank order, so that there is an answer however short the time. R is left continuous: minimising
    pushes it to 0 or 1 by itself once x is binary.
    """
    layers, experts = len(counts) + 1, counts.shape[1]
    start = contiguous(layers, experts, parts)
    if parts == 1 or not counts.any():
        return Solution(start, 0.0, 0.0, False)
    objective, matrix, lower, upper, binaries = build(counts, parts)
    solver = highspy.Highs()
    for option, value in (
        ("output_flag", False),
        ("time_limit", time_limit_s),
        ("random_seed", seed),
        ("threads", 1),
        ("mip_lp_solver", "ipm"),  # the first relaxation is so degenerate that simplex overruns the time limit on it
        ("mip_heuristic_effort", 1.0),  # as the published solver's Heuristics=1.0
    ):
        assert solver.setOptionValue(option, value) == highspy.HighsStatus.kOk, option
    solver.passModel(_model(objective, matrix, lower, upper, binaries))
    guess = highspy.HighsSolution()
    apart = (start[:-1, :, None] != start[1:, None, :])[counts > 0]
    guess.col_value = np.concatenate([np.eye(parts)[start].ravel(), apart.astype(float)])
    solver.setSolution(guess)
    solver.run()
    value = np.array(solver.getSolution().col_value)[:binaries].reshape(layers, experts, parts)
    group = value.argmax(axis=2)
    assert ((value > 0.5).sum(axis=2) == 1).all(), "HiGHS returned no integer solution despite a feasible start"
    status = solver.getModelStatus()
    known = (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit)
    assert status in known, solver.modelStatusToString(status)
    hops = total_cost(counts, group, distances(parts, parts))
    bound = min(max(solver.getInfo().mip_dual_bound, 0.0), hops)
    return Solution(group, hops, bound, status == highspy.HighsModelStatus.kTimeLimit)


def _model(
    objective: np.ndarray, matrix: sp.csc_array, lower: np.ndarray, upper: np.ndarray, binaries: int
) -> highspy.HighsLp:
    model = highspy.HighsLp()
    model.num_row_, model.num_col_ = matrix.shape
    model.col_cost_ = objective
    model.col_lower_, model.col_upper_ = np.zeros(len(objective)), np.ones(len(objective))
    model.row_lower_, model.row_upper_ = lower, np.where(np.isinf(upper), highspy.kHighsInf, upper)
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_, model.a_matrix_.index_ = matrix.indptr, matrix.indices
    model.a_matrix_.value_ = matrix.data
    kinds = [highspy.HighsVarType.kInteger] * binaries
    model.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (len(objective) - binaries)
    return model

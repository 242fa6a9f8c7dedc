"""Mixed-integer programs for HiGHS, on one thread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import highspy
import numpy as np
import scipy.sparse as sp


@dataclass(frozen=True)
class Program:
    """Minimise objective · v where lower ≤ matrix · v ≤ upper and 0 ≤ v ≤ 1; the first `integers` of v are integers."""

    objective: np.ndarray
    matrix: sp.csc_array
    lower: np.ndarray
    upper: np.ndarray
    integers: int


def rows(block: np.ndarray, coefficients: Sequence[float], columns: int) -> sp.csr_array:
    """A row of a matrix for each line of `block` (numbers of columns), all with the same coefficients."""
    ends = np.arange(len(block) + 1) * block.shape[1]
    return sp.csr_array((np.tile(coefficients, len(block)), block.ravel(), ends), shape=(len(block), columns))


def load(model: Program, time_limit_s: float, seed: int = 0) -> highspy.Highs:
    """A solver with the program, ready to run; its progress is not printed."""
    problem = highspy.HighsLp()
    problem.num_row_, problem.num_col_ = model.matrix.shape
    problem.col_cost_ = model.objective
    problem.col_lower_, problem.col_upper_ = np.zeros(len(model.objective)), np.ones(len(model.objective))
    problem.row_lower_, problem.row_upper_ = model.lower, model.upper
    problem.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    problem.a_matrix_.start_, problem.a_matrix_.index_ = model.matrix.indptr, model.matrix.indices
    problem.a_matrix_.value_ = model.matrix.data
    integer, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    problem.integrality_ = [integer] * model.integers + [real] * (len(model.objective) - model.integers)
    solver = highspy.Highs()
    for option, value in (
        ("output_flag", False),
        ("time_limit", time_limit_s),
        ("random_seed", seed % 2**31),  # HiGHS takes no more
        ("threads", 1),
        ("mip_lp_solver", "ipm"),  # the first relaxation is so degenerate that simplex overruns the time limit on it
        ("mip_heuristic_effort", 1.0),  # as the published solver's Heuristics=1.0
    ):
        assert solver.setOptionValue(option, value) == highspy.HighsStatus.kOk, option
    solver.passModel(problem)
    return solver


def minimise(
    model: Program, start: np.ndarray, time_limit_s: float, seed: int, clock: Callable[[], float] | None = None
) -> tuple[np.ndarray, float, bool]:
    """(v, lower bound on the objective, whether the time limit or the clock came before the proof); `start` is a
    feasible v. `clock` gives the seconds that are left of a longer job, and is asked now and then."""
    solver, guess = load(model, time_limit_s, seed), highspy.HighsSolution()
    if clock is not None:
        for callback in (solver.cbSimplexInterrupt, solver.cbIpmInterrupt, solver.cbMipInterrupt):
            callback.subscribe(lambda event: event.interrupt(clock() <= 0.0))
    guess.col_value = start
    solver.setSolution(guess)
    solver.run()
    status = solver.getModelStatus()
    cut = (highspy.HighsModelStatus.kTimeLimit, highspy.HighsModelStatus.kInterrupt)
    assert status in (*cut, highspy.HighsModelStatus.kOptimal), solver.modelStatusToString(status)
    bound = max(solver.getInfo().mip_dual_bound, 0.0)
    return np.array(solver.getSolution().col_value), bound, status in cut

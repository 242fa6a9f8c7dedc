"""The aggregated integer program of ExFlow in CP-SAT (OR-Tools, extra `benchmark`): clauses, not inequalities.

Maximise Σ counts · kept, where kept of a pair of experts implies that both sit on the same GPU, each GPU holds E/P
experts of each layer, and (a cut that the published program lacks) an expert keeps at most E/P pairs on either side.

OR-Tools ships a HiGHS of its own, and only one HiGHS can be loaded into a process: `place` runs this file as a process.
"""

import importlib.util
import io
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

LARGEST_MODEL = 2_000_000  # clauses; with more, building the model in Python alone takes tens of seconds
WHOLE = 10**8  # counts that are no whole numbers are scaled to this total and rounded


class TooLarge(ValueError):
    """The model would have more clauses than LARGEST_MODEL; the message says how many."""


def place(counts: np.ndarray, gpus: int, seed: int, time_limit_s: float) -> np.ndarray:
    """int64 [layers, E]: the best placement that one worker finds in the time, building the model included.

    Starting the process, about a second, comes on top. Rank order is the solver's hint and the answer when it finds
    nothing. Raises TooLarge, and ImportError without `ortools`.
    """
    if importlib.util.find_spec("ortools") is None:
        raise ImportError("CP-SAT needs the package ortools (pip install 'repro-papers[benchmark]')")
    clauses = 2 * gpus * int(np.count_nonzero(counts))
    if clauses > LARGEST_MODEL:
        raise TooLarge(f"the model would have {clauses:,} clauses, allowed: {LARGEST_MODEL:,}")
    question = io.BytesIO()
    np.savez(question, counts=counts, gpus=gpus, seed=seed % 2**31, time_limit_s=time_limit_s)
    command = [sys.executable, __file__]
    answer = subprocess.run(command, input=question.getvalue(), stdout=subprocess.PIPE, check=True).stdout
    return np.load(io.BytesIO(answer))


def solve(counts: np.ndarray, gpus: int, seed: int, time_limit_s: float) -> np.ndarray:
    """What `place` runs: for a process that has not loaded HiGHS."""
    from ortools.sat.python import cp_model

    start = time.perf_counter()
    layers, experts = len(counts) + 1, counts.shape[1]
    rank_order = np.repeat(np.arange(gpus), experts // gpus)
    model = cp_model.CpModel()
    x = [[[model.new_bool_var("") for _ in range(gpus)] for _ in range(experts)] for _ in range(layers)]
    for layer in x:
        for expert in layer:
            model.add_exactly_one(expert)
        for gpu in range(gpus):
            model.add(sum(expert[gpu] for expert in layer) == experts // gpus)
        for expert, own in zip(layer, rank_order, strict=True):
            for gpu, here in enumerate(expert):
                model.add_hint(here, int(gpu == own))
    model.add(x[0][0][0] == 1)  # names of GPUs are free
    model.maximize(sum(_kept(model, pairs, x[at], x[at + 1]) for at, pairs in enumerate(_whole(counts))))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.random_seed = 1, seed
    solver.parameters.max_time_in_seconds = max(time_limit_s - (time.perf_counter() - start), 0.0)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return np.tile(rank_order, (layers, 1))
    return np.array([[[solver.value(here) for here in expert] for expert in layer] for layer in x]).argmax(axis=2)


def _kept(model: "cp_model.CpModel", pairs: np.ndarray, here: list, there: list) -> "cp_model.LinearExprT":
    """Linear expression of the tokens kept between two layers; adds its variables and constraints to the model."""
    places = len(here) // len(here[0])
    out: list[list] = [[] for _ in here]
    into: list[list] = [[] for _ in there]
    terms = []
    for a, b in np.argwhere(pairs > 0).tolist():
        same = model.new_bool_var("")
        for from_gpu, to_gpu in zip(here[a], there[b], strict=True):
            model.add_bool_or(~same, ~from_gpu, to_gpu)
            model.add_bool_or(~same, from_gpu, ~to_gpu)
        out[a].append(same)
        into[b].append(same)
        terms.append(int(pairs[a, b]) * same)
    for side in (*out, *into):
        model.add(sum(side) <= places)
    return sum(terms)


def _whole(counts: np.ndarray) -> np.ndarray:
    """Whole numbers in proportion to `counts`, int64; exact when they are whole already."""
    return np.rint(counts if (counts == np.rint(counts)).all() else counts * (WHOLE / counts.sum())).astype(np.int64)


if __name__ == "__main__":
    question = np.load(io.BytesIO(sys.stdin.buffer.read()))
    found = solve(question["counts"], int(question["gpus"]), int(question["seed"]), float(question["time_limit_s"]))
    reply = io.BytesIO()
    np.save(reply, found.astype(np.int64))
    sys.stdout.buffer.write(reply.getvalue())

"""What ExFlow's published solver (solve_affinity.py, github.com/YJHMITWEB/ExFlow) computes, written anew.

It hands an integer program with one variable for each token and transition to Gurobi; here HiGHS solves the same
program. `repro.exflow.paper` has one variable per pair of experts instead, with the same optimum. Three more of its
traits are kept here to be measured: its cost report, its recursive halving at its best (`exact_bisection`), and the
GPUs that it leaves empty when their number is no power of two.
"""

import math
from dataclasses import dataclass

import highspy
import numpy as np
import scipy.sparse as sp

from repro.exflow import highs, paper
from repro.exflow.highs import Program
from repro.exflow.search import chain
from repro.exflow.trace import Trace


@dataclass(frozen=True)
class Report:
    """The numbers in the names of the published solution files, per token.

    `cost`: hops, 1 inside a node and 2 between nodes. `avg_intra`: hops inside a node for each other GPU of the node.
    `avg_inter`: hops between nodes for each GPU of the other nodes; 0 with one node.
    """

    cost: float
    avg_intra: float
    avg_inter: float


def report(trace: Trace, gpu: np.ndarray, intra_gpus: int, nodes: int) -> Report:
    """Report of `gpu` (int [layers, E], GPUs of a node consecutive) on a top-1 trace, counted token by token.

    ValueError for top-k traces and for one GPU per node, by which the published solver divides zero.
    """
    if trace.k != 1:
        raise ValueError(f"{trace.source}: top-{trace.k}, the published solver takes one expert per token and layer")
    if intra_gpus < 2:
        raise ValueError(f"intra_gpus is {intra_gpus}, the published solver divides by intra_gpus - 1")
    visited = gpu[np.arange(trace.layers), trace.experts.reshape(trace.tokens, trace.layers)]
    here, there = visited[:, :-1], visited[:, 1:]
    inter = int((here // intra_gpus != there // intra_gpus).sum()) / trace.tokens
    intra = int((here != there).sum()) / trace.tokens - inter
    others = intra_gpus * (nodes - 1)
    return Report(intra + 2.0 * inter, intra / (intra_gpus - 1), inter / others if others else 0.0)


def parts_used(gpus: int) -> int:
    """GPUs that its default gives experts to, halving ⌊log2(gpus)⌋ times: 4 of 6."""
    if gpus < 1:
        raise ValueError(f"gpus is {gpus}, must be at least 1")
    return 2 ** int(math.log2(gpus))


def exact_bisection(counts: np.ndarray, gpus: int) -> np.ndarray:
    """Recursive halving with every half proven optimal: the best placement that it can reach, int64 [layers, E].

    Greedy all the same: the first cut does not know what the later ones will save. GPUs from `parts_used(gpus)` on stay
    empty. Every half is split by Viterbi over all its partitions, so E is limited: ValueError when a layer has more
    than EXACT_PARTITIONS of them, or E is no multiple of the parts.
    """
    parts, experts = parts_used(gpus), counts.shape[1]
    if experts % parts:
        raise ValueError(f"{experts} experts per layer cannot be halved into {parts} equal parts")
    if parts > 1 and chain.count_partitions(experts, 2) > chain.EXACT_PARTITIONS:
        raise ValueError(f"{experts} experts per layer have too many halves to try them all")
    halvings = [2] * (parts.bit_length() - 1)
    return paper.staged(counts, halvings, lambda _, inside, two, share: chain.exact_chain(inside, two))


def per_token_program(trace: Trace, parts: int) -> Program:
    """The published program of one stage: columns are x of (layer, expert, part), then a cost per (token, transition).

    For every token, transition and part: cost ≥ ±(x of this expert - x of the next). Each part holds E/parts experts of
    each layer, each expert has one part. Of the published variables only the unused imbalances are left out. All are
    binary, as published.
    """
    layers, experts = trace.layers, trace.num_experts
    x = np.arange(layers * experts * parts).reshape(layers, experts, parts)
    visited = trace.experts.reshape(trace.tokens, layers)
    step = np.arange(layers - 1)
    here, there = x[step, visited[:, :-1]], x[step + 1, visited[:, 1:]]  # [tokens, layers-1, parts]
    cost = x.size + np.arange(trace.tokens * (layers - 1)).reshape(trace.tokens, layers - 1, 1)
    ends = np.stack([np.broadcast_to(cost, here.shape), here, there], axis=-1).reshape(-1, 3)
    pairs = len(ends)
    balance, single = x.transpose(0, 2, 1).reshape(-1, experts), x.reshape(-1, parts)
    blocks = [(balance, [1.0] * experts), (single, [1.0] * parts), (ends, [1.0, -1.0, 1.0]), (ends, [1.0, 1.0, -1.0])]
    columns = x.size + cost.size
    matrix = sp.vstack([highs.rows(block, coefficients, columns) for block, coefficients in blocks]).tocsc()
    lower = np.concatenate([np.full(len(balance), experts // parts), np.ones(len(single)), np.zeros(2 * pairs)])
    upper = np.concatenate([lower[: len(balance) + len(single)], np.full(2 * pairs, np.inf)])
    objective = np.concatenate([np.zeros(x.size), np.ones(cost.size)])
    return Program(objective, matrix, lower, upper, columns)


@dataclass(frozen=True)
class Solved:
    """`objective`: best solution found, None without any. `bound`: no solution is below. `seconds`: by HiGHS' clock."""

    objective: float | None
    bound: float
    seconds: float
    optimal: bool


def solve(program: Program, time_limit_s: float, target: float | None = None, seed: int = 0) -> Solved:
    """Run HiGHS with the options of `repro.exflow.paper.solve`; it stops early at a solution not above `target`."""
    solver = highs.load(program, time_limit_s, seed)
    if target is not None:
        assert solver.setOptionValue("objective_target", target) == highspy.HighsStatus.kOk
    solver.run()
    info, status = solver.getInfo(), solver.getModelStatus()
    found = info.objective_function_value if info.primal_solution_status == highspy.kSolutionStatusFeasible else None
    bound = max(info.mip_dual_bound, 0.0)
    return Solved(found, bound, solver.getRunTime(), status == highspy.HighsModelStatus.kOptimal)

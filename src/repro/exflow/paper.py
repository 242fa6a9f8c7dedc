"""ExFlow's placement of experts (arXiv 2401.08383). The equations are those of others' summaries, checked against the
authors' code. Read this file first.

A mixture-of-experts model spreads the experts of each layer over GPUs, and in each layer every token travels to its
expert. Routing is not random: a token that visited expert i in layer j visits some experts of layer j+1 far more often
than others. If those are on the same GPU, the token need not travel. The paper's integer program:

    minimise    Σ_k Σ_j R_{k,j}                                      (8)      hops of all tokens k after all layers j
    subject to  Σ_i x^p_{i,j} = E/P                  for all j, p    (9)      a GPU holds E/P experts of each layer
                Σ_p x^p_{i,j} = 1                    for all i, j    (10)     an expert is on one GPU
                R_{k,j} ≥ ±(x^p_{r(k,j),j} - x^p_{r(k,j+1),j+1})     (11-12)  a token hops when its experts are apart
                x, R binary

    in the paper    here
    E, P            `experts` per layer, and `parts`: the nodes or GPUs of one stage
    r(k, j)         the expert of token k in layer j: `here[k]` and `there[k]` of `count_transitions`
    x^p_{i,j}       a column of the matrix of `program`; once solved, `group[j, i]` is the p of expert i
    R_{k,j}         a column for each pair of experts, not for each token; `counts[j, a, b]` tokens share it

A token enters the program only by its two experts. Tokens of the same pair can share one R, weighted by their number:
the optimum stays the same, and the program shrinks from tokens · layers to E² · layers.

    Step 1  `count_transitions`  count the tokens that go from expert a of a layer to expert b of the next
    Step 2  `program`            write Eq. 8-12 for these counts as a matrix
    Step 3  `solve`              let HiGHS solve it (the published code takes Gurobi)
    Step 4  `place`              do so in stages: nodes first, where hops cost most, then the GPUs inside each node

`placement.py` offers this beside our own search, which has the same objective and stages.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from repro.compiled import compiled
from repro.exflow import highs
from repro.exflow.highs import Program

LARGEST_PROGRAM = 6_000_000  # rows (11-12): more take a minute to build, and HiGHS then runs past any time limit

# What places one group of `staged`: (members, counts, parts, share of the time left) to int64 [layers, n].
Solve = Callable[[np.ndarray, np.ndarray, int, float], np.ndarray]


@compiled(nogil=True)
def count_transitions(here: np.ndarray, there: np.ndarray, counts: np.ndarray) -> None:
    """Step 1. Add the moves of all tokens between two neighbouring layers to `counts`, int64 [E, E].

    `here`, `there`: integer [tokens, k], the experts of each token in either layer; each of the k·k pairs counts once.
    """
    tokens, k = here.shape
    for token in range(tokens):
        for a in range(k):
            row = counts[here[token, a]]
            for b in range(k):
                row[there[token, b]] += 1


def program(counts: np.ndarray, parts: int) -> Program:
    """Step 2. Columns are x^p_{i,j} in the order (j, i, p), then an R for each pair of experts that a token takes.

    `counts`: [layers-1, E, E]. R is left continuous: minimising pushes it to 0 or 1 once x is binary. ValueError for
    more than LARGEST_PROGRAM rows.
    """
    layers, experts = len(counts) + 1, counts.shape[1]
    rows = 2 * int(np.count_nonzero(counts)) * (parts if parts > 2 else 1)
    if rows > LARGEST_PROGRAM:
        raise ValueError(
            f"the integer program has {rows:,} rows, allowed: {LARGEST_PROGRAM:,}; method affinity has none"
        )
    x = np.arange(layers * experts * parts).reshape(layers, experts, parts)
    layer, a, b = np.nonzero(counts)
    hop = x.size + np.arange(len(layer))
    blocks: list[tuple[np.ndarray, list[float], float, float]] = [  # columns of each row, coefficients, lower, upper
        (x.transpose(0, 2, 1).reshape(-1, experts), [1.0] * experts, experts // parts, experts // parts),  # (9)
        (x.reshape(-1, parts), [1.0] * parts, 1.0, 1.0),  # (10)
    ]
    for p in range(parts if parts > 2 else 1):  # (11-12); of two parts, the second repeats the first
        ends = np.stack([hop, x[layer, a, p], x[layer + 1, b, p]], axis=1)
        blocks += [(ends, [1.0, -1.0, 1.0], 0.0, math.inf), (ends, [1.0, 1.0, -1.0], 0.0, math.inf)]
    columns, sizes = x.size + len(hop), [len(block) for block, *_ in blocks]
    matrix = sp.vstack([highs.rows(block, coefficients, columns) for block, coefficients, *_ in blocks]).tocsc()
    lower, upper = (np.repeat([block[side] for block in blocks], sizes) for side in (2, 3))
    return Program(np.concatenate([np.zeros(x.size), counts[layer, a, b]]), matrix, lower, upper, x.size)


@dataclass(frozen=True)
class Solution:
    """`group` int64 [layers, n]; `hops` (the objective) and the solver's lower `bound` on it, in tokens."""

    group: np.ndarray
    hops: float
    bound: float
    time_limited: bool

    @property
    def gap(self) -> float:
        """(hops - bound) / hops: 0 when proven optimal."""
        return (self.hops - self.bound) / self.hops if self.hops > 0 else 0.0


def solve(
    counts: np.ndarray, parts: int, time_limit_s: float, seed: int = 0, clock: Callable[[], float] | None = None
) -> Solution:
    """Step 3. Split the experts of `counts`, [layers-1, n, n], n a multiple of `parts`, into `parts` groups.

    HiGHS starts from rank order, so that there is an answer however short the time. `clock` gives the seconds that are
    left of a longer job.
    """
    deadline = time.perf_counter() + time_limit_s
    group = contiguous(len(counts) + 1, counts.shape[1], parts)
    if parts == 1 or not counts.any():
        return Solution(group, 0.0, 0.0, False)
    model = program(counts, parts)
    hop = (group[:-1, :, None] != group[1:, None, :])[counts > 0]
    start = np.concatenate([np.eye(parts)[group].ravel(), hop.astype(float)])
    found, bound, time_limited = start, 0.0, True
    if (left := deadline - time.perf_counter()) > 0:
        found, bound, time_limited = highs.minimise(model, start, left, seed, clock)
    x = found[: model.integers].reshape(*group.shape, parts) > 0.5
    assert (x.sum(axis=2) == 1).all(), "HiGHS returned no integer solution despite a feasible start"
    group = x.argmax(axis=2)
    moved = zip(counts, group[:-1], group[1:], strict=True)
    hops = float(sum(np.sum(pairs * (here[:, None] != there[None, :])) for pairs, here, there in moved))
    return Solution(group, hops, min(bound, hops), time_limited)


def place(
    counts: np.ndarray,
    stages: list[int],
    time_limit_s: float = 30.0,
    seed: int = 0,
    report: Callable[[float], None] = lambda fraction: None,
    clock: Callable[[], float] | None = None,
) -> tuple[np.ndarray, list[Solution]]:
    """Step 4. (GPU of every expert, int64 [layers, E], the solution of each program) for `counts`, [layers-1, E, E].

    `stages`: the parts into which each stage splits a group of the stage before. [nodes, GPUs of a node] is the
    paper's; its published code takes [2, 2, ..] by default. A program may use its share of the time that is left.
    """
    deadline, solutions = time.perf_counter() + time_limit_s, list[Solution]()
    programs = sum(math.prod(stages[:depth]) for depth in range(len(stages)))

    def solve_group(_: np.ndarray, inside: np.ndarray, parts: int, share: float) -> np.ndarray:
        left = max(deadline - time.perf_counter(), 0.0)
        solutions.append(solve(inside, parts, left * share, seed, clock))
        report(len(solutions) / programs)
        return solutions[-1].group

    return staged(counts, stages, solve_group), solutions


def staged(counts: np.ndarray, stages: list[int], solve_group: Solve) -> np.ndarray:
    """Split experts into stages[0] groups, each of these into stages[1], and so on; returns int64 [layers, E].

    `solve_group(members, inside, parts, share)` gives int64 [layers, n] for the experts `members`, int64 [layers, n],
    of one group, the counts among them, float64 [layers-1, n, n], and its share of the time that is left. As in the
    paper, only transitions with both ends in a group count within it.
    """
    group, groups = np.zeros((len(counts) + 1, counts.shape[1]), np.int64), 1
    for depth, parts in enumerate(stages):
        finer = group * parts
        for g in range(groups):
            members = np.stack([np.flatnonzero(row == g) for row in group])
            inside = [pairs[np.ix_(a, b)] for pairs, a, b in zip(counts, members[:-1], members[1:], strict=True)]
            share = 1.0 / (len(stages) - depth) / (groups - g)
            found = solve_group(members, np.ascontiguousarray(inside), parts, share)
            np.put_along_axis(finer, members, g * parts + found, axis=1)
        group, groups = finer, groups * parts
    return group


def contiguous(layers: int, experts: int, gpus: int) -> np.ndarray:
    """Rank order, the paper's baseline (DeepSpeed-MoE): expert e on GPU e // (E/gpus), int64 [layers, E]."""
    return np.tile(np.repeat(np.arange(gpus), experts // gpus), (layers, 1))

"""Where to put experts so that tokens stay where they are (ExFlow, arXiv 2401.08383).

A mixture-of-experts model spreads the experts of each layer over GPUs, and in each layer every token travels to its expert.
Routing is not random: a token that visited expert i in layer j visits some experts of layer j+1 far more often than others
(`affinity.py`). Put those on the same GPU and the token has nowhere to go. The paper's integer program (its Eq. 8-12):

    minimise    Σ_k Σ_j R_{k,j}                                        hops of all tokens k after all layers j
    subject to  Σ_i x^p_{i,j} = E/P             for all j, p            each GPU p holds E/P experts of each layer
                Σ_p x^p_{i,j} = 1               for all i, j            each expert sits on one GPU
                R_{k,j} ≥ ±(x^p_{r(k,j),j} - x^p_{r(k,j+1),j+1})         a token hops when its two experts are apart
                x, R binary

It is solved in stages: first P = nodes (hops between nodes cost most), then inside each node P = its GPUs; a machine of more
levels (`levels.py`) has one stage per level, outermost first. A token enters only
by its two experts, so tokens with the same pair share one R weighted by their number; this loses nothing and shrinks
the program from tokens · layers to E² · layers. `program.py` hands it to HiGHS. Two more methods are the yardsticks,
`contiguous` and `random`, and `affinity` is our own: same objective, but it uses that layers form a chain (`_chain.py`, `_search.py`).
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from repro.exflow import _search, program
from repro.exflow._chain import contiguous
from repro.exflow._search import Budget, Progress
from repro.exflow.evaluate import Cost, evaluate_gpus, total_cost
from repro.exflow.levels import Levels, make_levels
from repro.exflow.trace import Trace
from repro.topology import Topology

METHODS = ("contiguous", "random", "exflow", "exflow-direct", "affinity")


@dataclass(frozen=True)
class Placement:
    """`gpu`: int64 [layers, E], the GPU of every expert; GPUs of one node (of one unit of any level) are consecutive.

    `levels`: the machine; None stands for nodes of `gpus_per_node` GPUs, with hops that cost 1 inside and 2 between them.
    `note` says in words how it was found, and where a limit cut the search. `optimal`: proven to have the fewest hops on the
    counts it was given. `mip_gap`: worst relative gap that the solver reports for a stage of `exflow`, None for other methods.
    """

    gpu: np.ndarray
    gpus: int
    gpus_per_node: int
    method: str
    note: str = ""
    optimal: bool = False
    time_limited: bool = False
    mip_gap: float | None = None
    seconds: float = 0.0
    levels: Levels | None = None

    @property
    def machine(self) -> Levels:
        """The levels of the machine, also when `levels` leaves them to the default."""
        return self.levels or make_levels(self.gpus, self.gpus_per_node)

    @property
    def node(self) -> np.ndarray:
        """int64 [layers, E]: the node of every expert."""
        return self.gpu // self.gpus_per_node


def place(
    counts: np.ndarray,
    gpus: int | Topology,
    gpus_per_node: int | None = None,
    method: str = "affinity",
    seed: int = 0,
    time_limit_s: float = 30.0,
    rounds: int = 60,
    progress: Progress | None = None,
    *,
    costs: Sequence[float] | None = None,
) -> Placement:
    """Place the experts of `counts` (transition counts, [layers-1, E, E]) on P GPUs, E/P per GPU and layer.

    `gpus`: their number P, in nodes of `gpus_per_node` (None: one node), or a topology of any depth, innermost level first.
    `costs`: what a hop costs at each level, innermost first; default 1, 2, 3, .... `method`: one of METHODS.
      contiguous     rank order, what DeepSpeed-MoE does
      random         a random balanced placement
      exflow         the paper's integer program, nodes first, then the GPUs of each node, each by halving again and again: the
                     published solver's default (`use_bipart`); counts that are no power of two split by their prime factors
      exflow-direct  the same program with one stage per level, into all nodes at once and into all GPUs of a node at once
      affinity       our search; exact (`optimal`) on one level with one expert per GPU or few partitions (E = 8)
    `seed` and `rounds` (of local search) fix the result of `affinity` unless `time_limit_s` cuts it short; `exflow` depends on the
    time limit wherever it hits it. Both limits are reported in the result. Compilation is not counted in `seconds`.
    `progress` is called with the fraction done and a text.

    Raises ValueError when E is no multiple of P, the levels or costs are none (`levels.make_levels`), or the counts are not
    such counts.
    """
    levels = make_levels(gpus, gpus_per_node, costs)
    _check(counts, levels.gpus, method, time_limit_s, rounds)
    counts = np.ascontiguousarray(counts, np.float64)
    layers, experts = len(counts) + 1, counts.shape[1]
    if method == "affinity":
        _search.compile_kernels()
    start = time.perf_counter()
    budget = Budget(rounds, start + time_limit_s, progress)
    found: dict = {}
    if method == "contiguous":
        gpu = contiguous(layers, experts, levels.gpus)
    elif method == "random":
        gpu = np.random.default_rng(seed).permuted(contiguous(layers, experts, levels.gpus), axis=1)
    elif method == "affinity":
        gpu, found = _affinity(counts, levels, seed, budget)
    else:
        stages = _stages(levels)
        if method == "exflow":
            stages = [factor for parts in stages for factor in _prime_factors(parts)] or [1]
        gpu, found = _exflow(counts, stages, seed, budget)
    assert all((np.bincount(row, minlength=levels.gpus) == experts // levels.gpus).all() for row in gpu)
    budget.span, budget.text = (1.0, 1.0), "placed"
    budget.report(1.0)
    per_node = levels.spans[levels.node_level]
    return Placement(gpu, levels.gpus, per_node, method, **found, seconds=time.perf_counter() - start, levels=levels)


def evaluate(placement: Placement, routing: Trace | np.ndarray) -> Cost:
    """Hops and load of `placement` on a trace (held out, if you ask for an honest number) or on transition counts."""
    return evaluate_gpus(placement.gpu, placement.machine, routing)


def _stages(levels: Levels) -> list[int]:
    """Parts into which each level splits a unit of the level outside it, outermost first; [1] for a single GPU."""
    return [size for size in reversed(levels.sizes) if size > 1] or [1]


Solve = Callable[[np.ndarray, int, float], np.ndarray]


def staged(counts: np.ndarray, stages: list[int], solve: Solve) -> np.ndarray:
    """Split experts into stages[0] groups, each group into stages[1], and so on: nodes first, then the GPUs of each node.

    `solve(counts inside a group, parts, share)` gives int [layers, n]; `share` is the part of the remaining time that it may use.
    As in the paper, only transitions with both ends in the group count within it. Returns int64 [layers, E].
    """
    layers, experts = len(counts) + 1, counts.shape[1]
    group, groups = np.zeros((layers, experts), np.int64), 1
    for depth, parts in enumerate(stages):
        finer = group * parts
        for g, (members, inside) in enumerate(_groups(counts, group, groups)):
            share = 1.0 / ((len(stages) - depth - 1) + 1) / (groups - g)
            np.put_along_axis(finer, members, g * parts + solve(inside, parts, share), axis=1)
        group, groups = finer, groups * parts
    return group


def _groups(counts: np.ndarray, group: np.ndarray, groups: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each group: its experts, int [layers, n], and the counts among them, float64 [layers-1, n, n]."""
    for g in range(groups):
        members = np.stack([np.flatnonzero(row == g) for row in group])
        inside = [pairs[np.ix_(a, b)] for pairs, a, b in zip(counts, members[:-1], members[1:], strict=True)]
        yield members, np.ascontiguousarray(inside)


def _prime_factors(number: int) -> list[int]:
    """[2, 2, 3] for 12; [] for 1."""
    for factor in range(2, number + 1):
        if number % factor == 0:
            return [factor, *_prime_factors(number // factor)]
    return []


def _exflow(counts: np.ndarray, stages: list[int], seed: int, budget: Budget) -> tuple[np.ndarray, dict]:
    """The paper's staged integer program; each stage may use its share of the time that is left."""
    solved: list[program.Solution] = []
    total = sum(math.prod(stages[:depth]) for depth in range(len(stages)))

    def solve(inside: np.ndarray, parts: int, share: float) -> np.ndarray:
        left = max(budget.deadline - time.perf_counter(), 0.0)
        solved.append(program.solve(inside, parts, left * share, seed))
        budget.report(len(solved) / total)
        return solved[-1].group

    gpu = staged(counts, stages, solve)
    limited = [s for s in solved if s.time_limited]
    gap = max(s.gap for s in solved)
    note = f"{len(solved)} integer programs, {len(solved) - len(limited)} solved to optimality"
    if limited:
        note += f", {len(limited)} stopped at the time limit with a gap of up to {gap:.0%}"
    return gpu, {
        "note": note,
        "mip_gap": gap,
        "time_limited": bool(limited),
        "optimal": len(solved) == 1 and not limited,
    }


def _affinity(counts: np.ndarray, levels: Levels, seed: int, budget: Budget) -> tuple[np.ndarray, dict]:
    """Outermost level first, inside each unit the next; with several levels a polish at the level costs follows."""
    proofs: list[bool] = []
    deadline = budget.deadline
    stages = _stages(levels)
    parts_of_job = sum(math.prod(stages[:depth]) for depth in range(len(stages))) + (len(stages) > 1)  # the polish

    def solve(inside: np.ndarray, parts: int, share: float) -> np.ndarray:
        now = time.perf_counter()
        budget.deadline = now + (deadline - now) * share
        budget.span = (len(proofs) / parts_of_job, (len(proofs) + 1) / parts_of_job)
        budget.text = f"placing on {parts} of {levels.gpus} GPUs" if len(stages) > 1 else "placing"
        group, exact = _search.search(inside, parts, budget, seed + len(proofs))
        proofs.append(exact)
        return group

    gpu = staged(counts, stages, solve)
    budget.deadline = deadline
    if len(stages) > 1:
        gpu = _polished(counts, gpu, levels.distances(), budget, seed)
    optimal = len(stages) == 1 and proofs[0]
    note = (
        "exact"
        if optimal
        else "local search" + (", a stage stopped at its share of the time limit" if budget.cut else "")
    )
    return gpu, {"note": note, "optimal": optimal, "time_limited": budget.cut}


def _polished(counts: np.ndarray, gpu: np.ndarray, distance: np.ndarray, budget: Budget, seed: int) -> np.ndarray:
    """Local search over all GPUs at once: stages cannot see that a worse node cut may save more hops inside nodes."""
    budget.text = "polishing over nodes and GPUs"
    state = _search.random_state(np.random.default_rng(seed))
    best, best_cost = gpu, total_cost(counts, gpu, distance)
    for hot in (0.0, 0.1, 0.2):  # a cool annealing keeps the staged solution's structure
        trial = gpu.copy()
        if hot > 0.0:
            swaps = _search.SWAPS_PER_EXPERT * 5 * gpu.size
            trial = _search.anneal(counts, best, distance, swaps, budget, state, hot)
        cost = _search.improve(counts, trial, distance, budget, state, flat=False)
        if cost < best_cost:
            best, best_cost = trial, cost
    return best


def _check(counts: np.ndarray, gpus: int, method: str, time_limit_s: float, rounds: int) -> None:
    if counts.ndim != 3 or counts.shape[1] != counts.shape[2] or 0 in counts.shape:
        raise ValueError(f"transition counts have shape {counts.shape}, must be [layers-1, E, E]")
    if not np.isfinite(counts).all() or (counts < 0).any() or not counts.any():
        raise ValueError("transition counts must be finite, not negative and not all zero")
    if counts.shape[1] % gpus:
        raise ValueError(f"{counts.shape[1]} experts per layer cannot be shared evenly by {gpus} GPUs")
    if method not in METHODS:
        raise ValueError(f"unknown placement method {method!r}, allowed: {', '.join(METHODS)}")
    if not time_limit_s > 0 or rounds < 0:
        raise ValueError(f"time_limit_s is {time_limit_s}, must be positive; rounds is {rounds}, must be 0 or more")

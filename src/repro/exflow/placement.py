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
levels (`levels.py`) has one stage per level, outermost first. A token enters only by its two experts, so tokens with the same
pair share one R weighted by their number; this loses nothing and shrinks the program from tokens · layers to E² · layers.
`program.py` hands it to HiGHS. Two more methods are the yardsticks, `contiguous` and `random`, and `affinity` is our own: same
objective and stages, but it uses that layers form a chain (`search/`), and it can limit the tokens of the busiest
GPU (`search/balance.py`), which the paper's balance of expert counts does not.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from repro.exflow import program
from repro.exflow.evaluate import Cost, evaluate_gpus, loads
from repro.exflow.levels import Levels, make_levels
from repro.exflow.search import balance, portfolio
from repro.exflow.search.chain import contiguous
from repro.exflow.search.portfolio import Budget, Progress
from repro.exflow.search.problem import Problem
from repro.exflow.trace import Trace
from repro.topology import Topology

METHODS = ("contiguous", "random", "exflow", "exflow-direct", "affinity")
ROUNDS, TIME_LIMIT_S = 60, 30.0  # when `place` is given neither


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
    max_load: float | None = None

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
    time_limit_s: float | None = None,
    rounds: int | None = None,
    progress: Progress | None = None,
    *,
    costs: Sequence[float] | None = None,
    max_load: float | None = None,
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

    How long `affinity` searches, where it is not exact: with `time_limit_s` alone, it uses all of the time and fits its steps to it.
    With `rounds`, it makes so many rounds in each stage; `seed` and `rounds` then fix the result, unless a time limit cuts it
    short (`time_limited`). With neither, 60 rounds in at most 30 s. `exflow` takes the time limit (30 s) and depends on it
    wherever it hits it. Compilation is not counted in `seconds`. `progress` is called with the fraction done and a text.

    `max_load` (affinity only): the busiest GPU of each layer gets at most so many times the even share of the tokens of `counts`;
    1.2 allows 20 % more. The result always keeps it (up to rounding, 1e-9); ValueError names the layer and its hottest expert
    where no placement that does is found. On other tokens than these the load may be higher: leave some room.

    Raises ValueError when E is no multiple of P, the levels or costs are none (`levels.make_levels`), or the counts are not
    such counts.
    """
    levels = make_levels(gpus, gpus_per_node, costs)
    _check(counts, levels.gpus, method, time_limit_s, rounds, max_load)
    if rounds is None and (time_limit_s is None or method != "affinity"):
        rounds = ROUNDS
    counts = np.ascontiguousarray(counts, np.float64)
    layers, experts = len(counts) + 1, counts.shape[1]
    if method == "affinity":
        portfolio.compile_kernels()
    start = time.perf_counter()
    budget = Budget(rounds, start + (TIME_LIMIT_S if time_limit_s is None else time_limit_s), progress)
    found: dict = {}
    if method == "contiguous":
        gpu = contiguous(layers, experts, levels.gpus)
    elif method == "random":
        gpu = np.random.default_rng(seed).permuted(contiguous(layers, experts, levels.gpus), axis=1)
    elif method == "affinity":
        gpu, found = _affinity(counts, levels, seed, budget, max_load)
    else:
        stages = _stages(levels)
        if method == "exflow":
            stages = [factor for parts in stages for factor in _prime_factors(parts)] or [1]
        gpu, found = _exflow(counts, stages, seed, budget)
    assert all((np.bincount(row, minlength=levels.gpus) == experts // levels.gpus).all() for row in gpu)
    budget.span, budget.text = (1.0, 1.0), "placed"
    budget.report(1.0)
    found |= {"seconds": time.perf_counter() - start, "levels": levels, "max_load": max_load}
    return Placement(gpu, levels.gpus, levels.spans[levels.node_level], method, **found)


def evaluate(placement: Placement, routing: Trace | np.ndarray) -> Cost:
    """Hops and load of `placement` on a trace (held out, if you ask for an honest number) or on transition counts."""
    return evaluate_gpus(placement.gpu, placement.machine, routing)


def _stages(levels: Levels) -> list[int]:
    """Parts into which each level splits a unit of the level outside it, outermost first; [1] for a single GPU."""
    return [size for size in reversed(levels.sizes) if size > 1] or [1]


Solve = Callable[[np.ndarray, np.ndarray, int, float], np.ndarray]


def staged(counts: np.ndarray, stages: list[int], solve: Solve) -> np.ndarray:
    """Split experts into stages[0] groups, each group into stages[1], and so on: nodes first, then the GPUs of each node.

    `solve(members, inside, parts, share)` gives int [layers, n] for the experts `members`, int [layers, n], of one group and the
    counts among them, float64 [layers-1, n, n]; `share` is the part of the remaining time that it may use.
    As in the paper, only transitions with both ends in the group count within it. Returns int64 [layers, E].
    """
    layers, experts = len(counts) + 1, counts.shape[1]
    group, groups = np.zeros((layers, experts), np.int64), 1
    for depth, parts in enumerate(stages):
        finer = group * parts
        for g in range(groups):
            members = np.stack([np.flatnonzero(row == g) for row in group])
            inside = [pairs[np.ix_(a, b)] for pairs, a, b in zip(counts, members[:-1], members[1:], strict=True)]
            share = 1.0 / ((len(stages) - depth - 1) + 1) / (groups - g)
            found = solve(members, np.ascontiguousarray(inside), parts, share)
            np.put_along_axis(finer, members, g * parts + found, axis=1)
        group, groups = finer, groups * parts
    return group


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

    def solve(_: np.ndarray, inside: np.ndarray, parts: int, share: float) -> np.ndarray:
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


def _affinity(
    counts: np.ndarray, levels: Levels, seed: int, budget: Budget, max_load: float | None
) -> tuple[np.ndarray, dict]:
    """Outermost level first, inside each unit the next; with several levels a polish at the level costs follows.

    The polish sees what stages cannot: that a worse cut between nodes may save more hops inside them.
    """
    weight, cap = loads(counts), None
    if max_load is not None:
        balance.check_limit(weight, levels.gpus, max_load)
        cap = max_load * weight.sum(axis=1) / levels.gpus
    proofs: list[bool] = []
    deadline, stages = budget.deadline, _stages(levels)
    solves = sum(math.prod(stages[:depth]) for depth in range(len(stages)))
    jobs = solves + (len(stages) > 1)  # the polish

    def begin(job: int, share: float, text: str) -> None:
        now = time.perf_counter()
        budget.deadline = now + (deadline - now) * share
        budget.span, budget.text = (job / jobs, (job + 1) / jobs), text

    def solve(members: np.ndarray, inside: np.ndarray, parts: int, share: float) -> np.ndarray:
        begin(len(proofs), share, f"placing on {parts} of {levels.gpus} GPUs" if jobs > 1 else "placing")
        own = np.take_along_axis(weight, members, axis=1)
        within = (
            None if cap is None else cap * (levels.gpus * members.shape[1] // counts.shape[1] // parts)
        )  # of a part
        group, exact = portfolio.search(inside, parts, budget, seed + len(proofs), within, own)
        proofs.append(exact)
        return group

    gpu = staged(counts, stages, solve)
    problem = Problem(counts, levels.distances(), cap, weight)
    if len(stages) > 1:
        begin(solves, 1.0, "polishing over all levels")
        gpu = portfolio.rounds(problem, budget, np.random.default_rng(seed), balance.repaired(problem, gpu))
    assert problem.fits(gpu).all()
    optimal = len(stages) == 1 and proofs[0]
    note = "exact" if optimal else "local search" + (", stopped at the time limit" if budget.cut else "")
    return gpu, {"note": note, "optimal": optimal, "time_limited": budget.cut}


def _check(
    counts: np.ndarray, gpus: int, method: str, time_limit_s: float | None, rounds: int | None, max_load: float | None
) -> None:
    if counts.ndim != 3 or counts.shape[1] != counts.shape[2] or 0 in counts.shape:
        raise ValueError(f"transition counts have shape {counts.shape}, must be [layers-1, E, E]")
    if not np.isfinite(counts).all() or (counts < 0).any() or not counts.any():
        raise ValueError("transition counts must be finite, not negative and not all zero")
    if counts.shape[1] % gpus:
        raise ValueError(f"{counts.shape[1]} experts per layer cannot be shared evenly by {gpus} GPUs")
    if method not in METHODS:
        raise ValueError(f"unknown placement method {method!r}, allowed: {', '.join(METHODS)}")
    if time_limit_s is not None and not 0 < time_limit_s < math.inf:
        raise ValueError(f"time_limit_s is {time_limit_s}, must be positive and finite")
    if rounds is not None and rounds < 0:
        raise ValueError(f"rounds is {rounds}, must be 0 or more")
    if max_load is not None and method != "affinity":
        raise ValueError(f"max_load is {max_load}: only method affinity keeps a load limit, found {method!r}")

"""Where to put experts so that tokens stay where they are: one call, five methods.

Beside ExFlow's own placement (`paper.py`, read it first) stand two yardsticks, `contiguous` and `random`, and
`affinity`, our search (`search/`): same objective and stages, but it uses that layers form a chain, and it can limit
the tokens of the busiest GPU. A machine has one stage per level (`levels.py`), outermost first.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from repro.exflow import paper
from repro.exflow.evaluate import (
    Cost,
    busiest,
    check_counts,
    check_gpu,
    check_shapes,
    distances,
    loads,
    total_cost,
)
from repro.exflow.levels import Levels, make_levels
from repro.exflow.search import balance, portfolio
from repro.exflow.search.portfolio import Budget, Clock, Progress, check_effort
from repro.exflow.search.problem import Problem
from repro.exflow.trace import Trace, transitions
from repro.topology import Topology

PROVEN = 1e-9  # relative gap of an integer program that rounding explains; HiGHS itself stops at 1e-4
ROUNDS, TIME_LIMIT_S = 60, 30.0  # when `place` is given neither; integer programs also where rounds are given


@dataclass(frozen=True)
class Placement:
    """`gpu`: int64 [layers, E], the GPU of every expert; GPUs of one node (of one unit of any level) are consecutive.

    `levels`: the machine; None: nodes of `gpus_per_node` GPUs, hops cost 1 inside and 2 between them. `note` says in
    words how it was found. `optimal`: proven to have the fewest hops on the counts it was given, within `max_load`.
    `time_limited`: a time limit or clock cut the search. `mip_gap`: worst relative gap among the integer programs of
    `exflow` and `exflow-direct`, None for other methods. `seconds`: of the search. `max_load`: limit that it keeps,
    busiest GPU over the even share; None: none is promised. ValueError unless `gpu` is integer [layers, E], 0 to
    gpus - 1.
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

    def __post_init__(self) -> None:
        check_gpu(self.gpu, self.gpus)

    @property
    def machine(self) -> Levels:
        """The levels of the machine, also when `levels` leaves them to the default."""
        return self.levels or make_levels(self.gpus, self.gpus_per_node)

    @property
    def node(self) -> np.ndarray:
        """int64 [layers, E]: the node of every expert."""
        return self.gpu // self.gpus_per_node


@dataclass(frozen=True)
class Task:
    """What a method gets: transition counts [layers-1, E, E], the machine, and its limits."""

    counts: np.ndarray
    levels: Levels
    seed: int
    budget: Budget
    max_load: float | None
    where_possible: bool = False

    @property
    def stages(self) -> list[int]:
        """Parts into which each level splits a unit of the level outside it, outermost first; [1] for a single GPU."""
        return [size for size in reversed(self.levels.sizes) if size > 1] or [1]


Found = tuple[np.ndarray, dict[str, Any]]  # the GPU of every expert, and further fields of its Placement


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
    where_possible: bool = False,
    clock: Clock | None = None,
) -> Placement:
    """Place the experts of `counts` (transition counts, [layers-1, E, E]) on P GPUs, E/P per GPU and layer.

    `gpus`: their number P, in nodes of `gpus_per_node` (None: one node), or a topology of any depth. `costs`: what a
    hop costs at each level, innermost first; default 1, 2, 3, .... `method`: one of METHODS.
      contiguous     rank order, what DeepSpeed-MoE does
      random         a random balanced placement
      exflow         the paper's integer program, nodes first, then the GPUs of each node, each by halving again and
                     again, the published default (`use_bipart`); other counts split by their prime factors
      exflow-direct  the same program with one stage per level: into all nodes at once, then into all GPUs of a node
      affinity       our search; exact (`optimal`) on one level with one expert per GPU or few partitions (E = 8)

    `affinity` on one level is never worse than rank order, also when it is cut at once or `rounds` is 0, unless a load
    limit forbids rank order. Where it is not exact, it uses all of `time_limit_s` if that is given alone. `rounds`: so many in each
    stage; `seed` and `rounds` then fix the result, unless a time limit cuts it short (`time_limited`). With neither, 60
    rounds in at most 30 s. `exflow` takes the time limit (30 s) and depends on it wherever it hits it. Compilation is
    not counted in `seconds`. `progress` is called with the fraction done and a text. `clock` gives the seconds that
    are left of a longer job, and is asked every few milliseconds: where it says 0, the best placement so far is
    returned.

    `max_load` (affinity only): the busiest GPU of each layer gets at most so many times the even share of the tokens of
    `counts` (up to rounding, 1e-9). ValueError names the layer and its hottest expert where no such placement is found;
    with `where_possible`, such a layer is limited to the lowest load that is found instead.

    Raises ValueError when E is no multiple of P, `levels.make_levels` refuses the machine or the costs, `counts` are no
    transition counts, another argument is out of range, or an integer program is too large (`paper.LARGEST_PROGRAM`).
    """
    levels = make_levels(gpus, gpus_per_node, costs)
    counts = check_counts(counts)
    _check(counts.shape[1], levels.gpus, method, time_limit_s, rounds, max_load)
    limit = time_limit_s or (TIME_LIMIT_S if rounds is None or method.startswith("exflow") else math.inf)
    if rounds is None and (time_limit_s is None or method != "affinity"):
        rounds = ROUNDS
    if method == "affinity":
        portfolio.compile_kernels()
    start = time.perf_counter()
    budget = Budget(rounds, start + limit, progress, clock=clock)
    task = Task(counts, levels, seed, budget, max_load, where_possible)
    with threadpool_limits(1, user_api="blas"):  # matrices are small: more threads wait more than they compute
        gpu, found = METHODS[method](task)
    assert all((np.bincount(row, minlength=levels.gpus) == gpu.shape[1] // levels.gpus).all() for row in gpu)
    budget.span, budget.text = (1.0, 1.0), "placed"
    budget.report(1.0)
    promised = None if where_possible else max_load
    found |= {"seconds": time.perf_counter() - start, "levels": levels, "max_load": promised}
    return Placement(gpu, levels.gpus, levels.spans[levels.node_level], method, **found)


def evaluate(placement: Placement, routing: Trace | np.ndarray) -> Cost:
    """Hops and load of `placement` on a trace or, which gives the same, on its transition counts. With top-k routing a
    hop is a pair of experts of weight 1/k². ValueError when shapes disagree, or `routing` is neither."""
    gpu, levels = placement.gpu, placement.machine
    counts = transitions(routing) if isinstance(routing, Trace) else check_counts(routing)
    check_shapes(gpu.shape, (len(counts) + 1, counts.shape[-1]))
    edges, travelled = len(gpu) - 1, levels.hop_levels()
    tokens = counts.sum() / edges
    by_level = tuple(total_cost(counts, gpu, travelled == level) / tokens for level in range(len(levels.sizes)))
    intra, inter = sum(by_level[: levels.node_level + 1]), sum(by_level[levels.node_level + 1 :])
    most = busiest(loads(counts), gpu, levels.gpus)
    return Cost(
        hops_per_token=intra + inter,
        crossing_fraction=(intra + inter) / edges,
        node_crossing_fraction=inter / edges,
        intra_hops=intra,
        inter_hops=inter,
        max_load=float(most.mean()),
        max_load_worst_layer=float(most.max()),
        level_hops=by_level,
        weighted_hops=sum(cost * hops for cost, hops in zip(levels.costs, by_level, strict=True)),
    )


def _programs(task: Task, stages: list[int]) -> Found:
    budget = task.budget
    gpu, solved = paper.place(task.counts, stages, budget.left(), task.seed, budget.report, budget.clock)
    limited, others = ([s for s in solved if s.time_limited is cut] for cut in (True, False))
    near = [s.gap for s in others if s.gap > PROVEN]
    gap = max(s.gap for s in solved)
    note = f"{len(solved)} integer programs, {len(others) - len(near)} solved to optimality"
    if near:
        note += f", {len(near)} to the solver's tolerance, with a gap of up to {max(near):.1e}"
    if limited:
        note += f", {len(limited)} stopped at the time limit with a gap of up to {gap:.0%}"
    optimal = len(solved) == 1 and not limited and not near
    return gpu, {"note": note, "mip_gap": gap, "time_limited": bool(limited), "optimal": optimal}


def _prime_factors(number: int) -> list[int]:
    """[2, 2, 3] for 12; [] for 1."""
    for factor in range(2, number + 1):
        if number % factor == 0:
            return [factor, *_prime_factors(number // factor)]
    return []


def _affinity(task: Task) -> Found:
    """Outermost level first, inside each unit the next. With several levels a polish at the level costs follows: a
    worse cut between nodes may save more hops inside them."""
    counts, levels, budget, stages = task.counts, task.levels, task.budget, task.stages
    weight, cap = loads(counts), None
    if task.max_load is not None:
        limit: float | np.ndarray = task.max_load
        if task.where_possible:
            limit = np.maximum(limit, balance.least_max_load(weight, levels.gpus))
        else:
            balance.check_limit(weight, levels.gpus, task.max_load)
        cap = limit * weight.sum(axis=1) / levels.gpus
    proofs: list[bool] = []
    deadline, solves = budget.deadline, sum(math.prod(stages[:depth]) for depth in range(len(stages)))
    jobs = solves + (len(stages) > 1)  # the polish

    def begin(job: int, share: float, text: str) -> None:
        now = time.perf_counter()
        budget.deadline = now + (deadline - now) * share
        budget.span, budget.text = (job / jobs, (job + 1) / jobs), text

    def solve(members: np.ndarray, inside: np.ndarray, parts: int, share: float) -> np.ndarray:
        begin(len(proofs), share, f"placing on {parts} of {levels.gpus} GPUs" if jobs > 1 else "placing")
        own = np.take_along_axis(weight, members, axis=1)
        gpus_of_a_part = levels.gpus * members.shape[1] // counts.shape[1] // parts
        flat = Problem(inside, distances(parts, parts), None if cap is None else cap * gpus_of_a_part, own)
        group, exact = portfolio.search(flat, budget, task.seed + len(proofs))
        proofs.append(exact)
        return group

    gpu = paper.staged(counts, stages, solve)
    problem = Problem(counts, levels.distances(), cap, weight)
    if len(stages) > 1:
        begin(solves, 1.0, "polishing over all levels")
        gpu = portfolio.rounds(problem, budget, np.random.default_rng(task.seed), balance.repaired(problem, gpu))
    assert problem.fits(gpu).all()
    optimal = len(stages) == 1 and proofs[0]
    note = "exact" if optimal else "local search" + (", stopped at the time limit" if budget.cut else "")
    return gpu, {"note": note, "optimal": optimal, "time_limited": budget.cut}


def _contiguous(task: Task) -> Found:
    return paper.contiguous(len(task.counts) + 1, task.counts.shape[1], task.levels.gpus), {}


METHODS: dict[str, Callable[[Task], Found]] = {
    "contiguous": _contiguous,
    "random": lambda task: (np.random.default_rng(task.seed).permuted(_contiguous(task)[0], axis=1), {}),
    "exflow": lambda task: _programs(task, [f for parts in task.stages for f in _prime_factors(parts)] or [1]),
    "exflow-direct": lambda task: _programs(task, task.stages),
    "affinity": _affinity,
}


def _check(
    experts: int, gpus: int, method: str, time_limit_s: float | None, rounds: int | None, max_load: float | None
) -> None:
    if experts % gpus:
        raise ValueError(f"{experts} experts per layer cannot be shared evenly by {gpus} GPUs")
    if method not in METHODS:
        raise ValueError(f"unknown placement method {method!r}, allowed: {', '.join(METHODS)}")
    check_effort(time_limit_s, rounds)
    balance.check_max_load(max_load)
    if max_load is not None and method != "affinity":
        raise ValueError(f"max_load is {max_load}: only method affinity keeps a load limit, found {method!r}")

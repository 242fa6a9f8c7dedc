"""Slots of experts for a server that sends each copy of an expert an equal part of its tokens: fewer hops than EPLB at
no more load.

How many copies an expert has is EPLB's choice, and so is the load of the busiest rank in each layer: it is the limit.
Where every copy takes an equal part whatever rank a token comes from (vLLM's dispatch), a copy is an expert of its own,
with 1/c of the tokens of its c copies and 1/(c·c') of the tokens that go on to an expert of c' copies. So which rank
holds which copy is the problem that `search/` solves, with as many experts per layer as there are slots; the search
begins with EPLB's own answer.
"""

import numpy as np

from repro.baselines import eplb
from repro.exflow.evaluate import check_counts
from repro.exflow.levels import Levels
from repro.exflow.search import portfolio
from repro.exflow.search.problem import Problem
from repro.exflow.serving.slots import logical_to_physical


def place_slots(
    load: np.ndarray, counts: np.ndarray, slots: int, levels: Levels, groups: int = 1, rounds: int = 20, seed: int = 0
) -> np.ndarray:
    """The expert in each slot, int64 [layers, slots], shared evenly by the ranks of `levels` in their order.

    load     float [layers, E]: tokens of each expert
    counts   float [layers-1, E, E]: tokens that go from an expert to one of the next layer
    groups   of experts, which EPLB packs onto nodes where they share evenly

    In no layer does the busiest rank get more of `load` than under EPLB, and the hops of `counts`, at the costs of
    `levels`, are not more. `seed` and `rounds` fix the result. ValueError for numbers that do not divide, and shapes
    that disagree.
    """
    check_counts(counts)
    if load.shape != (len(counts) + 1, counts.shape[1]):
        raise ValueError(f"load is {load.shape}, transition counts are {counts.shape}: must be of the same experts")
    nodes = levels.gpus // levels.spans[levels.node_level]
    even, _, _ = eplb.rebalance_experts(load, slots, groups, nodes, levels.gpus)
    problem, gpu = _copies(load, counts, even, levels)
    gpu = portfolio.rounds(problem, portfolio.Budget(rounds), np.random.default_rng(seed), gpu)
    assert problem.fits(gpu).all()
    return np.take_along_axis(even, np.argsort(gpu, axis=1, kind="stable"), axis=1)


def _copies(load: np.ndarray, counts: np.ndarray, even: np.ndarray, levels: Levels) -> tuple[Problem, np.ndarray]:
    """The problem of placing the copies in `even` [layers, slots], one expert each, and where EPLB has them."""
    _, copies = logical_to_physical(even)
    part = 1.0 / np.take_along_axis(copies, even, axis=1)
    weight = np.take_along_axis(load, even, axis=1) * part
    edges = zip(counts, even[:-1], even[1:], part[:-1], part[1:], strict=True)
    going = np.array([pairs[np.ix_(a, b)] * own[:, None] * next_ for pairs, a, b, own, next_ in edges])
    gpu = np.tile(np.arange(even.shape[1]) * levels.gpus // even.shape[1], (len(even), 1))
    cap = weight.reshape(len(even), levels.gpus, -1).sum(axis=2).max(axis=1)
    return Problem(going, levels.distances(), cap, weight), gpu

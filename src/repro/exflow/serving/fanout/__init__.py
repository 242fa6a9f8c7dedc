"""Token-level fan-out: how many GPUs a token must visit, and placements with fewer of them, for top-k routing.

With k experts, transition counts weigh each of the k·k pairs 1/k², but a token is sent to a GPU once, however many of
its experts are there. So what it costs is the number of distinct GPUs and nodes, which takes whole tokens to tell. For
k = 1 both are the same (a token visits a new GPU when it hops), and `placement.place` is the better tool.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import csr_array

from repro.exflow.evaluate import check_shapes
from repro.exflow.placement import Placement
from repro.exflow.search.portfolio import Clock, Progress, forever
from repro.exflow.serving.fanout import kernels
from repro.exflow.serving.slots import check_aim
from repro.exflow.trace import Trace, by_layer

OBJECTIVES = ("new_gpus", "gpus")
SWEEP_RATE = 1e7  # tokens · layers · k that sweeps handle per second, about, on one core
FEWEST_SWEEPS = 8  # where these do not fit on all tokens, a sample is searched: tokens are worth more than sweeps
HOT = 0.02  # first temperature, in what one new unit costs the tokens that visit an expert, and ...
COOLED = 0.1  # ... the last one as a share of it
DESCENT = 0.25  # share of the sweeps, at the end, without noise


@dataclass(frozen=True)
class FanOut:
    """Means over the tokens of a trace.

    `gpus`, `nodes`: distinct GPUs and nodes that a token's k experts of one layer occupy, mean over layers (1 to k).
    `new_gpus`, `new_nodes`: those of layer l+1 that the token did not visit in layer l, mean over the transitions (0 to
    k; for k = 1 the crossing fractions of `evaluate.Cost`).
    """

    gpus: float
    nodes: float
    new_gpus: float
    new_nodes: float

    def cost(self, costs: Sequence[float] = (1.0, 2.0), objective: str = "new_gpus") -> float:
        """Per token and transition (`new_gpus`) or layer (`gpus`): costs[0]·GPUs + (costs[1] - costs[0])·nodes, so
        that a hop inside a node costs costs[0] and one between nodes costs[1]. ValueError for any other objective, or costs."""
        check_aim(objective, OBJECTIVES, costs)
        gpus, nodes = (self.new_gpus, self.new_nodes) if objective == "new_gpus" else (self.gpus, self.nodes)
        return costs[0] * gpus + (costs[1] - costs[0]) * nodes


def fan_out(placement: Placement, trace: Trace) -> FanOut:
    """Count the GPUs and nodes that the tokens of `trace` visit; ValueError when layers or experts disagree."""
    check_shapes(placement.gpu.shape, (trace.layers, trace.num_experts))
    visited, new = np.zeros((2, trace.layers)), np.zeros((2, trace.layers - 1))
    for experts in trace.blocks():
        for level, unit in enumerate((placement.gpu, placement.node)):
            before: np.ndarray = np.empty(0, bool)
            for layer, each in enumerate(experts):
                here = _present(_visits(each, trace.num_experts), unit[layer], placement.gpus) > 0
                visited[level, layer] += here.sum()
                if layer > 0:
                    new[level, layer - 1] += (here & ~before).sum()
                before = here
    means = (visited / trace.tokens).mean(axis=1).tolist() + (new / trace.tokens).mean(axis=1).tolist()
    return FanOut(*means)


def place_for_fanout(
    trace: Trace,
    start: Placement,
    objective: str = "new_gpus",
    costs: Sequence[float] = (1.0, 2.0),
    seed: int = 0,
    time_limit_s: float = 30.0,
    sweeps: int = 60,
    tokens: int | None = None,
    progress: Progress | None = None,
    clock: Clock = forever,
) -> Placement:
    """Improve `start` for the tokens of `trace` by swaps of experts within layers.

    `objective` (of OBJECTIVES): `new_gpus` for tokens that stay where their experts are (context-coherent, as ExFlow),
    `gpus` for tokens that return to one home after every layer. Both are weighted as in `FanOut.cost`: `costs` of a GPU
    and of a node.

    A sweep offers every expert of every layer a swap, in a heat bath that cools down and ends in a descent. `tokens`,
    drawn at random, are what it counts on: None takes all, or as many as let a few sweeps fit into `time_limit_s`.
    `seed`, `sweeps` and `tokens` fix the result unless the time limit cuts it. It is never worse than `start` on all
    tokens of `trace`. `progress` is called with the fraction done and a text; `clock` gives the seconds that are left of
    a longer job. The search knows no load: the result need not keep a limit that `start` keeps, and has no `max_load`,
    unless it is `start` itself.

    Raises ValueError when layers or experts disagree, a token names an expert of a layer twice, or an argument is out
    of range.
    """
    check_shapes(start.gpu.shape, (trace.layers, trace.num_experts))
    check_aim(objective, OBJECTIVES, costs)
    if not time_limit_s > 0 or min(sweeps, 1 if tokens is None else tokens) < 1:
        given = f"time_limit_s is {time_limit_s}, must be positive; sweeps is {sweeps} and tokens {tokens}"
        raise ValueError(f"{given}, must be at least 1")
    if tokens is None:
        fit = time_limit_s * SWEEP_RATE / (FEWEST_SWEEPS * trace.layers * trace.k)
        tokens = int(min(fit, trace.tokens))  # a limit may be infinite
    sample = trace.sample(max(1, min(tokens, trace.tokens)), seed)
    search = _Search(sample, start, objective, costs)
    search.sweep(start.gpu.copy(), 0, 0.0, np.random.default_rng(seed))  # compile before the clock starts
    began = time.perf_counter()
    gpu, cut = search.anneal(start.gpu, sweeps, began + time_limit_s, np.random.default_rng(seed), progress, clock)
    found = replace(start, gpu=gpu, method="fan-out", optimal=False, mip_gap=None, time_limited=cut, max_load=None)
    before, after = (fan_out(each, trace).cost(costs, objective) for each in (start, found))
    if after > before:  # the sample was too small to tell
        found, after = replace(found, gpu=start.gpu.astype(np.int64), max_load=start.max_load), before
    note = f"{objective} on {sample.tokens} of {trace.tokens} tokens: cost {before:.4f} -> {after:.4f} on all"
    return replace(found, note=note, seconds=time.perf_counter() - began)


class _Search:
    """The tokens of all layers, and what a sweep over one of them needs to know of its neighbours."""

    def __init__(self, sample: Trace, start: Placement, objective: str, costs: Sequence[float]) -> None:
        self.experts = experts = by_layer(sample.experts)
        if (np.diff(np.sort(experts, axis=2), axis=2) == 0).any():
            raise ValueError(f"{sample.source}: a token names an expert of a layer twice")
        self.visits = [_visits(each, sample.num_experts).tocsc() for each in experts]
        self.spans, self.gpus = (1, start.gpus_per_node), start.gpus
        self.weight = np.array([costs[0], costs[1] - costs[0]], float)
        self.chained = objective == "new_gpus"
        self.hot = HOT * costs[-1] * sample.tokens * sample.k / sample.num_experts

    def anneal(
        self,
        start: np.ndarray,
        sweeps: int,
        deadline: float,
        rng: np.random.Generator,
        progress: Progress | None,
        clock: Clock,
    ) -> tuple[np.ndarray, bool]:
        """(best placement at the end of a sweep, whether the deadline came first); cools by sweeps or time."""
        gpu = best = np.ascontiguousarray(start, np.int64)
        began, gained, most, elapsed = time.perf_counter(), 0.0, 0.0, 0.0
        for sweep in range(sweeps):
            gpu, cooling = gpu.copy(), max(sweep / sweeps, elapsed) / (1 - DESCENT)
            temperature = self.hot * COOLED**cooling if cooling < 1 else 0.0
            for step, layer in enumerate(rng.permutation(len(gpu))):
                gained += self.sweep(gpu, layer, temperature, rng)
                elapsed = (time.perf_counter() - began) / (deadline - began) if clock() > 0 else math.inf
                if progress is not None:
                    share = (sweep + (step + 1) / len(gpu)) / sweeps
                    progress(min(max(share, elapsed), 1.0), "placing for fan-out")
                if elapsed >= 1:
                    break
            if gained > most + 1e-9:
                best, most = gpu, gained
            if elapsed >= 1:
                return best, True
        return best, False

    def sweep(self, gpu: np.ndarray, layer: int, temperature: float, rng: np.random.Generator) -> float:
        """Improve `gpu[layer]` in place; returns the cost gained, summed over the sample's tokens."""
        visits, shape = self.visits[layer], (gpu.shape[1], self.gpus)
        noise = rng.gumbel(0.0, temperature, shape) if temperature > 0 else np.zeros(shape)
        tables = (self.experts[layer], *_tables(visits, self._visit_costs(gpu, layer), self._units(gpu[layer])))
        return kernels.improve_layer(tables, visits.indptr, visits.indices, gpu[layer], self.weight, noise)

    def _units(self, gpu: np.ndarray) -> np.ndarray:
        """int64 [levels, E]: GPU and node of every expert of a layer."""
        return np.stack([gpu // span for span in self.spans])

    def _visit_costs(self, gpu: np.ndarray, layer: int) -> np.ndarray:
        """`visit` of `kernels.py` for a layer: what its neighbours make of the cost of each visit."""
        layers, tokens, _ = self.experts.shape
        arrives = not (self.chained and layer == 0)  # where nobody arrives, nothing is paid for it
        visit = np.full((len(self.spans), tokens, self.gpus), arrives, np.int8)
        for near in (layer - 1, layer + 1):
            if self.chained and 0 <= near < layers:
                for cost, unit in zip(visit, self._units(gpu[near]), strict=True):
                    met = _present(self.visits[near], unit, self.gpus) > 0
                    if near < layer:
                        cost *= ~met
                    else:
                        cost -= met  # a unit visited here is not new there
        return visit


def _visits(experts: np.ndarray, count: int) -> csr_array:
    """int16 [T, E]: 1 where a token visits an expert."""
    tokens, k = experts.shape
    return csr_array((np.ones(tokens * k, np.int16), experts.ravel(), np.arange(tokens + 1) * k), (tokens, count))


def _present(visits: csr_array, unit: np.ndarray, units: int) -> np.ndarray:
    """int16 [T, units]: how many of its experts a token has in each unit, for the `unit` [E] of every expert."""
    return visits @ np.eye(units, dtype=np.int16)[unit]


def _tables(visits: csr_array, visit: np.ndarray, unit_of: np.ndarray) -> kernels.Tables:
    """(visit, unit_of, present, join, leave) of `kernels.py`."""
    present = np.stack([_present(visits, unit, visit.shape[2]) for unit in unit_of])
    new, alone = (np.multiply(visit, present == count, dtype=np.int32) for count in (0, 1))
    join = np.stack([visits.T @ each for each in new])
    leave = np.stack([-(visits.T @ each)[np.arange(len(u)), u] for each, u in zip(alone, unit_of, strict=True)])
    return visit, unit_of, present, join, leave

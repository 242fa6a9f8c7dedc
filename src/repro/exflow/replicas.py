"""Copies of experts on more than one GPU, beside a placement: fewer hops, or a less loaded busiest GPU.

Servers give a GPU more slots than E/P per layer and fill the rest with redundant experts. A token on GPU g that is routed to an
expert uses the copy on g; if there is none, one on its node; if there is none, any. Where several are equally near, the
(g mod their number)-th in GPU order: so GPUs share them evenly and the way is fixed, as in SGLang's static dispatch (which draws
where we count). The way of a token hence depends on all the copies it met before, and is counted by walking it through the layers.
It starts on GPU (token's number mod P), and the way into the first layer is no hop, as in `evaluate.py`.

Top-1 routing, as in the paper.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from repro.exflow.export import physical_to_logical
from repro.exflow.placement import Placement
from repro.exflow.trace import Trace

OBJECTIVES = ("hops", "load")
TRIES = 4  # experts that are tried for a slot before it gets none


@dataclass(frozen=True)
class Replicas:
    """`physical_to_logical`: int64 [layers, slots of all GPUs], the expert in each slot, as vLLM and SGLang number them: GPU g has slots
    g·S to (g+1)·S-1 of S = slots / gpus. GPUs of one node are consecutive.

    A second copy of an expert on one GPU changes nothing: it fills a slot for which no copy helps. ValueError when the slots do
    not share evenly, or an expert (0 to the highest named) has no copy in a layer.
    """

    physical_to_logical: np.ndarray
    gpus: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        slots = self.physical_to_logical.shape[1]
        if self.gpus < 1 or slots % self.gpus:
            raise ValueError(f"{slots} slots per layer cannot be shared evenly by {self.gpus} GPUs")
        if self.gpus_per_node < 1 or self.gpus % self.gpus_per_node:
            raise ValueError(f"{self.gpus} GPUs do not make whole nodes of {self.gpus_per_node}")
        for layer, row in enumerate(self.physical_to_logical):
            missing = np.setdiff1d(np.arange(self.num_experts), row)
            if len(missing) or row.min() < 0:
                raise ValueError(f"layer {layer}: experts {missing.tolist()} have no copy, or a slot is negative")

    @property
    def num_experts(self) -> int:
        return int(self.physical_to_logical.max()) + 1

    @property
    def slots_per_gpu(self) -> int:
        return self.physical_to_logical.shape[1] // self.gpus

    @property
    def hosted(self) -> np.ndarray:
        """bool [layers, E, gpus]: whether a GPU holds a copy of an expert."""
        layers, slots = self.physical_to_logical.shape
        hosted = np.zeros((layers, self.num_experts, self.gpus), bool)
        hosted[np.arange(layers)[:, None], self.physical_to_logical, np.arange(slots) // self.slots_per_gpu] = True
        return hosted


@dataclass(frozen=True)
class ReplicaCost:
    """What `evaluate.Cost` says of a placement without copies, by the same names: averages over the tokens of a trace."""

    hops_per_token: float
    intra_hops: float
    inter_hops: float
    max_load: float
    max_load_worst_layer: float


def evaluate_replicas(replicas: Replicas, trace: Trace) -> ReplicaCost:
    """Walk the tokens of a top-1 `trace` through the layers by the rule above; ValueError when k > 1 or shapes disagree."""
    _check_trace(trace, *replicas.hosted.shape[:2])
    routes = _routes(replicas.hosted, replicas.gpus_per_node)
    at = _walk(np.asarray(trace.experts).reshape(trace.tokens, trace.layers), routes)
    here, there = at[1:-1], at[2:]
    hops = (here != there).sum() / trace.tokens
    inter = (here // replicas.gpus_per_node != there // replicas.gpus_per_node).sum() / trace.tokens
    load = np.array([np.bincount(row, minlength=replicas.gpus).max() for row in at[1:]]) * replicas.gpus / trace.tokens
    return ReplicaCost(float(hops), float(hops - inter), float(inter), float(load.mean()), float(load.max()))


def without_copies(placement: Placement) -> Replicas:
    """Each expert once, where `placement` has it: E/P slots per GPU."""
    return Replicas(physical_to_logical(placement.gpu), placement.gpus, placement.gpus_per_node)


def place_replicas(
    start: Placement | Replicas,
    trace: Trace,
    extra: int,
    objective: str = "hops",
    costs: Sequence[float] = (1.0, 2.0),
    progress: Callable[[float, str], None] | None = None,
) -> Replicas:
    """Give every GPU `extra` slots per layer beside those of `start`, and fill them for the tokens of a top-1 `trace`.

    `objective`, one of OBJECTIVES:
      hops  Rounds of one slot for each GPU and layer, from the last layer to the first. A GPU gets the expert whose copy saves its
            tokens most, counting their whole way on: a token that stays may have further to go next. A copy that would raise the
            total cost, counted exactly, is left out. So more slots never cost more on these tokens. `costs`: of a hop inside a
            node and of one between nodes.
      load  From the first layer to the last, the busiest GPU hands the copy to another that lowers its load most, until slots
            are full or none helps. No layer's busiest GPU is busier than without copies on these tokens; hops may be more.

    Slots without a use repeat an expert of their GPU. ValueError when k > 1, shapes disagree or an argument is out of range.
    """
    start = without_copies(start) if isinstance(start, Placement) else start
    layers, experts, gpus = start.hosted.shape
    _check_trace(trace, layers, experts)
    _check(extra, experts - start.slots_per_gpu, objective, costs)
    tell = progress or (lambda fraction, text: None)
    tokens = np.asarray(trace.experts).reshape(trace.tokens, layers)
    hosted = start.hosted
    slots = start.physical_to_logical.reshape(layers, gpus, -1)
    added = np.repeat(slots[:, :, :1], extra, axis=2)  # fillers, until a copy is worth a slot
    if objective == "hops":
        node = np.arange(gpus) // start.gpus_per_node
        distance = np.where(node[:, None] == node, costs[0], costs[1]) * (1.0 - np.eye(gpus))
        for turn in range(extra):
            added[:, :, turn] = _save_hops(tokens, hosted, start.gpus_per_node, distance, added[:, :, turn])
            tell((turn + 1) / extra, "placing copies")
    else:
        at = np.arange(trace.tokens) % gpus
        for layer in range(layers):
            arriving = np.zeros((experts, gpus))
            np.add.at(arriving, (tokens[:, layer], at), 1.0)
            _share_load(arriving, hosted[layer], start.gpus_per_node, added[layer])
            at = _routes(hosted[layer : layer + 1], start.gpus_per_node)[0, tokens[:, layer], at]
            tell((layer + 1) / layers, "placing copies")
    slots = np.concatenate([slots, added], axis=2).reshape(layers, -1)
    return Replicas(slots, gpus, start.gpus_per_node)


def _save_hops(
    tokens: np.ndarray, hosted: np.ndarray, per_node: int, distance: np.ndarray, fillers: np.ndarray
) -> np.ndarray:
    """int64 [layers, gpus]: one more slot for each GPU and layer, in `hosted` (bool [layers, E, gpus], in place) and as returned."""
    layers, _, gpus = hosted.shape
    chosen = fillers.copy()
    at = _walk(tokens, _routes(hosted, per_node))
    onward = np.zeros((len(tokens), gpus))  # cost of a token's way after this layer, from each GPU
    for layer in range(layers - 1, -1, -1):
        hop = distance if layer > 0 else np.zeros_like(distance)
        expert, route = tokens[:, layer], _routes(hosted[layer : layer + 1], per_node)[0]
        total, gain = _pay(expert, at[layer], route, hop, onward)
        for gpu in range(gpus):
            missing = np.flatnonzero(~hosted[layer, :, gpu])
            for best in missing[np.argsort(-gain[gpu, missing], kind="stable")][:TRIES]:
                hosted[layer, best, gpu] = True
                trial = _routes(hosted[layer : layer + 1], per_node)[0]
                paid, _ = _pay(expert, at[layer], trial, hop, onward)
                if paid <= total:
                    total, route, chosen[layer, gpu] = paid, trial, best
                    break
                hosted[layer, best, gpu] = False
        onward = _one_layer_back(expert, route, hop, onward)
    return chosen


@njit(cache=True)
def _nearest(hosts: np.ndarray, per_node: int, target: np.ndarray) -> None:
    """The rule of the file's header for one expert: `target` [gpus] of tokens on each GPU, `hosts` bool [gpus]."""
    for gpu in range(len(hosts)):
        low = gpu // per_node * per_node
        high = low + per_node
        if not hosts[low:high].any():
            low, high = 0, len(hosts)
        turn = gpu % hosts[low:high].sum()
        for other in range(low, high):
            if hosts[other]:
                if turn == 0:
                    target[gpu] = other
                turn -= 1
        if hosts[gpu]:
            target[gpu] = gpu


@njit(cache=True)
def _routes(hosted: np.ndarray, per_node: int) -> np.ndarray:
    """int64 [layers, E, gpus]: the GPU to which a token on each GPU goes for each expert, of `hosted`, bool of that shape."""
    routes = np.empty(hosted.shape, np.int64)
    for layer in range(hosted.shape[0]):
        for expert in range(hosted.shape[1]):
            _nearest(hosted[layer, expert], per_node, routes[layer, expert])
    return routes


@njit(cache=True)
def _walk(tokens: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """int64 [layers+1, T]: where each of `tokens` [T, layers] starts, and its GPU in each layer."""
    layers, _, gpus = routes.shape
    at = np.empty((layers + 1, len(tokens)), np.int64)
    for token in range(len(tokens)):
        at[0, token] = token % gpus
        for layer in range(layers):
            at[layer + 1, token] = routes[layer, tokens[token, layer], at[layer, token]]
    return at


@njit(cache=True)
def _pay(
    expert: np.ndarray, at: np.ndarray, route: np.ndarray, hop: np.ndarray, onward: np.ndarray
) -> tuple[float, np.ndarray]:
    """(cost of all tokens' ways through this layer and on, gain float64 [gpus, E] of a copy of each expert on each GPU).

    For one layer: `expert` [T] and GPU `at` [T] of each token, `route` [E, gpus], `hop` [gpus, gpus], `onward` [T, gpus]. The gain is
    that of the tokens on the GPU itself; a copy also changes the routes of others, which only a new total tells.
    """
    total, gain = 0.0, np.zeros((route.shape[1], route.shape[0]))
    for token in range(len(expert)):
        here, there = at[token], route[expert[token], at[token]]
        pays = hop[here, there] + onward[token, there]
        total += pays
        gain[here, expert[token]] += pays - onward[token, here]
    return total, gain


@njit(cache=True)
def _one_layer_back(expert: np.ndarray, route: np.ndarray, hop: np.ndarray, onward: np.ndarray) -> np.ndarray:
    """`onward`, float64 [T, gpus], of the layer before."""
    before = np.empty_like(onward)
    for token in range(len(expert)):
        for here in range(route.shape[1]):
            there = route[expert[token], here]
            before[token, here] = hop[here, there] + onward[token, there]
    return before


@njit(cache=True)
def _share_load(arriving: np.ndarray, hosted: np.ndarray, per_node: int, added: np.ndarray) -> None:
    """Fill slots `added` [gpus, extra] of one layer, and `hosted` bool [E, gpus], so that the busiest GPU has less to do.

    `arriving` float64 [E, gpus]: tokens for each expert that come from each GPU. Each step takes the copy of an expert of
    the busiest GPU that leaves the least maximum (then the least sum of squares), while that is less than before.
    """
    experts, gpus = hosted.shape
    used, target = np.zeros(gpus, np.int64), np.empty(gpus, np.int64)
    load, shares = np.zeros(gpus), np.zeros((experts, gpus))
    for expert in range(experts):
        _nearest(hosted[expert], per_node, target)
        for gpu in range(gpus):
            shares[expert, target[gpu]] += arriving[expert, gpu]
        load += shares[expert]
    best_load, best_share = load.copy(), np.empty(gpus)
    while True:
        busiest, best_expert, best_gpu = load.argmax(), -1, -1
        for expert in range(experts):
            if shares[expert, busiest] > 0:
                for gpu in range(gpus):
                    if used[gpu] < added.shape[1] and not hosted[expert, gpu]:
                        hosted[expert, gpu] = True
                        _nearest(hosted[expert], per_node, target)
                        hosted[expert, gpu] = False
                        share = np.zeros(gpus)
                        for source in range(gpus):
                            share[target[source]] += arriving[expert, source]
                        trial = load - shares[expert] + share
                        most, least = trial.max(), best_load.max()
                        if most < least or (most == least and (trial**2).sum() < (best_load**2).sum()):
                            best_load, best_share, best_expert, best_gpu = trial, share, expert, gpu
        if best_expert < 0:
            return
        added[best_gpu, used[best_gpu]] = best_expert
        used[best_gpu] += 1
        hosted[best_expert, best_gpu] = True
        load, shares[best_expert] = best_load.copy(), best_share


def _check_trace(trace: Trace, layers: int, experts: int) -> None:
    if trace.k != 1:
        raise ValueError(f"{trace.source}: top-{trace.k} routing, copies are for top-1: take `trace.top(1)`")
    if (trace.layers, trace.num_experts) != (layers, experts):
        raise ValueError(
            f"the placement has {layers} layers of {experts} experts, the routing has {trace.layers} of {trace.num_experts}"
        )


def _check(extra: int, most: int, objective: str, costs: Sequence[float]) -> None:
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}, allowed: {', '.join(OBJECTIVES)}")
    if not 0 <= extra <= most:
        raise ValueError(f"{extra} extra slots per GPU, allowed: 0 to {most}, where every GPU holds all experts")
    if len(costs) != 2 or not 0 <= costs[0] <= costs[1]:
        raise ValueError(f"costs are {tuple(costs)}, must be of a hop in a node and between nodes, 0 <= in <= between")

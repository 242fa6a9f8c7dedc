"""Replicas of experts (redundant experts) on more GPUs than one: fewer hops, or a less loaded busiest GPU.

Servers give a GPU more slots than E/P per layer and fill the rest with redundant experts. A token on GPU g that is
routed to an expert uses the replica on g, else one on its node, else any; of several that are equally near the (g mod
their number)-th in GPU order. So GPUs share them evenly and the way is fixed, as in SGLang's static dispatch (which
draws where we count). It depends on all the replicas that the token met before, so tokens are walked through the
layers. They start on GPU (token's number mod P), and the way into the first layer is no hop, as in `evaluate.py`.

Top-1 routing, as in the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from repro.exflow.evaluate import check_shapes
from repro.exflow.placement import Placement
from repro.exflow.search.portfolio import Progress
from repro.exflow.serving.replicas import kernels
from repro.exflow.serving.slots import Replicas, physical_to_logical
from repro.exflow.trace import Trace

OBJECTIVES = ("hops", "load")
TRIES = 4  # experts that are tried for a slot before it gets none


@dataclass(frozen=True)
class ReplicaCost:
    """What `evaluate.Cost` says of a placement without replicas, by the same names: averages over tokens."""

    hops_per_token: float
    intra_hops: float
    inter_hops: float
    max_load: float
    max_load_worst_layer: float


def evaluate_replicas(replicas: Replicas, trace: Trace) -> ReplicaCost:
    """Walk the tokens of a top-1 `trace` through the layers by that rule; ValueError for k > 1 or other shapes."""
    _check_trace(trace, *replicas.hosted.shape[:2])
    tokens = np.asarray(trace.experts).reshape(trace.tokens, trace.layers)
    at = kernels.walk(tokens, kernels.routes(replicas.hosted, replicas.gpus_per_node))
    here, there = at[1:-1], at[2:]
    hops = (here != there).sum() / trace.tokens
    inter = (here // replicas.gpus_per_node != there // replicas.gpus_per_node).sum() / trace.tokens
    load = np.array([np.bincount(row, minlength=replicas.gpus).max() for row in at[1:]]) * replicas.gpus / trace.tokens
    return ReplicaCost(float(hops), float(hops - inter), float(inter), float(load.mean()), float(load.max()))


def place_replicas(
    start: Placement | Replicas,
    trace: Trace,
    extra: int,
    objective: str = "hops",
    costs: Sequence[float] = (1.0, 2.0),
    progress: Progress | None = None,
) -> Replicas:
    """Give every GPU `extra` slots per layer beside those of `start`, and fill them for the tokens of a top-1 `trace`.

    `objective`, one of OBJECTIVES:
      hops  Rounds of one slot for each GPU and layer, from the last layer to the first. A GPU gets the expert whose
            replica saves its tokens most on their whole way on. One that would raise the total cost, counted exactly,
            is left out, so more slots never cost more on these tokens. `costs`: of a hop inside a node and between.
      load  From the first layer to the last, the busiest GPU hands the replica to another that lowers its load most,
            until slots are full or none helps. From a placement, no layer's busiest GPU gets busier on these tokens;
            hops may become more.

    For both aims, add replicas for load to those for hops: what `start` holds stays. Slots without a use repeat an
    expert of their GPU. ValueError when k > 1, shapes disagree or an argument is out of range.
    """
    if isinstance(start, Placement):
        start = Replicas(physical_to_logical(start.gpu), start.gpus, start.gpus_per_node)
    layers, experts, gpus = start.hosted.shape
    _check_trace(trace, layers, experts)
    _check(extra, experts - start.slots_per_gpu, objective, costs)
    tell = progress or (lambda fraction, text: None)
    tokens = np.asarray(trace.experts).reshape(trace.tokens, layers)
    hosted = start.hosted
    slots = start.physical_to_logical.reshape(layers, gpus, -1)
    added = np.repeat(slots[:, :, :1], extra, axis=2)  # fillers, until a replica is worth a slot
    if objective == "hops":
        node = np.arange(gpus) // start.gpus_per_node
        distance = np.where(node[:, None] == node, costs[0], costs[1]) * (1.0 - np.eye(gpus))
        for turn in range(extra):
            added[:, :, turn] = _save_hops(tokens, hosted, start.gpus_per_node, distance, added[:, :, turn])
            tell((turn + 1) / extra, "placing replicas")
    else:
        at = np.arange(trace.tokens) % gpus
        for layer in range(layers):
            arriving = np.zeros((experts, gpus))
            np.add.at(arriving, (tokens[:, layer], at), 1.0)
            kernels.share_load(arriving, hosted[layer], start.gpus_per_node, added[layer])
            at = kernels.routes(hosted[layer : layer + 1], start.gpus_per_node)[0, tokens[:, layer], at]
            tell((layer + 1) / layers, "placing replicas")
    return Replicas(np.concatenate([slots, added], axis=2).reshape(layers, -1), gpus, start.gpus_per_node)


def _save_hops(
    tokens: np.ndarray, hosted: np.ndarray, per_node: int, distance: np.ndarray, fillers: np.ndarray
) -> np.ndarray:
    """int64 [layers, gpus]: the expert of one more slot for each GPU and layer, which `hosted` then has too."""
    layers, _, gpus = hosted.shape
    chosen = fillers.copy()
    at = kernels.walk(tokens, kernels.routes(hosted, per_node))
    onward = np.zeros((len(tokens), gpus))  # cost of a token's way after this layer, from each GPU
    for layer in range(layers - 1, -1, -1):
        hop = distance if layer > 0 else np.zeros_like(distance)
        expert, route = tokens[:, layer], kernels.routes(hosted[layer : layer + 1], per_node)[0]
        total, gain = kernels.pay(expert, at[layer], route, hop, onward)
        for gpu in range(gpus):
            missing = np.flatnonzero(~hosted[layer, :, gpu])
            for best in missing[np.argsort(-gain[gpu, missing], kind="stable")][:TRIES]:
                hosted[layer, best, gpu] = True
                trial = kernels.routes(hosted[layer : layer + 1], per_node)[0]
                paid, _ = kernels.pay(expert, at[layer], trial, hop, onward)
                if paid <= total:
                    total, route, chosen[layer, gpu] = paid, trial, best
                    break
                hosted[layer, best, gpu] = False
        onward = kernels.one_layer_back(expert, route, hop, onward)
    return chosen


def _check_trace(trace: Trace, layers: int, experts: int) -> None:
    if trace.k != 1:
        raise ValueError(f"{trace.source}: top-{trace.k} routing, replicas are for top-1: take `trace.top(1)`")
    check_shapes((layers, experts), (trace.layers, trace.num_experts))


def _check(extra: int, most: int, objective: str, costs: Sequence[float]) -> None:
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}, allowed: {', '.join(OBJECTIVES)}")
    if not 0 <= extra <= most:
        raise ValueError(f"{extra} extra slots per GPU, allowed: 0 to {most}, where every GPU holds all experts")
    if len(costs) != 2 or not 0 <= costs[0] <= costs[1]:
        raise ValueError(f"costs are {tuple(costs)}, must be of a hop in a node and between nodes, 0 <= in <= between")

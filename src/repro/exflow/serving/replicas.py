"""Replicas of experts (redundant experts) on more GPUs than one: fewer hops, or a less loaded busiest GPU.

A token on GPU g that is routed to an expert uses the replica on g, else one on its node, else any; of several that are
equally near the (g mod their number)-th in GPU order, as in SGLang's static dispatch (which draws where we count). So
tokens are walked through the layers. They start on GPU (token's number mod P), and the way into the first layer is no
hop, as in `evaluate.py`. Top-1 routing, as in the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from repro.exflow.evaluate import check_shapes
from repro.exflow.placement import Placement
from repro.exflow.search.portfolio import Clock, Progress, forever
from repro.exflow.serving.export import check_even
from repro.exflow.serving.slots import DISPATCHES, Replicas, check_aim, physical_to_logical
from repro.exflow.trace import Trace, by_layer

OBJECTIVES = ("hops", "load")
STEPS = (0.6180339887498949, 0.7548776662466927)
TRIES = 4  # experts that are tried for a slot before it gets none


@dataclass(frozen=True)
class ReplicaCost:
    """What `evaluate.Cost` says of a placement without replicas, by the same names: averages over tokens."""

    hops_per_token: float
    intra_hops: float
    inter_hops: float
    max_load: float
    max_load_worst_layer: float


def walk(replicas: Replicas, trace: Trace, dispatch: str | None = None) -> np.ndarray:
    """int64 [layers+1, T]: where each token of a top-1 `trace` starts, and its GPU in each layer. `dispatch`: one of
    `slots.DISPATCHES`; None: `shares` where the placement has them, else `nearest`. ValueError for k > 1, other shapes,
    or shares that the placement has not."""
    hosted = replicas.hosted
    tokens, dispatch = _by_layer(trace, hosted), dispatch or ("nearest" if replicas.share is None else "shares")
    if dispatch not in DISPATCHES or (dispatch == "shares" and replicas.share is None):
        raise ValueError(
            f"dispatch is {dispatch!r}, allowed: {', '.join(DISPATCHES)}, shares where the placement has them"
        )
    if dispatch == "nearest":
        return _walk(tokens, nearest_copies(hosted, replicas.gpus_per_node))
    at = [np.arange(trace.tokens) % replicas.gpus]
    for layer, expert in enumerate(tokens):
        if dispatch == "round_robin":
            among, source = hosted[layer] / hosted[layer].sum(axis=1, keepdims=True), (expert,)
        else:
            among, source = replicas.share[layer], (expert, at[-1])  # type: ignore[index, assignment] # there are shares
        at.append(dealt(among, source, layer))
    return np.array(at)


def dealt(among: np.ndarray, source: tuple[np.ndarray, ...], layer: int) -> np.ndarray:
    """int64 [T]: the GPU of each token, dealt by the shares `among[source]` [T, gpus] as a hash of its number and the
    layer would; two irrational steps spread tokens evenly over every subset."""
    tokens, gpus = len(source[0]), among.shape[-1]
    luck = (np.arange(tokens) * STEPS[0] + layer * STEPS[1]) % 1.0
    upper = np.cumsum(among, axis=-1)
    upper[upper > 1.0 - 1e-9] = 2.0  # the last copy takes what rounding leaves
    there = np.zeros(tokens, np.int64)
    for gpu in range(gpus - 1):
        there += luck >= upper[(*source, gpu)]
    return there


def evaluate_replicas(replicas: Replicas, trace: Trace, dispatch: str | None = None) -> ReplicaCost:
    """Walk the tokens of a top-1 `trace` through the layers; errors and `dispatch` as in `walk`."""
    gpus, per_node = replicas.gpus, replicas.gpus_per_node
    at = walk(replicas, trace, dispatch)
    here, there = at[1:-1], at[2:]
    hops = (here != there).sum() / trace.tokens
    inter = (here // per_node != there // per_node).sum() / trace.tokens
    load = np.array([np.bincount(row, minlength=gpus).max() for row in at[1:]]) * gpus / trace.tokens
    return ReplicaCost(float(hops), float(hops - inter), float(inter), float(load.mean()), float(load.max()))


def place_replicas(
    start: Placement | Replicas,
    trace: Trace,
    extra: int,
    objective: str = "hops",
    costs: Sequence[float] = (1.0, 2.0),
    progress: Progress | None = None,
    clock: Clock = forever,
) -> Replicas:
    """Give every GPU `extra` slots per layer beside those of `start`, and fill them for the tokens of a top-1 `trace`.

    `objective`, one of OBJECTIVES:
      hops  A GPU gets the expert whose replica saves its tokens most on their whole way on, unless that would raise the
            total cost: more slots never cost more on these tokens. `costs`: of a hop inside a node and between.
      load  The busiest GPU hands the replica to another that lowers its load most, until slots are full or none helps.
            From a placement, no layer's busiest GPU gets busier on these tokens; hops may become more.

    For both aims, add replicas for load to those for hops: what `start` holds stays. Slots without a use repeat an
    expert of their GPU, and so do those that are left when `clock`, the seconds that are left of a longer job, says 0.
    ValueError when k > 1, shapes disagree, a placement has unequal numbers of experts on its GPUs, or an argument is out of
    range.
    """
    if isinstance(start, Placement):
        check_even(start.gpu, start.gpus)
        start = Replicas(physical_to_logical(start.gpu), start.gpus, start.gpus_per_node)
    hosted, per_node = start.hosted, start.gpus_per_node
    layers, experts, gpus = hosted.shape
    tokens = _by_layer(trace, hosted)
    check_aim(objective, OBJECTIVES, costs)
    if not 0 <= extra <= (most := experts - start.slots_per_gpu):
        raise ValueError(f"{extra} extra slots per GPU, allowed: 0 to {most}, where every GPU holds all experts")
    tell = progress or (lambda fraction, text: None)
    slots = start.physical_to_logical.reshape(layers, gpus, -1)
    added = np.repeat(slots[:, :, :1], extra, axis=2)  # fillers, until a replica is worth a slot
    if objective == "hops":
        node = np.arange(gpus) // per_node
        distance = np.where(node[:, None] == node, costs[0], costs[1]) * (1.0 - np.eye(gpus))
        for turn in range(extra):
            _save_hops(tokens, hosted, per_node, distance, added[:, :, turn], clock)
            tell((turn + 1) / extra, "placing replicas")
    else:
        at = np.arange(trace.tokens) % gpus
        for layer, expert in enumerate(tokens):
            arriving = np.zeros((experts, gpus))
            np.add.at(arriving, (expert, at), 1.0)
            _share_load(arriving, hosted[layer], per_node, added[layer], clock)
            at = nearest_copies(hosted[layer], per_node)[expert, at]
            tell((layer + 1) / layers, "placing replicas")
    return Replicas(np.concatenate([slots, added], axis=2).reshape(layers, -1), gpus, per_node)


def _save_hops(
    tokens: np.ndarray, hosted: np.ndarray, per_node: int, distance: np.ndarray, slot: np.ndarray, clock: Clock
) -> None:
    """Fill one more slot of each GPU and layer, `slot` [layers, gpus], and `hosted`, for `tokens` [layers, T]."""
    layers, experts, gpus = hosted.shape
    routes = nearest_copies(hosted, per_node)
    at = _walk(tokens, routes)
    onward = np.zeros((tokens.shape[1], gpus))  # cost of a token's way after this layer, from each GPU
    for layer in range(layers - 1, -1, -1):
        if clock() <= 0:
            return
        hop = distance if layer > 0 else np.zeros_like(distance)
        expert, here, route = tokens[layer], at[layer], routes[layer]
        price, everyone = hop[here] + onward, np.arange(len(expert))  # what tokens pay from here on, by where they go
        # Of a replica on the token's own GPU; it also changes the routes of others, which only a trial tells.
        saved = price[everyone, route[expert, here]] - price[everyone, here]
        gain = np.bincount(here * experts + expert, saved, gpus * experts).reshape(gpus, experts)
        for gpu in range(gpus):
            missing = np.flatnonzero(~hosted[layer, :, gpu])
            for best in missing[np.argsort(-gain[gpu, missing], kind="stable")][:TRIES]:
                hosted[layer, best, gpu] = True
                who, trial = np.flatnonzero(expert == best), nearest_copies(hosted[layer, best], per_node)
                if price[who, trial[here[who]]].sum() <= price[who, route[best, here[who]]].sum():
                    route[best], slot[layer, gpu] = trial, best
                    break
                hosted[layer, best, gpu] = False
        there = route[expert]
        onward = hop[np.arange(gpus), there] + np.take_along_axis(onward, there, axis=1)


def _share_load(arriving: np.ndarray, hosted: np.ndarray, per_node: int, added: np.ndarray, clock: Clock) -> None:
    """Fill slots `added` [gpus, extra] of one layer, and `hosted` bool [E, gpus], for `arriving` float64 [E, gpus],
    tokens for each expert that come from each GPU. Each step takes the replica of an expert of the busiest GPU that
    leaves the least maximum (then the least sum of squares), while that is less than before."""
    used = np.zeros(len(added), np.int64)
    shares = _shares(arriving, nearest_copies(hosted, per_node))
    while clock() > 0:
        load = shares.sum(axis=0)
        expert, gpu = np.nonzero(~hosted & (shares[:, [load.argmax()]] > 0) & (used < added.shape[1]))
        trial = hosted[expert]
        trial[np.arange(len(trial)), gpu] = True
        share = _shares(arriving[expert], nearest_copies(trial, per_node))
        loads = np.concatenate([load[None], load - shares[expert] + share])
        best = np.lexsort(((loads**2).sum(axis=1), loads.max(axis=1)))[0] - 1
        if best < 0:
            return
        e, g = expert[best], gpu[best]
        added[g, used[g]] = e
        used[g] += 1
        hosted[e, g], shares[e] = True, share[best]


def _shares(arriving: np.ndarray, route: np.ndarray) -> np.ndarray:
    """float64 [n, gpus]: tokens that each GPU gets of n experts when those on each GPU, `arriving`, go by `route`."""
    shares = np.zeros(arriving.shape)
    np.add.at(shares, (np.arange(len(route))[:, None], route), arriving)
    return shares


def nearest_copies(hosted: np.ndarray, per_node: int) -> np.ndarray:
    """int64 [.., gpus]: where a token on each GPU goes for an expert that is on the GPUs `hosted`, bool [.., gpus]."""
    near, far = _dealt(hosted, per_node), _dealt(hosted, hosted.shape[-1])
    return np.where(hosted, np.arange(hosted.shape[-1]), np.where(near < 0, far, near))


def _dealt(hosted: np.ndarray, size: int) -> np.ndarray:
    """The replica that falls to each GPU among those in its unit of `size` GPUs; -1 where there is none."""
    gpu = np.arange(hosted.shape[-1]).reshape(-1, size)
    unit = hosted.reshape(*hosted.shape[:-1], *gpu.shape)
    number = unit.sum(axis=-1, keepdims=True)
    hosts_first = np.argsort(~unit, axis=-1, kind="stable")
    replica = gpu[:, :1] + np.take_along_axis(hosts_first, gpu % np.maximum(number, 1), axis=-1)
    return np.where(number > 0, replica, -1).reshape(hosted.shape)


def _walk(tokens: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """int64 [layers+1, T]: where each of `tokens` [layers, T] starts, and its GPU in each layer."""
    at = [np.arange(tokens.shape[1]) % routes.shape[2]]
    for expert, route in zip(tokens, routes, strict=True):
        at.append(route[expert, at[-1]])
    return np.array(at)


def _by_layer(trace: Trace, hosted: np.ndarray) -> np.ndarray:
    """Integer [layers, T]: the experts of a top-1 trace; ValueError when it is none or does not fit."""
    if trace.k != 1:
        raise ValueError(f"{trace.source}: top-{trace.k} routing, replicas are for top-1: take `trace.top(1)`")
    check_shapes(hosted.shape[:2], (trace.layers, trace.num_experts))
    return by_layer(trace.experts)[:, :, 0]

"""Top-k routing with copies, as all-to-alls with deduplicated dispatch (DeepEP) send it.

In each layer a token goes from its home GPU, where its attention is, once to every other GPU that has one of its k
experts, and its answers come back the same way; to another node it goes once, and is handed on inside. Of several
copies it takes the one nearest to its home (`slots.py`, `nearest`). Homes are dealt in turn: token t is at home on GPU
t mod P. Layers do not depend on each other, so each is annealed by itself on whole tokens.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from repro.compiled import compiled
from repro.exflow.evaluate import check_shapes
from repro.exflow.placement import Placement
from repro.exflow.search import balance
from repro.exflow.search.anneal import random_below
from repro.exflow.search.joint import NOISE, nearest, propose, slots_used
from repro.exflow.search.portfolio import Clock, Progress, forever
from repro.exflow.serving.export import check_even
from repro.exflow.serving.slots import Replicas, check_aim, filled, physical_to_logical
from repro.exflow.trace import Trace, by_layer

TOKENS = 8_000  # that are searched on, of a trace that has more: a sample
SWEEPS, PROPOSALS = 24, 4  # of a layer; changes of copies offered per slot in each
HOT, COLD = 0.01, 0.05  # first temperature, in GPUs of the tokens of one expert; the last, as a share of that
DESCENT = 0.25  # share of the sweeps without heat
PRICE = 2.0  # of a visit above the limit on load, in hops at the highest cost


@dataclass(frozen=True)
class Dispatch:
    """Means over the tokens of a trace and its layers.

    `gpus`, `nodes`: GPUs and nodes other than those of its home that a token is sent to, once each: times the bytes of
    a hidden vector, what dispatch sends, and, in the other direction, combine. `max_load`, `max_load_worst_layer`:
    expert visits on the busiest GPU of a layer over the even share, mean over layers and maximum."""

    gpus: float
    nodes: float
    max_load: float
    max_load_worst_layer: float

    def cost(self, costs: Sequence[float] = (1.0, 2.0)) -> float:
        """Of a token and layer: costs[0] for each GPU, and what costs[1] is above that for each node."""
        return costs[0] * self.gpus + (costs[1] - costs[0]) * self.nodes


def dispatch(placed: Replicas, trace: Trace) -> Dispatch:
    """Count what the tokens of `trace` send; ValueError when layers or experts disagree."""
    hosted, gpus, per_node = placed.hosted, placed.gpus, placed.gpus_per_node
    check_shapes(hosted.shape[:2], (trace.layers, trace.num_experts))
    home = np.arange(trace.tokens) % gpus
    sent, most = np.zeros((2, trace.layers)), np.zeros(trace.layers)
    for layer, experts in enumerate(by_layer(trace.experts)):
        there = _nearest(hosted[layer], per_node)[experts, home[:, None]]
        most[layer] = np.bincount(there.ravel(), minlength=gpus).max() * gpus / there.size
        for level, span in enumerate((1, per_node)):
            visited = np.zeros((trace.tokens, gpus // span), bool)
            visited[np.arange(trace.tokens)[:, None], there // span] = True
            visited[np.arange(trace.tokens), home // span] = False
            sent[level, layer] = visited.sum() / trace.tokens
    to_gpus, to_nodes = sent.mean(axis=1).tolist()
    return Dispatch(to_gpus, to_nodes, float(most.mean()), float(most.max()))


def place_for_dispatch(
    trace: Trace,
    start: Placement | Replicas,
    extra_slots: int = 0,
    costs: Sequence[float] = (1.0, 2.0),
    *,
    max_load: float | None = None,
    groups: int = 1,
    seed: int = 0,
    sweeps: int = SWEEPS,
    time_limit_s: float = math.inf,
    progress: Progress | None = None,
    clock: Clock = forever,
) -> Replicas:
    """Improve `start`, with `extra_slots` more per GPU and layer for copies, for what `trace` sends (`Dispatch.cost`).

    `max_load`: visits of a layer's busiest GPU over the even share that are aimed at; each above it costs PRICE hops.
    `groups`: of group-limited routing (DeepSeek-V3: 8), equally many neighbouring experts each. Above 1, all copies of a
    group's experts stay on the node where `start` has them, so that a token that is routed to n groups visits at most n
    nodes. `seed` and `sweeps` fix the result unless time cuts it.

    ValueError when layers or experts disagree, `start` has a group on several nodes or, without copies, unequal numbers
    of experts on its GPUs, or an argument is out of range.
    """
    old = start if isinstance(start, Replicas) else _alone(start)
    hosted, gpus, per_node = old.hosted, old.gpus, old.gpus_per_node
    layers, count, _ = hosted.shape
    check_shapes((layers, count), (trace.layers, trace.num_experts))
    check_aim("gpus", ("gpus",), costs)
    slots = old.slots_per_gpu + extra_slots
    if not 0 <= extra_slots <= max(count - old.slots_per_gpu, 0):
        raise ValueError(f"extra_slots is {extra_slots}, allowed: 0 to {count - old.slots_per_gpu}")
    balance.check_max_load(max_load)
    if sweeps < 0 or not time_limit_s >= 0:
        raise ValueError(f"sweeps is {sweeps} and time_limit_s {time_limit_s}, must be 0 or more")
    allowed = _allowed(hosted, per_node, groups)
    sample = trace if trace.tokens <= TOKENS else trace.sample(TOKENS, seed)
    home, rng = np.arange(sample.tokens) % gpus, np.random.default_rng(seed)
    weight = np.array([costs[0], costs[1] - costs[0], PRICE * costs[1]], float)
    room = math.inf if max_load is None else max_load * sample.tokens * sample.k / gpus
    unit = HOT * costs[1] * sample.tokens * sample.k / count
    begun = time.perf_counter()
    for layer, experts in enumerate(by_layer(sample.experts)):
        random = rng.integers(1, 2**63, 1, dtype=np.uint64)
        order = np.argsort(experts, axis=None, kind="stable")
        first = np.searchsorted(experts.ravel()[order], np.arange(count + 1))
        late = begun + time_limit_s * (layer + 1) / layers
        where = (hosted[layer], allowed[layer], order, first, home)
        best, least = hosted[layer].copy(), _sweep(experts, where, per_node, slots, weight, room, 0.0, 0, random)
        for sweep in range(sweeps):
            over = clock() <= 0 or time.perf_counter() > late
            cooling = sweep / sweeps / (1 - DESCENT)
            heat = unit * COLD**cooling if cooling < 1 and not over else 0.0
            proposals = PROPOSALS * slots * gpus
            now = _sweep(experts, where, per_node, slots, weight, room, heat, proposals, random)
            if now < least:
                best, least = hosted[layer].copy(), now
            if over:
                break
        hosted[layer] = best
        if progress is not None:
            progress((layer + 1) / layers, "placing for dispatch")
    return Replicas(filled(hosted, slots), gpus, per_node)


def _alone(start: Placement) -> Replicas:
    check_even(start.gpu, start.gpus)
    return Replicas(physical_to_logical(start.gpu), start.gpus, start.gpus_per_node)


def _allowed(hosted: np.ndarray, per_node: int, groups: int) -> np.ndarray:
    """bool [L, E, G]: where an expert may have copies."""
    layers, count, gpus = hosted.shape
    if groups < 1 or count % groups:
        raise ValueError(f"groups is {groups}: {count} experts do not make whole groups")
    if groups == 1:
        return np.ones_like(hosted)
    node = hosted.reshape(layers, groups, count // groups, gpus // per_node, per_node).any(axis=(2, 4))
    if (node.sum(axis=2) > 1).any():
        layer, group = np.argwhere(node.sum(axis=2) > 1)[0]
        raise ValueError(f"start has group {group} of layer {layer} on several nodes, allowed: one")
    return np.repeat(np.repeat(node, count // groups, axis=1), per_node, axis=2)


@compiled()
def _nearest(hosted: np.ndarray, per_node: int) -> np.ndarray:
    """int64 [E, G]: the copy that a token at home on each GPU takes of each expert."""
    found = np.empty(hosted.shape, np.int64)
    for e in range(hosted.shape[0]):
        for g in range(hosted.shape[1]):
            found[e, g] = nearest(hosted[e], g, per_node)
    return found


@compiled()
def _pays(there: np.ndarray, home: int, per_node: int, weight: np.ndarray) -> float:
    """What one token pays that goes to GPUs `there` [k]."""
    pays = 0.0
    for i, gpu in enumerate(there):
        new_gpu, new_node = gpu != home, gpu // per_node != home // per_node
        for other in there[:i]:
            new_gpu &= other != gpu
            new_node &= other // per_node != gpu // per_node
        pays += weight[0] * new_gpu + weight[1] * new_node
    return pays


@compiled()
def _redirect(
    e: int,
    hosts: np.ndarray,
    visits: np.ndarray,
    home: np.ndarray,
    there: np.ndarray,
    per_node: int,
    weight: np.ndarray,
    load: np.ndarray,
) -> float:
    """Send all `visits` of one expert to its copies `hosts`; changes `there` [T, k] and `load`, returns the change."""
    target = np.empty(len(hosts), np.int64)
    for g in range(len(hosts)):
        target[g] = nearest(hosts, g, per_node)
    change = 0.0
    k = there.shape[1]
    for visit in visits:
        token, place = visit // k, visit % k
        to, now = target[home[token]], there[token, place]
        if to != now:
            change -= _pays(there[token], home[token], per_node, weight)
            there[token, place] = to
            change += _pays(there[token], home[token], per_node, weight)
            load[now] -= 1.0
            load[to] += 1.0
    return change


@compiled()
def _sweep(
    experts: np.ndarray,
    where: tuple[np.ndarray, ...],
    per_node: int,
    slots: int,
    weight: np.ndarray,
    room: float,
    heat: float,
    proposals: int,
    random: np.ndarray,
) -> float:
    """Offer one layer so many changes of its copies `hosted` [E, G], in place; returns what its tokens then pay.
    `order`: visits (token · k + place) by expert, those of expert e from first[e] on."""
    hosted, allowed, order, first, home = where
    gpus = hosted.shape[1]
    there, load, total = np.empty(experts.shape, np.int64), np.zeros(gpus), 0.0
    for token in range(len(experts)):
        for place, e in enumerate(experts[token]):
            there[token, place] = nearest(hosted[e], home[token], per_node)
            load[there[token, place]] += 1.0
        total += _pays(there[token], home[token], per_node, weight)
    used = slots_used(hosted)
    who, hosts, trial = np.zeros(2, np.int64), np.empty((2, gpus), np.bool_), np.empty(gpus)
    above = np.maximum(load - room, 0.0).sum()
    for _ in range(proposals):
        many = propose(hosted, used, slots, random, who, hosts)
        for i in range(many):
            if (hosts[i] & ~allowed[who[i]]).any():
                many = 0
        if many == 0:
            continue
        trial[:] = load
        change = -weight[2] * above
        for i in range(many):
            visits = order[first[who[i]] : first[who[i] + 1]]
            change += _redirect(who[i], hosts[i], visits, home, there, per_node, weight, trial)
        now = np.maximum(trial - room, 0.0).sum()
        change += weight[2] * now
        if change > 0.0 and (heat == 0.0 or change > -heat * np.log((random_below(NOISE, random) + 1.0) / NOISE)):
            for i in range(many):
                visits = order[first[who[i]] : first[who[i] + 1]]
                _redirect(who[i], hosted[who[i]], visits, home, there, per_node, weight, trial)
            continue
        total += change - weight[2] * (now - above)
        for i in range(many):
            for g in range(gpus):
                used[g] += int(hosts[i, g]) - int(hosted[who[i], g])
                hosted[who[i], g] = hosts[i, g]
        load, above = trial.copy(), now
    return total + weight[2] * above

"""Experts, their copies and the share of traffic that each copy gets, searched together (numba, cached on disk).

Arrays, of L layers, E experts, G GPUs:
  follow    float64 [L-1, E, E]   which share of the tokens of an expert goes to each expert of the next layer
  distance  float64 [G, G]        cost of a hop
  hosted    bool    [L, E, G]     whether a GPU has a copy
  share     float64 [L, E, G, G]  of the tokens for an expert that come from a GPU, how many each copy gets
  arriving  float64 [L, E, G]     tokens for each expert, by the GPU that they come from
  onward    float64 [L, E, G]     what a token at an expert, on a GPU, will pay for hops after this layer
  room      float64 [L]           tokens that a GPU may get; each above it costs `price`
  before    bool    [L, E, G]     copies that are loaded already: any other one is a move, of which there are at most so many

Which expert comes next is taken to depend on the expert before alone, not on the GPU or on earlier experts. Then
transition counts suffice, and the copies and shares of one layer can be changed at their exact cost, given the others.
"""

from typing import NamedTuple

import numpy as np

from repro.compiled import compiled
from repro.exflow.search.anneal import random_below

NOISE = 1 << 30
SHARES, NEAREST, ROUND_ROBIN = 0, 1, 2  # how tokens are dealt to copies: `serving/slots.py`


class Rules(NamedTuple):
    """What holds in every layer: how tokens are dealt, GPUs of a node, slots of a GPU, price of a token too many, and
    the most moves of all layers together."""

    dispatch: int
    per_node: int
    slots: int
    price: float
    moves: int


class State(NamedTuple):
    """Arrays as above, all but `before` changed in place, and int64 [1]: the moves so far."""

    hosted: np.ndarray
    share: np.ndarray
    arriving: np.ndarray
    onward: np.ndarray
    before: np.ndarray
    moved: np.ndarray


@compiled()
def deal(
    rules: Rules,
    hosts: np.ndarray,
    arriving: np.ndarray,
    cost: np.ndarray,
    room: float,
    load: np.ndarray,
    share: np.ndarray,
) -> float:
    """Deal the tokens `arriving` [G] of one expert to its copies `hosts` bool [G]; `cost` [G, G] of a token on a GPU that
    goes to a copy. Fills `share` [G, G], adds to `load` [G], and returns the cost without that of tokens too many."""
    gpus = len(hosts)
    share[:] = 0.0
    total = 0.0
    if rules.dispatch == SHARES:
        for at_hand in (True, False):  # tokens that have a copy on their own GPU come first
            for g in range(gpus):
                if hosts[g] == at_hand:
                    total += _fill(rules, hosts, g, arriving[g], cost, room, load, share)
        return total
    copies = hosts.sum()
    for g in range(gpus):
        one = nearest(hosts, g, rules.per_node)
        for h in range(gpus):
            if hosts[h] and (rules.dispatch == ROUND_ROBIN or h == one):
                share[g, h] = 1.0 / copies if rules.dispatch == ROUND_ROBIN else 1.0
                total += arriving[g] * share[g, h] * cost[g, h]
                load[h] += arriving[g] * share[g, h]
    return total


@compiled()
def _fill(
    rules: Rules,
    hosts: np.ndarray,
    g: int,
    tokens: float,
    cost: np.ndarray,
    room: float,
    load: np.ndarray,
    share: np.ndarray,
) -> float:
    """Deal `tokens` on GPU g to the cheapest copies with room, and what is left to the cheapest of all."""
    left, total = tokens, 0.0
    while True:
        best, least = -1, np.inf
        for h in range(len(hosts)):
            if hosts[h]:
                pays = cost[g, h] + (rules.price if load[h] >= room else 0.0)
                if pays < least:
                    best, least = h, pays
        part = left if load[best] >= room else min(left, room - load[best])
        share[g, best] += part / tokens if tokens > 0 else 1.0
        total += part * cost[g, best]
        if part == left:
            load[best] += part
            return total
        load[best], left = room, left - part


@compiled()
def nearest(hosts: np.ndarray, gpu: int, per_node: int) -> int:
    """The copy on `gpu`, else the (gpu mod their number)-th of those on its node, else of all."""
    if hosts[gpu]:
        return gpu
    first = gpu // per_node * per_node
    for low, high in ((first, first + per_node), (0, len(hosts))):
        number = hosts[low:high].sum()
        if number > 0:
            turn = gpu % number
            for h in range(low, high):
                if hosts[h]:
                    if turn == 0:
                        return h
                    turn -= 1
    return -1


@compiled()
def _above(load: np.ndarray, room: float) -> float:
    """Tokens too many, of all GPUs."""
    return np.maximum(load - room, 0.0).sum()


@compiled()
def slots_used(hosted: np.ndarray) -> np.ndarray:
    """int64 [G]: experts that each GPU holds, of `hosted` [E, G]."""
    used = np.zeros(hosted.shape[1], np.int64)
    for e in range(hosted.shape[0]):
        for g in range(hosted.shape[1]):
            used[g] += int(hosted[e, g])
    return used


@compiled()
def propose(
    hosted: np.ndarray, used: np.ndarray, slots: int, random: np.ndarray, who: np.ndarray, hosts: np.ndarray
) -> int:
    """A random change of one layer's copies: `who` [2], the experts that change, and their new `hosts` bool [2, G].
    An expert gets a copy on another GPU; if that is full, one of the experts there leaves it, for nowhere (if it has
    another copy) or for a slot of the first. Returns how many experts change: 0 where the draw allows nothing."""
    experts, gpus = hosted.shape
    new, h = random_below(experts, random), random_below(gpus, random)
    if hosted[new, h]:
        return 0
    who[0] = new
    hosts[0] = hosted[new]
    hosts[0, h] = True
    if used[h] < slots:
        return 1
    old = random_below(experts, random)
    while not hosted[old, h]:
        old = random_below(experts, random)
    who[1] = old
    hosts[1] = hosted[old]
    hosts[1, h] = False
    if hosts[1].any() and random_below(2, random) == 1:
        return 2
    there = random_below(gpus, random)
    while not hosted[new, there]:
        there = random_below(gpus, random)
    hosts[0, there], hosts[1, there] = False, True
    return 0 if hosted[old, there] else 2


@compiled()
def improve_layer(
    rules: Rules,
    state: State,
    layer: int,
    distance: np.ndarray,
    room: float,
    heat: float,
    proposals: int,
    random: np.ndarray,
) -> None:
    """Offer one layer so many changes of its copies, at temperature `heat`, then deal every expert's tokens anew."""
    hosted, share, arriving = state.hosted[layer], state.share[layer], state.arriving[layer]
    experts, gpus = hosted.shape
    hop = distance if layer > 0 else np.zeros_like(distance)  # the way into the first layer is none
    cost = np.empty((experts, gpus, gpus))
    flow, pays = np.zeros((experts, gpus)), np.zeros(experts)
    for e in range(experts):
        cost[e] = hop + state.onward[layer, e]
        for g in range(gpus):
            flow[e] += arriving[e, g] * share[e, g]
            pays[e] += (arriving[e, g] * share[e, g] * cost[e, g]).sum()
    load, used = flow.sum(axis=0), slots_used(hosted)
    above = _above(load, room)
    who, hosts, parts = np.zeros(2, np.int64), np.empty((2, gpus), np.bool_), np.empty((2, gpus, gpus))
    trial, paid = np.empty(gpus), np.empty(2)
    for turn in range(proposals + experts):
        if turn < proposals:
            many = propose(hosted, used, rules.slots, random, who, hosts)
        else:
            many, who[0] = 1, turn - proposals
            hosts[0] = hosted[who[0]]
        if many == 0:
            continue
        moves = _moves(hosted, state.before[layer], who[:many], hosts)
        if moves > 0 and state.moved[0] + moves > rules.moves:
            continue
        trial[:] = load
        change = -rules.price * above
        for i in range(many):
            trial -= flow[who[i]]
            change -= pays[who[i]]
        for i in range(many):
            paid[i] = deal(rules, hosts[i], arriving[who[i]], cost[who[i]], room, trial, parts[i])
            change += paid[i]
        now = _above(trial, room)
        change += rules.price * now
        least = -1e-9 if moves > 0 else 0.0  # a move has to gain
        if change > least and (heat == 0.0 or change > -heat * np.log((random_below(NOISE, random) + 1.0) / NOISE)):
            continue
        for i in range(many):
            e = who[i]
            for g in range(gpus):
                used[g] += int(hosts[i, g]) - int(hosted[e, g])
                hosted[e, g] = hosts[i, g]
            share[e], pays[e] = parts[i], paid[i]
            flow[e] = 0.0
            for g in range(gpus):
                flow[e] += arriving[e, g] * share[e, g]
        state.moved[0] += moves
        load, above = trial.copy(), now


@compiled()
def _moves(hosted: np.ndarray, before: np.ndarray, who: np.ndarray, hosts: np.ndarray) -> int:
    """Moves that become more (less than 0: fewer) when the experts `who` of a layer get the copies `hosts`."""
    moves = 0
    for i, e in enumerate(who):
        for g in range(hosted.shape[1]):
            if not before[e, g]:
                moves += int(hosts[i, g]) - int(hosted[e, g])
    return moves


@compiled()
def arrive(follow: np.ndarray, share: np.ndarray, arriving: np.ndarray, after: np.ndarray) -> None:
    """Fill `after`, what arrives at the next layer, from one layer's `share` and `arriving`."""
    after[:] = 0.0
    for e in range(len(arriving)):
        flow = np.zeros(arriving.shape[1])
        for g in range(len(flow)):
            flow += arriving[e, g] * share[e, g]
        for f in range(len(after)):
            if follow[e, f] > 0.0:
                after[f] += follow[e, f] * flow


@compiled()
def look_ahead(
    follow: np.ndarray, share: np.ndarray, onward: np.ndarray, distance: np.ndarray, before: np.ndarray
) -> None:
    """Fill `before`, what is still to pay after the layer before, from one layer's `share` and `onward`."""
    pays = np.zeros(onward.shape)
    for f in range(len(onward)):
        for g in range(onward.shape[1]):
            pays[f, g] = (share[f, g] * (distance[g] + onward[f])).sum()
    before[:] = 0.0
    for e in range(len(before)):
        for f in range(len(onward)):
            if follow[e, f] > 0.0:
                before[e] += follow[e, f] * pays[f]


@compiled()
def refresh(state: State, follow: np.ndarray, distance: np.ndarray) -> None:
    """Make `arriving` and `onward` of all layers those of `share`."""
    for layer in range(len(follow)):
        arrive(follow[layer], state.share[layer], state.arriving[layer], state.arriving[layer + 1])
    for layer in range(len(follow) - 1, -1, -1):
        look_ahead(follow[layer], state.share[layer + 1], state.onward[layer + 1], distance, state.onward[layer])


@compiled()
def sweep(
    rules: Rules,
    state: State,
    follow: np.ndarray,
    distance: np.ndarray,
    room: np.ndarray,
    heat: float,
    proposals: int,
    random: np.ndarray,
) -> None:
    """Improve all layers, from the last to the first and back."""
    layers = len(room)
    for layer in range(layers - 1, -1, -1):
        improve_layer(rules, state, layer, distance, room[layer], heat, proposals, random)
        if layer > 0:
            look_ahead(follow[layer - 1], state.share[layer], state.onward[layer], distance, state.onward[layer - 1])
    for layer in range(layers):
        if layer > 0:
            arrive(follow[layer - 1], state.share[layer - 1], state.arriving[layer - 1], state.arriving[layer])
        improve_layer(rules, state, layer, distance, room[layer], heat, proposals, random)
    refresh(state, follow, distance)


@compiled()
def value(state: State, distance: np.ndarray) -> tuple[float, np.ndarray]:
    """(cost of all hops, float64 [L, G] tokens of each GPU)."""
    layers, experts, gpus = state.arriving.shape
    hops, load = 0.0, np.zeros((layers, gpus))
    for layer in range(layers):
        for e in range(experts):
            for g in range(gpus):
                tokens = state.arriving[layer, e, g] * state.share[layer, e, g]
                load[layer] += tokens
                if layer > 0:
                    hops += (tokens * distance[g]).sum()
    return hops, load

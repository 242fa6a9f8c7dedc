"""Compiled loops for replicas (numba, cached on disk): the way of tokens, and what a replica would change of it."""

import numpy as np
from numba import njit


@njit(cache=True)
def _nearest(hosts: np.ndarray, per_node: int, target: np.ndarray) -> None:
    """The rule of `replicas` for one expert: `target` [gpus] of tokens on each GPU, `hosts` bool [gpus]."""
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
def routes(hosted: np.ndarray, per_node: int) -> np.ndarray:
    """int64 [layers, E, gpus]: where a token on each GPU goes for each expert, given `hosted`, bool of that shape."""
    targets = np.empty(hosted.shape, np.int64)
    for layer in range(hosted.shape[0]):
        for expert in range(hosted.shape[1]):
            _nearest(hosted[layer, expert], per_node, targets[layer, expert])
    return targets


@njit(cache=True)
def walk(tokens: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """int64 [layers+1, T]: where each of `tokens` [T, layers] starts, and its GPU in each layer."""
    layers, _, gpus = routes.shape
    at = np.empty((layers + 1, len(tokens)), np.int64)
    for token in range(len(tokens)):
        at[0, token] = token % gpus
        for layer in range(layers):
            at[layer + 1, token] = routes[layer, tokens[token, layer], at[layer, token]]
    return at


@njit(cache=True)
def pay(
    expert: np.ndarray, at: np.ndarray, route: np.ndarray, hop: np.ndarray, onward: np.ndarray
) -> tuple[float, np.ndarray]:
    """(cost of all tokens' ways from this layer on, gain float64 [gpus, E] of a replica of each expert on each GPU).

    For one layer: `expert` [T] and GPU `at` [T] of each token, `route` [E, gpus], `hop` [gpus, gpus], `onward` [T,
    gpus]. The gain is that of the tokens on the GPU itself; a replica also changes the routes of others, which only a
    new total tells.
    """
    total, gain = 0.0, np.zeros((route.shape[1], route.shape[0]))
    for token in range(len(expert)):
        here, there = at[token], route[expert[token], at[token]]
        pays = hop[here, there] + onward[token, there]
        total += pays
        gain[here, expert[token]] += pays - onward[token, here]
    return total, gain


@njit(cache=True)
def one_layer_back(expert: np.ndarray, route: np.ndarray, hop: np.ndarray, onward: np.ndarray) -> np.ndarray:
    """`onward`, float64 [T, gpus], of the layer before."""
    before = np.empty_like(onward)
    for token in range(len(expert)):
        for here in range(route.shape[1]):
            there = route[expert[token], here]
            before[token, here] = hop[here, there] + onward[token, there]
    return before


@njit(cache=True)
def share_load(arriving: np.ndarray, hosted: np.ndarray, per_node: int, added: np.ndarray) -> None:
    """Fill slots `added` [gpus, extra] of one layer, and `hosted` bool [E, gpus], to relieve the busiest GPU.

    `arriving` float64 [E, gpus]: tokens for each expert that come from each GPU. Each step takes the replica of an
    expert of the busiest GPU that leaves the least maximum (then the least sum of squares), while that is less than
    before.
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

"""Compiled loops of the fan-out (numba, cached on disk). A unit is a GPU or a node; unit ids count from 0.

Arrays, of one layer and a sample of T tokens:
  experts  int16 [T, k]             the distinct experts of each token
  gpu      int64 [E]                GPU of every expert
  visit    int8  [levels, T, G]     cost (-1, 0, 1) of a token's visit to a unit in this layer, other layers as they are
  unit_of  int64 [levels, E]        unit of every expert at each level: its GPU, then its node
  present  int16 [levels, T, G]     how many of its experts a token has in each unit
  join     int32 [levels, E, G]     what tokens pay more, together, when one expert moves into a unit that ...
  leave    int32 [levels, E]        ... it is not in, and out of its own; `join` plus `leave` is what a move costs
"""

import numpy as np

from repro.compiled import compiled

Tables = tuple[np.ndarray, ...]  # experts, visit, unit_of, present, join, leave; of all levels or of one


@compiled()
def improve_layer(
    tables: Tables, first: np.ndarray, visitors: np.ndarray, gpu: np.ndarray, weight: np.ndarray, noise: np.ndarray
) -> float:
    """Offer every expert a swap with the best other one; `gpu` and `tables` change in place. Returns the cost gained.

    The cost is Σ over levels of `weight` [levels] · Σ over tokens of what the units they visit cost. Expert e is
    visited by tokens visitors[first[e]:first[e+1]]. The best partner by `join` and `leave` is then counted exactly: a
    token that visits both experts sees no change, which the tables do not know. `noise` [E, G] is a random perturbation
    of each move: Gumbel noise times a temperature makes this a heat bath, zeros a descent.
    """
    experts, visit, unit_of, present, join, leave = tables
    total = 0.0
    for i in range(len(gpu)):
        stay = -noise[i, gpu[i]] - 1e-9
        j, change = _best_partner(i, unit_of, weight, join, leave, noise[i])
        if change >= stay:
            continue
        of_i, of_j = visitors[first[i] : first[i + 1]], visitors[first[j] : first[j + 1]]
        shared = (experts[of_i] == j).sum(axis=1) > 0  # tokens that visit both
        both, only_i, only_j = of_i[shared], of_i[~shared], of_j[(experts[of_j] == i).sum(axis=1) == 0]
        change = 0.0
        for level in range(len(weight)):
            a, b = unit_of[level, i], unit_of[level, j]
            if a != b:
                change += weight[level] * _moved(only_i, visit[level], present[level], a, b)
                change += weight[level] * _moved(only_j, visit[level], present[level], b, a)
        if change - noise[i, gpu[j]] < stay:
            total -= change
            for level in range(len(weight)):
                if unit_of[level, i] != unit_of[level, j]:
                    one = (experts, visit[level], unit_of[level], present[level], join[level], leave[level])
                    _swap(one, i, j, only_i, only_j, both)
            gpu[i], gpu[j] = gpu[j], gpu[i]
    return total


@compiled()
def _best_partner(
    i: int, unit_of: np.ndarray, weight: np.ndarray, join: np.ndarray, leave: np.ndarray, noise: np.ndarray
) -> tuple[int, float]:
    """(expert, change of the cost less the `noise` [G] of its GPU) of the best swap with expert i by the tables; (-1,
    inf): none."""
    partner, best, gpu = -1, np.inf, unit_of[0]
    for j in range(len(gpu)):
        if gpu[j] == gpu[i]:
            continue
        change = -noise[gpu[j]]
        for level in range(len(weight)):
            a, b = unit_of[level, i], unit_of[level, j]
            if a != b:
                moves = join[level, i, b] + leave[level, i] + join[level, j, a] + leave[level, j]
                change += weight[level] * moves
        if change < best:
            partner, best = j, change
    return partner, best


@compiled()
def _moved(visitors: np.ndarray, visit: np.ndarray, present: np.ndarray, source: int, target: int) -> int:
    """What tokens that visit only one of a swap's experts pay more when it moves from unit `source` to `target`."""
    change = 0
    for token in visitors:
        if present[token, source] == 1:
            change -= visit[token, source]
        if present[token, target] == 0:
            change += visit[token, target]
    return change


@compiled()
def _swap(tables: Tables, i: int, j: int, only_i: np.ndarray, only_j: np.ndarray, both: np.ndarray) -> None:
    """Swap the units of experts i and j in the tables of one level, for the tokens that visit one of them, or both."""
    _, _, unit_of, present, _, _ = tables
    a, b = unit_of[i], unit_of[j]
    for sign in (-1, 1):  # take back what their tokens said about both units, swap, and let them say it anew
        for token in np.concatenate((only_i, only_j, both)):
            _account(tables, token, a, sign)
            _account(tables, token, b, sign)
        if sign < 0:
            unit_of[i], unit_of[j] = b, a
            for token in only_i:
                present[token, a] -= 1
                present[token, b] += 1
            for token in only_j:
                present[token, b] -= 1
                present[token, a] += 1


@compiled(inline="always")  # by a seventh sooner
def _account(tables: Tables, token: int, u: int, sign: int) -> None:
    """Add (`sign` 1) or take back (-1) what a token says about moving its experts into unit u or out of it."""
    experts, visit, unit_of, present, join, leave = tables
    cost, here = visit[token, u], present[token, u]
    if cost == 0 or here > 1:
        return
    for e in experts[token]:
        if here == 0:
            join[e, u] += sign * cost
        elif unit_of[e] == u:
            leave[e] -= sign * cost

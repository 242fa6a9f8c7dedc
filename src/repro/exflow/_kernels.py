"""Compiled loops of the placement search (numba, cached on disk): swap annealing and pair-Viterbi.

Arrays, throughout the search:
  counts     float64 [layers-1, E, E]   tokens that go from expert a of layer l to expert b of layer l+1
  placement  int64   [layers, E]        GPU of every expert
  distance   float64 [G, G]             cost of one token that moves from one GPU to another; symmetric, zero diagonal
"""

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def count_pairs(here: np.ndarray, there: np.ndarray, pairs: np.ndarray) -> None:
    """Add to `pairs`, int64 [E, E], the k·k pairs of every token's experts in two neighbouring layers, integer [tokens, k] each."""
    tokens, k = here.shape
    for token in range(tokens):
        for a in range(k):
            row = pairs[here[token, a]]
            for b in range(k):
                row[there[token, b]] += 1


@njit(cache=True)
def _random(state: np.ndarray) -> int:
    """xorshift64*: one step of the generator whose state is `state` (uint64 [1]); the upper bits are the good ones."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return (x * np.uint64(2685821657736338717)) >> np.uint64(33)


@njit(cache=True)
def anneal(
    counts: np.ndarray,
    backward: np.ndarray,
    placement: np.ndarray,
    table: np.ndarray,
    distance: np.ndarray,
    hot: float,
    cold: float,
    first: int,
    last: int,
    total: int,
    best: np.ndarray,
    costs: np.ndarray,
    state: np.ndarray,
) -> None:
    """Proposals `first`..`last` of an annealing run of `total`: two experts of one layer swap GPUs (so balance always holds).

    `table` [layers, G, E] is the cost of having expert e on GPU g while all neighbours stay; it is kept up to date, so a
    proposal costs four look-ups. `backward` is `counts` transposed. `placement` is the walk's present state, `best` the best
    one seen, `costs` = [present cost, best cost]. The temperature falls geometrically from `hot` to `cold` (tokens).
    """
    layers, experts = placement.shape
    gpus = distance.shape[0]
    delta = np.empty(experts)
    for step in range(first, last):
        if (step - first) & 255 == 0:  # a new temperature now and then: exp and log cost more than a proposal
            temperature = hot * (cold / hot) ** (step / total)
        layer = _random(state) % layers
        i = _random(state) % experts
        j = _random(state) % experts
        a, b = placement[layer, i], placement[layer, j]
        if a == b:
            continue
        change = table[layer, b, i] - table[layer, a, i] + table[layer, a, j] - table[layer, b, j]
        if change > 0.0 and (_random(state) + 1.0) * 2.0**-31 >= np.exp(-change / temperature):
            continue
        placement[layer, i], placement[layer, j] = b, a
        costs[0] += change
        for side in range(2):
            near = layer - 1 if side == 0 else layer + 1
            if near < 0 or near >= layers:
                continue
            if side == 0:
                for e in range(experts):
                    delta[e] = backward[near, i, e] - backward[near, j, e]
            else:
                for e in range(experts):
                    delta[e] = counts[layer, i, e] - counts[layer, j, e]
            for g in range(gpus):
                factor = distance[g, b] - distance[g, a]
                if factor != 0.0:  # at one flat cost only g = a and g = b change
                    for e in range(experts):
                        table[near, g, e] += factor * delta[e]
        if costs[0] < costs[1] - 1e-9:
            costs[1] = costs[0]
            best[:] = placement


@njit(cache=True)
def _choose(counts: np.ndarray, placement: np.ndarray, a: int, b: int, take: int, state: np.ndarray) -> np.ndarray:
    """int64 [layers, 2·take]: `take` experts of GPU a, then `take` of GPU b, of each layer.

    When a GPU has more, a random layer gets random ones; going outwards from it, each layer gets those that exchange most tokens
    with the ones chosen next door (times a random factor), since only linked experts gain from moving together.
    """
    layers, experts = placement.shape
    chosen = np.empty((layers, 2 * take), np.int64)
    score = np.empty(experts)
    start = _random(state) % layers
    for step in range(layers):
        layer = start + step if start + step < layers else layers - 1 - step
        for side in range(2):
            gpu = a if side == 0 else b
            for e in range(experts):
                score[e] = -1.0
                if placement[layer, e] == gpu:
                    link = 1.0
                    if step > 0:
                        for t in range(2 * take):
                            if layer > start:
                                link += counts[layer - 1, chosen[layer - 1, t], e]
                            else:
                                link += counts[layer, e, chosen[layer + 1, t]]
                    score[e] = link * (_random(state) + 1.0)
            for t in range(take):
                e = np.argmax(score)
                chosen[layer, side * take + t] = e
                score[e] = -1.0
    return chosen


@njit(cache=True)
def _outside(
    counts: np.ndarray, placement: np.ndarray, distance: np.ndarray, a: int, b: int, chosen: np.ndarray
) -> np.ndarray:
    """float64 [layers, 2·take]: what each chosen expert pays to experts that stay put when on GPU a, less the same on GPU b."""
    layers, experts = placement.shape
    fixed = np.ones((layers, experts), np.bool_)
    for layer in range(layers):
        for e in chosen[layer]:
            fixed[layer, e] = False
    pays = np.zeros(chosen.shape)
    for layer in range(layers):
        for t, e in enumerate(chosen[layer]):
            for near in (layer - 1, layer + 1):
                if near < 0 or near >= layers:
                    continue
                for f in range(experts):
                    if fixed[near, f]:
                        g = placement[near, f]
                        tokens = counts[near, f, e] if near < layer else counts[layer, e, f]
                        pays[layer, t] += tokens * (distance[g, a] - distance[g, b])
    return pays


@njit(cache=True)
def _half_sums(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Sums of all subsets of the first four (`low`) and of the other, at most four, `values` (`high`), by bit mask."""
    for mask in range(1, 16):
        bit = 0
        while not (mask >> bit) & 1:
            bit += 1
        rest = mask & (mask - 1)
        low[mask] = low[rest] + (values[bit] if bit < len(values) else 0.0)
        high[mask] = high[rest] + (values[bit + 4] if bit + 4 < len(values) else 0.0)


@njit(cache=True)
def pair_viterbi(
    counts: np.ndarray,
    placement: np.ndarray,
    distance: np.ndarray,
    a: int,
    b: int,
    splits: np.ndarray,
    state: np.ndarray,
) -> float:
    """Re-split the experts of GPUs a and b in all layers at once, exactly; returns the cost gained (0: already the best split).

    `splits` int64 [S]: bit masks of which of the 2·take <= 8 chosen experts go to GPU a; the first one is the split as it is.
    The states of one layer are the S splits and the cost is a sum over neighbouring layers, so Viterbi over layers is exact.
    """
    take = 0
    while splits[0] >> take:
        take += 1
    chosen = _choose(counts, placement, a, b, take, state)
    pays = _outside(counts, placement, distance, a, b, chosen)
    layers, width = chosen.shape
    states = len(splits)
    cost, arriving = np.zeros(states), np.empty(states)
    source = np.zeros((layers, states), np.int64)
    tokens, benefit = np.empty((width, width)), np.empty(width)
    low, high = np.zeros(16), np.zeros(16)
    present = 0.0
    for layer in range(layers):
        if layer > 0:
            for x in range(width):
                for y in range(width):
                    tokens[x, y] = distance[a, b] * counts[layer - 1, chosen[layer - 1, x], chosen[layer, y]]
            arriving[:] = np.inf
            for s in range(states):
                base = cost[s]  # the whole next layer on b: it is cut from the split's part on a
                for y in range(width):
                    from_a = from_b = 0.0
                    for x in range(width):
                        if (splits[s] >> x) & 1:
                            from_a += tokens[x, y]
                        else:
                            from_b += tokens[x, y]
                    base += from_a
                    benefit[y] = from_b - from_a
                _half_sums(benefit, low, high)
                for r in range(states):
                    total = base + low[splits[r] & 15] + high[splits[r] >> 4]
                    if total < arriving[r]:
                        arriving[r] = total
                        source[layer, r] = s
                if s == 0:
                    present += base - cost[0] + low[splits[0] & 15] + high[splits[0] >> 4]
            cost[:] = arriving
        _half_sums(pays[layer], low, high)
        for r in range(states):
            cost[r] += low[splits[r] & 15] + high[splits[r] >> 4]
        present += low[splits[0] & 15] + high[splits[0] >> 4]
    split = np.argmin(cost)
    gain = present - cost[split]
    if gain <= 1e-9 * (1.0 + abs(present)):
        return 0.0
    for layer in range(layers - 1, -1, -1):
        for x in range(width):
            placement[layer, chosen[layer, x]] = a if (splits[split] >> x) & 1 else b
        split = source[layer, split]
    return gain


@njit(cache=True)
def pair_pass(
    counts: np.ndarray,
    placement: np.ndarray,
    distance: np.ndarray,
    splits: np.ndarray,
    stale: np.ndarray,
    state: np.ndarray,
) -> float:
    """`pair_viterbi` on every pair of GPUs marked in `stale` (bool [G, G]), in random order; returns the cost gained.

    A pair loses its mark; when it is re-split, all other pairs of its two GPUs get one.
    """
    gpus = distance.shape[0]
    pairs = np.empty((gpus * (gpus - 1) // 2, 2), np.int64)
    n = 0
    for a in range(gpus):
        for b in range(a + 1, gpus):
            other = _random(state) % (n + 1)  # insertion shuffle
            pairs[n] = pairs[other]
            pairs[other] = a, b
            n += 1
    total = 0.0
    for p in range(n):
        a, b = pairs[p]
        if stale[a, b]:
            gain = pair_viterbi(counts, placement, distance, a, b, splits, state)
            if gain > 0.0:
                total += gain
                stale[a, :], stale[:, a], stale[b, :], stale[:, b] = True, True, True, True
            stale[a, b] = False
    return total

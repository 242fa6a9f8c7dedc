"""Small routings, and the slow and obvious way to place, that the fast ones are compared with."""

import itertools

import numpy as np
import pytest


@pytest.fixture(scope="session")
def fewest_hops():
    """Optimum by brute force over all balanced placements of counts [layers-1, E, E]; first labels are free. `limits`:
    (tokens [layers, E] of every expert, most [layers] that a GPU may get)."""

    def search(counts, gpus, limits=None):
        experts = counts.shape[1]
        rows = sorted(set(itertools.permutations(np.repeat(np.arange(gpus), experts // gpus).tolist())))
        rows = np.array(rows)
        apart = rows[:, None, :, None] != rows[None, :, None, :]  # [S, S, E, E]
        edges = [(apart * pairs).sum(axis=(2, 3)) for pairs in counts]
        first = [s for s, row in enumerate(rows) if list(dict.fromkeys(row.tolist())) == list(range(gpus))]
        states = [first, *[range(len(rows))] * len(counts)]
        if limits is not None:
            states = [
                [s for s in layer if np.bincount(rows[s], own, gpus).max() <= most]
                for layer, own, most in zip(states, *limits, strict=True)
            ]
        return min(
            sum(edge[a, b] for edge, a, b in zip(edges, path, path[1:], strict=False))
            for path in itertools.product(*states)
        )

    return search


@pytest.fixture(scope="session")
def make_counts():
    """Counts [layers-1, E, E] of whole tokens, skewed so that the best placement is far from any."""

    def draw(seed, layers, experts):
        rng = np.random.default_rng(seed)
        counts = np.floor(rng.gamma(0.4, 20.0, (layers - 1, experts, experts)))
        counts[:, 0, 0] += 1  # never all zero
        return counts

    return draw


@pytest.fixture(scope="session")
def make_trace():
    """A trace [tokens, layers] in which every expert prefers some experts of the next layer."""

    def walk(layers, experts, tokens, seed=0, alpha=0.3):
        rng = np.random.default_rng(seed)
        trace = np.empty((tokens, layers), np.int64)
        trace[:, 0] = rng.integers(experts, size=tokens)
        for layer in range(1, layers):
            edges = rng.dirichlet(np.full(experts, alpha), size=experts).cumsum(axis=1)
            draws = rng.random(tokens)[:, None]
            trace[:, layer] = np.minimum((draws > edges[trace[:, layer - 1]]).sum(axis=1), experts - 1)
        return trace

    return walk

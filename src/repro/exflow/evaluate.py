"""What a placement costs: hops at each level of the machine, and the token load of the busiest GPU."""

from dataclasses import dataclass

import numpy as np

from repro.exflow.levels import make_levels
from repro.exflow.trace import Trace


@dataclass(frozen=True)
class Cost:
    """Averages over the tokens of a trace.

    `hops_per_token`: transitions (of layers-1) whose two experts sit on different GPUs = `intra_hops` + `inter_hops` =
    the sum of `level_hops`, innermost level first. `crossing_fraction`: hops over layers-1, `node_crossing_fraction`:
    hops between nodes over layers-1. `weighted_hops`: Σ level cost · level hops. `max_load`: load of the busiest GPU of
    a layer over the even share (1: even), mean over layers; `max_load_worst_layer`: the maximum over layers.
    """

    hops_per_token: float
    crossing_fraction: float
    node_crossing_fraction: float
    intra_hops: float
    inter_hops: float
    max_load: float
    max_load_worst_layer: float
    level_hops: tuple[float, ...]
    weighted_hops: float


def distances(gpus: int, gpus_per_node: int) -> np.ndarray:
    """float64 [gpus, gpus]: cost of a hop, 1 inside a node and 2 between nodes; 0 on the diagonal."""
    return make_levels(gpus, gpus_per_node).distances()


def total_cost(counts: np.ndarray, gpu: np.ndarray, distance: np.ndarray) -> float:
    """Σ of counts · distance[GPU of a, GPU of b] over layers and pairs; counts [layers-1, E, E], gpu [layers, E]."""
    edges = zip(counts, gpu[:-1], gpu[1:], strict=True)
    return float(sum(np.sum(pairs * distance[here[:, None], there[None, :]]) for pairs, here, there in edges))


def crossings(where: np.ndarray, trace: Trace) -> np.ndarray:
    """int64 [tokens]: transitions of each token of a top-1 trace between two places. `where`: int [layers, E], the GPU
    or the node of every expert."""
    visited = where[np.arange(trace.layers), trace.experts]
    return (visited[:, 1:] != visited[:, :-1]).sum(axis=1)


def loads(counts: np.ndarray) -> np.ndarray:
    """float64 [layers, E]: tokens that visit each expert."""
    return np.concatenate([counts.sum(axis=2), counts[-1:].sum(axis=1)])


def busiest(load: np.ndarray, gpu: np.ndarray, gpus: int) -> np.ndarray:
    """float64 [layers]: load of the busiest GPU over the even share, for expert loads and GPUs [layers, E]."""
    most = np.array([np.bincount(row, own, gpus).max() for row, own in zip(gpu, load, strict=True)])
    total, even = load.sum(axis=1), np.ones(len(load))  # also what a layer that no token visits counts as
    return np.divide(most * gpus, total, out=even, where=total > 0)


def check_counts(counts: np.ndarray) -> np.ndarray:
    """`counts` in float64, which adds them up without loss. ValueError unless they are transition counts,
    [layers-1, E, E]."""
    if not isinstance(counts, np.ndarray):
        raise ValueError(f"counts is a {type(counts).__name__}, must be transition counts: exflow.transitions(trace)")
    if counts.ndim != 3 or counts.shape[1] != counts.shape[2] or 0 in counts.shape:
        raise ValueError(f"transition counts have shape {counts.shape}, must be [layers-1, E, E]")
    if not np.isfinite(counts).all() or (counts < 0).any() or not counts.any():
        found = f"{counts.min()} to {counts.max()}"
        raise ValueError(f"transition counts are {found}, must be finite, not negative and not all zero")
    return np.ascontiguousarray(counts, np.float64)


def check_gpu(gpu: np.ndarray, gpus: int) -> None:
    """ValueError unless `gpu` has a GPU of 0 to gpus - 1 for every expert, integer [layers, E]."""
    if gpu.ndim != 2 or gpu.dtype.kind not in "iu" or not gpu.size:
        raise ValueError(f"gpu is {gpu.dtype} {gpu.shape}, must be integers [layers, experts]")
    if gpu.min() < 0 or gpu.max() >= gpus:
        raise ValueError(f"gpu is {gpu.min()} to {gpu.max()}, allowed: 0 to {gpus - 1}")


def check_shapes(placed: tuple[int, ...], routed: tuple[int, int]) -> None:
    """ValueError unless a placement and routing have equal (layers, experts)."""
    if placed != routed:
        ours, theirs = f"{placed[0]} layers of {placed[1]} experts", f"{routed[0]} of {routed[1]}"
        raise ValueError(f"the placement has {ours}, the routing has {theirs}")

"""What a placement costs: hops between GPUs and nodes, and the token load of the busiest GPU."""

from dataclasses import dataclass

import numpy as np

from repro.exflow.trace import Trace, transitions

INTRA_COST, INTER_COST = 1.0, 2.0  # of one hop inside a node and between nodes, as in the published solver


@dataclass(frozen=True)
class Cost:
    """Averages over the tokens of a trace that passes through all its layers.

    `hops_per_token`: transitions (of layers-1) whose two experts sit on different GPUs = `intra_hops` + `inter_hops`.
    `crossing_fraction`: hops over layers-1. `node_crossing_fraction`: hops between nodes over layers-1.
    `max_load`: load of the busiest GPU of a layer over the even share (1: even), mean over layers; `max_load_worst_layer`: the
    maximum over layers. The paper balances expert counts, not tokens, so these show what its constraint does not control.
    """

    hops_per_token: float
    crossing_fraction: float
    node_crossing_fraction: float
    intra_hops: float
    inter_hops: float
    max_load: float
    max_load_worst_layer: float

    @property
    def weighted_hops(self) -> float:
        """The published solver's cost per token: a hop counts 1 inside a node and 2 between nodes."""
        return INTRA_COST * self.intra_hops + INTER_COST * self.inter_hops


def distances(gpus: int, gpus_per_node: int, intra: float = INTRA_COST, inter: float = INTER_COST) -> np.ndarray:
    """float64 [gpus, gpus]: cost of a hop; 0 on the diagonal."""
    node = np.arange(gpus) // gpus_per_node
    cost = np.where(node[:, None] == node[None, :], intra, inter)
    np.fill_diagonal(cost, 0.0)
    return cost


def total_cost(counts: np.ndarray, gpu: np.ndarray, distance: np.ndarray) -> float:
    """Σ over layers and pairs of experts of counts · distance[GPU of a, GPU of b]; counts [layers-1, E, E], gpu [layers, E]."""
    return float(
        sum(
            np.sum(pairs * distance[here[:, None], there[None, :]])
            for pairs, here, there in zip(counts, gpu[:-1], gpu[1:], strict=True)
        )
    )


def loads(counts: np.ndarray) -> np.ndarray:
    """float64 [layers, E]: tokens that visit each expert."""
    return np.concatenate([counts.sum(axis=2), counts[-1:].sum(axis=1)])


def evaluate_gpus(gpu: np.ndarray, gpus: int, gpus_per_node: int, routing: Trace | np.ndarray) -> Cost:
    """Cost of `gpu` (int [layers, E]) on a trace or on its transition counts (both give the same numbers).

    With top-k routing a hop is a pair of experts of weight 1/k²; ValueError when shapes disagree or no token was counted.
    """
    counts = transitions(routing) if isinstance(routing, Trace) else routing
    layers, experts = gpu.shape
    if counts.shape != (layers - 1, experts, experts):
        raise ValueError(
            f"the placement has {layers} layers of {experts} experts, the routing has {len(counts) + 1} of {counts.shape[-1]}"
        )
    if counts.sum() <= 0:
        raise ValueError("the routing has no tokens")
    tokens = counts.sum() / (layers - 1)
    hops = total_cost(counts, gpu, distances(gpus, gpus_per_node, 1.0, 1.0)) / tokens
    inter = total_cost(counts, gpu, distances(gpus, gpus_per_node, 0.0, 1.0)) / tokens
    load = loads(counts)
    busiest = np.array([np.bincount(row, own, gpus).max() for row, own in zip(gpu, load, strict=True)])
    busiest *= gpus / load.sum(axis=1)
    return Cost(
        hops_per_token=hops,
        crossing_fraction=hops / (layers - 1),
        node_crossing_fraction=inter / (layers - 1),
        intra_hops=hops - inter,
        inter_hops=inter,
        max_load=float(busiest.mean()),
        max_load_worst_layer=float(busiest.max()),
    )

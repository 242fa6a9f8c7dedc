"""What else one could place experts with: the peers of `repro.exflow`, all called alike.

    placement = PARTITIONERS["METIS"](counts, gpus, seed, time_limit_s)    # int64 [layers, E], E/gpus experts per GPU

`counts` are transition counts, float64 [layers-1, E, E] (`exflow.transitions`), E a multiple of gpus. All minimise the
tokens that change GPU at one flat cost, all use one thread; `staged` runs any of them on nodes of GPUs. Methods that
can be repeated are, as long as another run should still fit in the time, and return the best: every peer may use the
same time. A package that is missing raises ImportError.

  load              token load only, as expert-parallel load balancers (EPLB) without replicas: routing between layers
                    is not looked at
  alternating       re-assign one layer at a time optimally between its neighbours (linear assignment), perturb, repeat
  annealing         swaps of two experts at a falling temperature (`annealing.py`)
  METIS             graph partitioning with one balance constraint per layer, then `settled`
  METIS-unbalanced  the same with a single constraint, which leaves layers unbalanced; `settled` repairs them
  CP-SAT            the aggregated integer program (`cp_sat.py`)

HiGHS on that program is `exflow.place(..., method="exflow")` and `"exflow-direct"`.
"""

from collections.abc import Callable
from time import perf_counter

import numpy as np
import scipy.sparse as sp
from scipy.optimize import linear_sum_assignment

from placement_solvers import annealing, cp_sat, metis
from repro.exflow import paper
from repro.exflow.evaluate import distances, loads, total_cost

Partitioner = Callable[[np.ndarray, int, int, float], np.ndarray]
Attempt = Callable[[int, np.ndarray | None], np.ndarray]

PERTURBED = 1 / 20  # share of the experts that `alternating` swaps before it settles again
RESTART_EVERY = 10  # of its rounds


def load(counts: np.ndarray, gpus: int, seed: int = 0, time_limit_s: float = 0.0) -> np.ndarray:
    """The most visited expert first, each goes to the least loaded GPU that has a place left in its layer."""
    del seed, time_limit_s  # nothing is drawn or searched
    places = counts.shape[1] // gpus
    placement = np.empty((len(counts) + 1, counts.shape[1]), np.int64)
    for layer, tokens in enumerate(loads(counts)):
        carried, held = np.zeros(gpus), np.zeros(gpus, np.int64)
        for expert in np.argsort(-tokens, kind="stable"):
            gpu = int(np.argmin(np.where(held < places, carried, np.inf)))
            placement[layer, expert] = gpu
            carried[gpu] += tokens[expert]
            held[gpu] += 1
    return placement


def alternating(counts: np.ndarray, gpus: int, seed: int, time_limit_s: float) -> np.ndarray:
    """Iterated local search: `settled` from a greedy start, then from the best placement with a few experts swapped."""
    rng = np.random.default_rng(seed)

    def attempt(run: int, best: np.ndarray | None) -> np.ndarray:
        afresh = best is None or run % RESTART_EVERY == 0
        return settled(counts, _greedy(counts, gpus, rng) if afresh else _perturbed(best, rng), gpus)

    return _repeated(attempt, counts, gpus, time_limit_s)


def metis_balanced(counts: np.ndarray, gpus: int, seed: int, time_limit_s: float) -> np.ndarray:
    """METIS with a balance constraint for every layer; layers that it leaves unbalanced are repaired by `settled`."""
    layers, experts = len(counts) + 1, counts.shape[1]
    return _metis(counts, gpus, seed, time_limit_s, np.repeat(np.eye(layers, dtype=np.int32), experts, axis=0))


def metis_unbalanced(counts: np.ndarray, gpus: int, seed: int, time_limit_s: float) -> np.ndarray:
    """METIS with one balance constraint over all layers, repaired by `settled`."""
    layers, experts = len(counts) + 1, counts.shape[1]
    return _metis(counts, gpus, seed, time_limit_s, np.ones((layers * experts, 1), np.int32))


PARTITIONERS: dict[str, Partitioner] = {
    "load": load,
    "alternating": alternating,
    "annealing": annealing.anneal,
    "METIS": metis_balanced,
    "METIS-unbalanced": metis_unbalanced,
    "CP-SAT": cp_sat.place,
}


def staged(
    partitioner: Partitioner, counts: np.ndarray, gpus: int, gpus_per_node: int, seed: int, time_limit_s: float
) -> np.ndarray:
    """Place on nodes first (half of the time), then inside each node (the rest, shared evenly): int64 [layers, E].

    As in the paper, only transitions with both ends in the node count within it. ValueError when the experts cannot
    be shared evenly or the GPUs do not make whole nodes; the partitioners themselves do not look.
    """
    if gpus < 1 or counts.shape[1] % gpus:
        raise ValueError(f"{counts.shape[1]} experts per layer cannot be shared evenly by {gpus} GPUs")
    if gpus_per_node < 1 or gpus % gpus_per_node:
        raise ValueError(f"{gpus} GPUs do not make whole nodes of {gpus_per_node}")
    stages = [parts for parts in (gpus // gpus_per_node, gpus_per_node) if parts > 1] or [1]

    def split(members: np.ndarray, inside: np.ndarray, parts: int, _: float) -> np.ndarray:
        group = members.shape[1] / counts.shape[1]  # as a share of all experts
        return partitioner(inside, parts, seed, time_limit_s / len(stages) * group)

    return paper.staged(counts, stages, split)


def settled(counts: np.ndarray, placement: np.ndarray, gpus: int) -> np.ndarray:
    """`placement` with each layer in turn re-assigned optimally between its neighbours until nothing changes.

    Two neighbouring layers gain nothing from the same swap in both, so whenever this stops, GPUs are renamed from each
    layer on as suits the layer before, and it goes on if that gained something.
    """
    seats = np.repeat(np.arange(gpus), counts.shape[1] // gpus)
    placement = placement.copy()
    order, changed = list(range(len(placement))), True
    unbalanced = {layer for layer in order if not np.array_equal(np.sort(placement[layer]), seats)}
    while changed:
        changed = False
        for layer in order:
            kept = _kept(counts, placement, gpus, layer)
            expert, seat = linear_sum_assignment(kept[:, seats], maximize=True)
            now = kept[expert, placement[layer]].sum()
            if layer in unbalanced or kept[expert, seats[seat]].sum() > now + 1e-9 * (1.0 + abs(now)):
                unbalanced.discard(layer)
                placement[layer, expert] = seats[seat]
                changed = True
        order.reverse()
        changed = changed or _renamed(counts, placement, gpus)
    return placement


def _kept(counts: np.ndarray, placement: np.ndarray, gpus: int, layer: int) -> np.ndarray:
    """float64 [E, gpus]: tokens that stay when an expert of `layer` is on a GPU, other layers as they are."""
    eye = np.eye(gpus)
    kept = np.zeros((placement.shape[1], gpus))
    if layer > 0:
        kept += counts[layer - 1].T @ eye[placement[layer - 1]]
    if layer < len(counts):
        kept += counts[layer] @ eye[placement[layer + 1]]
    return kept


def _renamed(counts: np.ndarray, placement: np.ndarray, gpus: int) -> bool:
    """Match GPU names, from each layer on, to those of the layer before, in place; whether that kept tokens."""
    eye, gained = np.eye(gpus), False
    for layer, pairs in enumerate(counts):
        shared = eye[placement[layer]].T @ pairs @ eye[placement[layer + 1]]
        here, there = linear_sum_assignment(shared, maximize=True)
        if shared[here, there].sum() > np.trace(shared) * (1.0 + 1e-9):
            placement[layer + 1 :] = here[np.argsort(there)][placement[layer + 1 :]]
            gained = True
    return gained


def _greedy(counts: np.ndarray, gpus: int, rng: np.random.Generator) -> np.ndarray:
    """A random first layer, then each layer assigned optimally to the one before."""
    seats = np.repeat(np.arange(gpus), counts.shape[1] // gpus)
    placement = np.empty((len(counts) + 1, counts.shape[1]), np.int64)
    placement[0] = rng.permutation(seats)
    for layer, pairs in enumerate(counts):
        kept = pairs.T @ np.eye(gpus)[placement[layer]]
        expert, seat = linear_sum_assignment(kept[:, seats], maximize=True)
        placement[layer + 1, expert] = seats[seat]
    return placement


def _perturbed(placement: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A copy in which a few pairs of experts of the same layer have swapped GPUs."""
    placement = placement.copy()
    layers, experts = placement.shape
    for _ in range(max(4, int(placement.size * PERTURBED))):
        layer, pair = rng.integers(layers), rng.integers(experts, size=2)
        placement[layer, pair] = placement[layer, pair[::-1]]
    return placement


def _metis(counts: np.ndarray, gpus: int, seed: int, time_limit_s: float, vertex_weights: np.ndarray) -> np.ndarray:
    """Its own seed hardly changes what METIS finds, so each run gets the vertices in another order."""
    layers, experts = len(counts) + 1, counts.shape[1]
    rng = np.random.default_rng(seed)
    begun = perf_counter()
    graph = _graph(counts)

    def attempt(run: int, best: np.ndarray | None) -> np.ndarray:
        del best  # METIS takes no start
        order = rng.permutation(len(vertex_weights))
        part = np.empty(len(order), np.int64)
        part[order] = metis.part_graph(graph[order][:, order], vertex_weights[order], gpus, run)
        return settled(counts, part.reshape(layers, experts), gpus)

    return _repeated(attempt, counts, gpus, time_limit_s - (perf_counter() - begun))


def _graph(counts: np.ndarray) -> sp.csr_array:
    """Symmetric int32 [layers·E, layers·E]: experts are vertices, transition counts weigh the edges, at least 1."""
    layers, experts = len(counts) + 1, counts.shape[1]
    scale = min(1e6 / counts.max(), metis.LARGEST_TOTAL / counts.sum() / 2)
    layer, here, there = np.nonzero(np.rint(counts * scale))
    weights = np.rint(counts[layer, here, there] * scale).astype(np.int32)
    ends = layer * experts + here, (layer + 1) * experts + there
    upper = sp.coo_array((weights, ends), shape=(layers * experts,) * 2)
    return (upper + upper.T).tocsr()


def _repeated(attempt: Attempt, counts: np.ndarray, gpus: int, time_limit_s: float) -> np.ndarray:
    """The best of as many attempts as fit in the time, at least one; each gets its number and the best so far."""
    start = perf_counter()
    best = attempt(0, None)
    least, run = _cut(counts, best, gpus), 1
    while (perf_counter() - start) * (run + 1) / run <= time_limit_s:
        found = attempt(run, best)
        if (cut := _cut(counts, found, gpus)) < least:
            best, least = found, cut
        run += 1
    return best


def _cut(counts: np.ndarray, placement: np.ndarray, gpus: int) -> float:
    return total_cost(counts, placement, distances(gpus, gpus))

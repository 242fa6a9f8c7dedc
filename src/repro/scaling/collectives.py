"""Time of a collective on a network: the rounds of its algorithm, added up.

Processors spend each message's latency, and add up what a reduction receives; links drain the bytes that the busiest one carries.
"""

import math
from collections.abc import Sequence

import numpy as np

from repro.scaling.algorithms import ALGORITHMS, Algorithm, Kind, Shape, Stage, possible, stages
from repro.scaling.network import Network, Value


def seconds(
    kind: Kind,
    nbytes: float,
    network: Network,
    algorithm: Algorithm | None = None,
    *,
    levels: Sequence[str] | None = None,
    channels: float | None = None,
    inner: Algorithm | None = None,
) -> Value:
    """Seconds of one collective among all ranks, or, with `levels` (consecutive ones), in every group of ranks that differ in these
    levels only, all groups at the same time.

    nbytes      bytes of one rank's whole tensor
    algorithm   see `algorithms`; default: the fastest of those that know the group's size
    channels    of a ring: how many run side by side; default as many as the level with the most links has
    inner       what `hierarchical` runs in each level; default the fastest

    A float, or [draws] where the network's parameters are. Raises ValueError for an algorithm that the collective lacks.
    """
    if algorithm is None:
        return fastest(kind, nbytes, network, levels=levels, channels=channels)[1]
    if algorithm not in ALGORITHMS[kind]:
        raise ValueError(f"{kind} by {algorithm!r} is not known, allowed: {', '.join(ALGORITHMS[kind])}")
    first, last = _range(network, levels)
    if algorithm == "hierarchical":
        return _hierarchical(kind, nbytes, network, first, last, inner)
    shape = _shape(network, first, last, channels)
    if shape.ranks == 1:
        return 0.0
    return _evaluate(stages(kind, algorithm, shape), nbytes, network, first)


def fastest(
    kind: Kind, nbytes: float, network: Network, *, levels: Sequence[str] | None = None, channels: float | None = None
) -> tuple[Algorithm, Value]:
    """The algorithm with the least (mean) time, and that time."""
    first, last = _range(network, levels)
    ranks = _shape(network, first, last, channels).ranks
    found = []
    for algorithm in ALGORITHMS[kind]:
        if not possible(algorithm, kind, ranks) or (algorithm == "hierarchical" and first == last):
            continue
        found.append((algorithm, seconds(kind, nbytes, network, algorithm, levels=levels, channels=channels)))
    return min(found, key=lambda pair: float(np.mean(pair[1])))


def _hierarchical(kind: Kind, nbytes: float, network: Network, first: int, last: int, inner: Algorithm | None) -> Value:
    """One collective per level: a gather comes from the outermost inwards, a reduction goes outwards, so the slow levels carry only the
    part that one inner rank has; an all-to-all carries everything at every level."""
    if kind == "all_reduce":
        halves: tuple[Kind, Kind] = ("reduce_scatter", "all_gather")
        return sum(_hierarchical(half, nbytes, network, first, last, inner) for half in halves)
    names, total, part = network.topology.names, 0.0, nbytes
    for level in range(first, last + 1):
        size = network.topology.levels[level].size
        if size == 1:
            continue
        total = total + seconds(kind, part, network, inner, levels=names[level : level + 1])
        part = part if kind == "all_to_all" else part / size
    return total


def _evaluate(found: Sequence[Stage], nbytes: float, network: Network, first: int) -> Value:
    working: Value = network.overhead_s  # of the processors
    draining: Value = 0.0  # of the links
    for stage in found:
        busy: Value = 0.0
        for level, (hops, load) in enumerate(zip(stage.hops, stage.loads, strict=True), start=first):
            if load or hops:
                protocol = network.links[level].protocol(stage.message * nbytes)
                working = working + hops * protocol.latency_s
                busy = np.maximum(busy, load * nbytes / protocol.bytes_per_s)
        draining = draining + stage.rounds * busy
        moved = stage.sent * network.topology.world_size / network.host_bytes_per_s
        working = working + stage.rounds * nbytes * (moved + stage.reduced / network.reduce_bytes_per_s)
    total = working + draining - network.hidden * np.minimum(working, draining)
    return total if isinstance(total, np.ndarray) else float(total)


def _range(network: Network, levels: Sequence[str] | None) -> tuple[int, int]:
    """First and last level of a hop."""
    names = network.topology.names
    if levels is None:
        return 0, len(names) - 1
    indices = [network.topology.index(name) for name in levels]
    if not indices or indices != list(range(indices[0], indices[0] + len(indices))):
        raise ValueError(f"levels {list(levels)} are not consecutive in {', '.join(names)}")
    return indices[0], indices[-1]


def _shape(network: Network, first: int, last: int, channels: float | None) -> Shape:
    sizes = tuple(level.size for level in network.topology.levels)
    counts = tuple(links.count for links in network.links[first : last + 1])
    return Shape(sizes[first : last + 1], counts, math.prod(sizes[:first]), channels or max(counts))

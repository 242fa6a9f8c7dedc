"""Time of a collective on a network: the rounds of its algorithm, added up."""

import functools
import math
from collections.abc import Sequence

import numpy as np

from repro.scaling.algorithms import ALGORITHMS, Algorithm, Group, Kind, Stage, halves, possible, stages
from repro.scaling.network import Network, Value


def seconds(
    kind: Kind,
    nbytes: float,
    network: Network,
    algorithm: Algorithm | None = None,
    *,
    levels: Sequence[str] | None = None,
    channels: float | None = None,
) -> Value:
    """Seconds of one collective: a float, or [draws] where the network's parameters are.

    kind        all_gather, reduce_scatter, all_reduce, all_to_all or send_recv
    nbytes      bytes of one rank's whole tensor
    algorithm   see `algorithms`; default: the fastest that works for the number of ranks
    levels      consecutive ones: every group of ranks that differ in these levels only runs the collective, all groups
                at the same time; default: one group of all ranks
    channels    rings that run side by side; default: as many as the level with the most links has

    ValueError for an unknown kind, an algorithm that the collective lacks or that cannot run in this group
    (`algorithms.possible`), levels that are unknown or not consecutive, and bytes that are no finite number from 0 on.
    """
    if kind not in ALGORITHMS:
        raise ValueError(f"collective {kind!r} is not known, allowed: {', '.join(ALGORITHMS)}")
    if not 0 <= nbytes < math.inf:
        raise ValueError(f"nbytes is {nbytes}, allowed: 0 and more, and finite")
    first, last = _range(network, levels)
    sizes = [level.size for level in network.topology.levels]
    counts = tuple(links.count for links in network.links[first : last + 1])
    switches = frozenset(i for i, links in enumerate(network.links[first : last + 1]) if links.in_network)
    group = Group(tuple(sizes[first : last + 1]), counts, math.prod(sizes[:first]), channels or max(counts), switches)
    if algorithm is None:
        found = [
            seconds(kind, nbytes, network, each, levels=levels, channels=channels)
            for each in ALGORITHMS[kind]
            if possible(each, kind, group) and not (each == "hierarchical" and first == last)
        ]
        return min(found, key=lambda each: float(np.mean(each)))
    if algorithm not in ALGORITHMS[kind]:
        raise ValueError(f"{kind} by {algorithm!r} is not known, allowed: {', '.join(ALGORITHMS[kind])}")
    if algorithm == "hierarchical":
        return _hierarchical(kind, nbytes, network, first, last)
    if group.ranks == 1:
        return 0.0
    return _evaluate(stages(kind, algorithm, group), nbytes, network, first)


def fastest(
    kind: Kind,
    nbytes: float,
    options: Sequence[tuple[Network, Sequence[Algorithm]]],
    *,
    levels: Sequence[str] | None = None,
    channels: float | None = None,
) -> Value:
    """Seconds by the fastest algorithm of those that a library has on each of some networks, in each draw by itself.
    ValueError where none of them is one of the collective's."""
    found = [
        seconds(kind, nbytes, network, each, levels=levels, channels=channels)
        for network, names in options
        for each in names
        if each in ALGORITHMS[kind]
    ]
    if not found:
        names = ", ".join(dict.fromkeys(each for _, names in options for each in names))
        raise ValueError(f"{kind}: none of {names} is one of its algorithms")
    return functools.reduce(np.minimum, found)


def _hierarchical(kind: Kind, nbytes: float, network: Network, first: int, last: int) -> Value:
    """The fastest collective of each level, innermost first (an all-gather in the other order, which takes as long).
    Slow levels carry only the part that one inner rank has; of an all-to-all every level carries the whole tensor."""
    if kind == "all_reduce":
        return sum(_hierarchical(half, nbytes, network, first, last) for half in halves(kind))
    total: Value = 0.0
    for level in network.topology.levels[first : last + 1]:
        if level.size > 1:
            total = total + seconds(kind, nbytes, network, levels=[level.name])
            nbytes = nbytes if kind == "all_to_all" else nbytes / level.size
    return total


def _evaluate(found: Sequence[Stage], nbytes: float, network: Network, first: int) -> Value:
    """Seconds of the stages of a group whose innermost level is number `first`."""
    working: Value = network.overhead_s  # of the processors
    draining: Value = 0.0  # of the links
    for stage in found:
        busy: Value = 0.0
        filling: Value = 0.0
        least: Value = 0.0  # what a link carries, at its rate: hops in a row can take less where channels share it
        for level, (hops, load) in enumerate(zip(stage.hops, stage.loads, strict=True), start=first):
            if load or hops:
                links = network.links[level]
                switch = links.in_network if level - first in stage.switched else None
                protocol = switch or links.protocol(stage.message * nbytes)
                rate = protocol.rate(nbytes)
                working = working + hops * protocol.latency_s
                chunk = 0.0  # the others follow it through all hops at once
                if stage.pipelined and not switch:
                    chunk = min(protocol.chunk_bytes, stage.message * nbytes)
                    filling = filling + hops * chunk / rate
                busy = np.maximum(busy, load * (nbytes - chunk / stage.message) / rate)
                least = np.maximum(least, load * nbytes / rate)
        draining = draining + stage.rounds * np.maximum(filling + busy, least)
        moved = stage.sent * network.topology.world_size / network.host_bytes_per_s
        working = working + stage.rounds * stage.peers * network.peer_s
        working = working + stage.rounds * nbytes * (moved + stage.reduced / network.reduce_bytes_per_s)
    total = np.maximum(working, draining) if network.emulated else working + draining
    return total if isinstance(total, np.ndarray) else float(total)


def _range(network: Network, levels: Sequence[str] | None) -> tuple[int, int]:
    """Numbers of the first and the last of `levels`."""
    names = network.topology.names
    if levels is None:
        return 0, len(names) - 1
    indices = [network.topology.index(name) for name in levels]
    if not indices or indices != list(range(indices[0], indices[0] + len(indices))):
        raise ValueError(f"levels {list(levels)} are not consecutive in {', '.join(names)}")
    return indices[0], indices[-1]

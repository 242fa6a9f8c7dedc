"""What a network costs: latency and bandwidth of every level of a topology, and the links that its ranks share.

A message of n bytes takes alpha + n / beta seconds on its level (Hockney's model). Two things are added, because the papers' arguments
rest on them: the ranks of a unit share its links to the outside (8 GCDs share 4 NICs), and a message takes one link only, so an
algorithm that sends one message at a time out of a node leaves three of four NICs idle.

Every parameter is a number, or an array with one value per draw of an uncertain one: all arithmetic here is elementwise, so a
prediction for a thousand draws is one call.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from repro.topology import Level, Topology

Value = float | NDArray[np.float64]  # one number, or [draws]


@dataclass(frozen=True, eq=False)
class Protocol:
    """Seconds of a message: `latency_s`, and its bytes over `bytes_per_s` of one link in one direction. Holds for messages from
    `from_bytes` on: libraries change protocol with the size (eager and rendezvous; NCCL's LL, LL128 and Simple)."""

    latency_s: Value
    bytes_per_s: Value
    from_bytes: float = 0.0


@dataclass(frozen=True, eq=False)
class Links:
    """How one unit of the level below reaches the others of its level: `count` links, the protocols by rising `from_bytes`."""

    count: float
    protocols: tuple[Protocol, ...]

    def __post_init__(self) -> None:
        starts = [protocol.from_bytes for protocol in self.protocols]
        if self.count <= 0 or not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(
                f"links need a positive count (found {self.count}) and protocols that begin at 0 bytes and rise (found {starts})"
            )

    def protocol(self, message_bytes: float) -> Protocol:
        """The one that a message of this size takes."""
        return next(p for p in reversed(self.protocols) if message_bytes >= p.from_bytes)


@dataclass(frozen=True, eq=False)
class Network:
    """Links of every level of `topology`, innermost first.

    overhead_s           before the first message of a collective: launching it
    reduce_bytes_per_s   bytes that a rank adds up per second in a reduction
    host_bytes_per_s     bytes of all ranks together that the processors move per second, where the ranks of the whole machine share
                         them (an emulated network); infinite on a real one
    hidden               share of the shorter of the processors' work and the links' that goes on beside the longer. 0: one after the
                         other; 1: links take what they are given and drain it meanwhile (an emulated network, whose shaper queues)
    """

    topology: Topology
    links: tuple[Links, ...]
    overhead_s: Value = 0.0
    reduce_bytes_per_s: Value = math.inf
    host_bytes_per_s: Value = math.inf
    hidden: float = 0.0

    def __post_init__(self) -> None:
        if len(self.links) != len(self.topology.levels):
            raise ValueError(f"{len(self.links)} links for the {len(self.topology.levels)} levels of the topology")


def of(topology: Topology, counts: Mapping[str, int] | None = None) -> Network:
    """The network that a topology's own latencies and rates describe.

    `Level.bytes_per_s` is a rank's share with all ranks busy: without `counts` every rank has that for its own. `counts` names the
    links that the ranks of a unit share at a level, e.g. {"cluster": 4} for Frontier's four NICs a node; together they are as fast.
    Raises ValueError for a level that the topology lacks.
    """
    counts = dict(counts or {})
    for name in counts:
        topology.index(name)
    links, below = [], 1
    for level in topology.levels:
        count = counts.get(level.name, below)
        protocol = Protocol(level.latency_s, level.bytes_per_s * below / count)
        links.append(Links(count, (protocol,)))
        below *= level.size
    return Network(topology, tuple(links))


def one_level(ranks: int, protocols: Sequence[Protocol], reduce_bytes_per_s: Value = math.inf) -> Network:
    """Ranks that are alike to each other, each with a link of its own."""
    return Network(
        Topology((Level("cluster", ranks),)), (Links(1, tuple(protocols)),), reduce_bytes_per_s=reduce_bytes_per_s
    )

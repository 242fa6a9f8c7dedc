"""What a network costs: latency and bandwidth of every level of a topology, and the links that its ranks share.

A message of n bytes takes alpha + n / beta seconds on its level (Hockney's model). The ranks of a unit share its links
to the outside, and a message takes one link: one message at a time leaves three of a node's four NICs idle.

Every parameter is a number, or an array with a value per draw; all arithmetic is elementwise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from repro.topology import Topology

Value = float | NDArray[np.float64]  # one number, or [draws]


@dataclass(frozen=True, eq=False)
class Protocol:
    """A message of at least `from_bytes` takes `latency_s`, and its bytes over `bytes_per_s` of one link in one
    direction. Libraries change protocol with the size (eager and rendezvous; NCCL's LL, LL128 and Simple).

    chunk_bytes   of a message that crosses several hops, what a rank must have before it sends it on. The default is
                  NCCL's and RCCL's for large messages: a buffer of 4 MiB in eight steps
    shares        of the rate, for a whole tensor of 64 B, of 128 B and so on; larger ones have the last. Between these
                  sizes along a line over the logarithm. Default: all of it at every size
    """

    latency_s: Value
    bytes_per_s: Value
    from_bytes: float = 0.0
    chunk_bytes: float = 2.0**19
    shares: tuple[float, ...] = ()

    def rate(self, tensor_bytes: float) -> Value:
        """Bytes per second of one link while a tensor of so many bytes is sent."""
        if not self.shares:
            return self.bytes_per_s
        doublings = math.log2(max(tensor_bytes, 64.0) / 64)
        return float(np.interp(doublings, range(len(self.shares)), self.shares)) * self.bytes_per_s


@dataclass(frozen=True, eq=False)
class Links:
    """The links out of one unit to the others of its level: how many, and their protocols by rising `from_bytes`.

    in_network   latency and rate of a reduction or multicast by the level's switches (NVLS, SHARP); None: they cannot

    ValueError for a count of 0, and for protocols that do not begin at 0 bytes or do not rise.
    """

    count: float
    protocols: tuple[Protocol, ...]
    in_network: Protocol | None = None

    def __post_init__(self) -> None:
        starts = [protocol.from_bytes for protocol in self.protocols]
        if self.count <= 0 or not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"links need a count above 0 and protocols that begin at 0 bytes and rise, found {self}")

    def protocol(self, message_bytes: float) -> Protocol:
        return next(p for p in reversed(self.protocols) if message_bytes >= p.from_bytes)


@dataclass(frozen=True, eq=False)
class Network:
    """Links of every level of `topology`, innermost first.

    overhead_s           to launch a collective, before its first message
    peer_s               between the starts of two messages of a rank, where one goes to every other rank at once (the
                         gap g of LogP, Culler et al. 1993)
    reduce_bytes_per_s   bytes that a rank adds up per second in a reduction
    host_bytes_per_s     bytes that the processors of one machine move per second for all ranks together, where the
                         network is `emulated`; infinite on a real one

    ValueError unless there are links for every level.
    """

    topology: Topology
    links: tuple[Links, ...]
    overhead_s: Value = 0.0
    peer_s: Value = 0.0
    reduce_bytes_per_s: Value = math.inf
    host_bytes_per_s: Value = math.inf

    def __post_init__(self) -> None:
        if len(self.links) != len(self.topology.levels):
            raise ValueError(f"{len(self.links)} links for the {len(self.topology.levels)} levels of the topology")

    @property
    def emulated(self) -> bool:
        """Whether all ranks share the processors of one machine. Its links queue messages while the processors go on, so
        the shorter of their works costs nothing; on a real network one follows the other."""
        return bool(np.isfinite(self.host_bytes_per_s).all())


def network_of(topology: Topology, counts: Mapping[str, int] | None = None) -> Network:
    """The network that a topology's own latencies and rates describe.

    counts   links that the ranks of a unit share at a level, e.g. {"cluster": 4} for the four NICs of a Frontier node.
             Together they are as fast as all ranks' shares (`Level.bytes_per_s`). Default: a link of its own per rank
    """
    links, below = [], 1
    for level in topology.levels:
        count = (counts or {}).get(level.name, below)
        links.append(Links(count, (Protocol(level.latency_s, level.bytes_per_s * below / count),)))
        below *= level.size
    return Network(topology, tuple(links))

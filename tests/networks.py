"""Networks of made machines, for tests of predictions."""

from collections.abc import Mapping

from repro.scaling.network import Links, Network, Protocol
from repro.topology import Topology


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

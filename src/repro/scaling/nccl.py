"""NCCL's own reckoning of its collectives: latency and share of the links' rate of each algorithm and protocol.

NCCL runs what its tuner reckons to be fastest, with constants that stand in its source (`src/graph/tuning.cc`, NCCL
2.30: baseLatencies, hwLatencies, and the factors below "Various model refinements"). With them a fit
finds only what a machine decides: the rates of its links, the time to launch, and one factor on all latencies between
nodes, since other NICs take other times. A latency for each protocol, fitted to a few ranks, tells little of many: the
times of small messages are mostly the wait for the slower rank, which no hop repeats.

Left out, of the tuner's factors: what depends on the processor's maker; the limits per channel; 0.85 for trees whose
node sends and receives through the same GPU (NCCL_TOPO_PATTERN_TREE); the correction of rings by Simple between nodes
("plateau"); and the latencies of a NIC behind a slower path (latencyInter), of the network's launches (netOverhead) and
of rings with one GPU a node. Of its algorithms: PAT, and the reductions in switches (NVLS, CollNet), of which no
measured times are shipped. RCCL has tables of its own in place of these.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from repro.scaling.algorithms import Algorithm
from repro.scaling.network import Links, Network, Protocol, Value
from repro.topology import Topology


class Variant(NamedTuple):
    """Algorithms by a protocol: microseconds to begin, of a hop over NVLink and over the network; share of the rate on
    one node; bytes that a channel sends on at a time (an eighth of its buffer, without flags: `src/include/device.h`);
    share of the rate on several nodes, where it is another."""

    protocol: Literal["LL", "LL128", "Simple"]
    algorithms: tuple[Algorithm, ...]
    base_us: float
    nvlink_us: float
    network_us: float
    share: float
    chunk_bytes: float = 2.0**19
    nodes_share: float | None = None


TREE = 0.92  # of the rate, whatever the protocol, whose own share comes on top
VARIANTS = (
    Variant("LL", ("ring", "direct"), 6.6, 0.6, 2.7, 0.5, 2.0**15),  # every 4 bytes come with a flag of 4
    Variant("LL128", ("ring",), 14.0, 1.9, 4.0, 0.92, 576e3),  # 120 of 128 bytes are data
    Variant("Simple", ("ring", "direct", "pairwise"), 8.4, 3.4, 14.0, 1.0),
    Variant("LL", ("tree",), 6.8, 0.6, 5.0, TREE / 3.8, 2.0**15),
    Variant("LL128", ("tree",), 14.0, 1.25, 8.5, TREE * 7 / 9, 576e3, nodes_share=TREE * 120 / 128),
    Variant("Simple", ("tree",), 8.4, 4.0, 14.0, TREE),
)
# Shares of a tree's rate for tensors of 64 B to 256 MiB (treeCorrectionFactor). From 512 MiB on there is no correction
# (ncclTopoGetAlgoTime).
MEDIUM = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, *3 * [0.8], 0.7, *6 * [0.6], 0.8, *4 * [0.9], 1, 1, 1),
    "Simple": (*7 * [0.9], 0.8, 0.7, 0.6, 0.6, *4 * [0.5], 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 1),
}
# Bytes/s of LL on one node, and out of each of two nodes and of more, at most (llMaxBws). On one node A100's and,
# before NCCL 2.21, H100's (later 141e9); with AMD's processors 22.5e9 on two nodes and 19e9 on more.
LL_AT_MOST = (87.7e9, 39e9, 20.4e9)


def networks(
    topology: Topology,
    counts: Sequence[float],
    rates: Sequence[Value],
    overhead_s: Value = 0.0,
    peer_s: Value = 0.0,
    network_latency: Value = 1.0,
    ll128: bool = True,
) -> list[tuple[Network, tuple[Algorithm, ...]]]:
    """What NCCL can choose: networks, and the algorithms that run on each. The innermost level is NVLink.

    counts, rates    by level: links out of a unit, and the bytes per second of one
    overhead_s       on top of NCCL's own, such as the wait for a slower rank
    peer_s           between messages to two ranks, which NCCL's tuner does not reckon with
    network_latency  a hop between nodes, over what NCCL's tuner reckons with
    ll128            whether LL128 runs between nodes (`Model.ll128`)
    """
    found = []
    nodes = math.prod(level.size for level in topology.levels[1:])
    for variant in VARIANTS:
        if variant.protocol == "LL128" and nodes > 1 and not ll128:
            continue
        share = variant.share if nodes == 1 or variant.nodes_share is None else variant.nodes_share
        shares = MEDIUM[variant.protocol] if "tree" in variant.algorithms else ()
        links = []
        for level, (count, rate) in enumerate(zip(counts, rates, strict=True)):
            latency_s = 1e-6 * (network_latency * variant.network_us if level else variant.nvlink_us)
            usable = share * rate
            if variant.protocol == "LL" and (level or nodes == 1):
                usable = np.minimum(usable, LL_AT_MOST[min(nodes, 3) - 1] / count)
            links.append(Links(count, (Protocol(latency_s, usable, chunk_bytes=variant.chunk_bytes, shares=shares),)))
        overhead = overhead_s + 1e-6 * variant.base_us
        network = Network(topology, tuple(links), overhead_s=overhead, peer_s=peer_s)
        found.append((network, variant.algorithms))
    return found

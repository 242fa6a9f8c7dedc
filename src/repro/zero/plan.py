"""The plans that have names. With M = 2 psi bytes of 16-bit weights, and what a node of a large machine sends per step:

    plan              weights   secondary gradients   optimizer   sent by a node, one micro-batch
    ddp               -         -         -           -           2 M      all-reduce
    zero1             -         -         -           cluster     2 M      reduce-scatter, all-gather
    zero2             -         -         cluster     cluster     2 M      the same, the reduction per micro-batch
    zero3             cluster   -         cluster     cluster     3 M      two gathers, a reduction
    hpz               cluster   node      cluster     cluster     2 M      gathers before a backward stay in the node
    qwz               cluster   -         cluster     cluster     2 M      INT8 gathers
    qgz               cluster   -         cluster     cluster     2.25 M   INT4 two-hop reduction
    zeropp            cluster   node      cluster     cluster     0.75 M   hpz, qwz and qgz together
    mics, hsdp        node      -         node        node        2 M      ZeRO-3 in a node, all-reduce across nodes
    hfsdp             node      -         node        cluster     2 M      the same, as a reduction and a gather
    hierarchical      package   -         node        cluster     0.75 M   once per step, whatever the micro-batches

The last row is arXiv 2501.04266 as we read it. Only "three levels" is published: the degrees, and the defaults that
`hierarchical` marks [INF], are inferences; each is a switch. Collectives are flat, as in the libraries that these plans
come from, but for `hierarchical` and `mics` (one hop per level) and the gradients of `qgz` and `zeropp` (two hops: in the
node, and across nodes).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from repro import comm
from repro.comm import BLOCK, Route
from repro.topology import Topology
from repro.zero.plan_space import Plan


def ddp(topology: Topology) -> Plan:
    """Everything replicated, gradients all-reduced in one hop over all ranks: the baseline that needs most memory."""
    return _flat("ddp", topology, None, None, None)


def zero1(topology: Topology) -> Plan:
    """ZeRO-1: optimizer states over all ranks. A rank adds up whole gradients and shares them once per step."""
    return _flat("zero1", topology, None, None, topology.names[-1])


def zero2(topology: Topology) -> Plan:
    """ZeRO-2: gradients too, so they are reduced after every micro-batch."""
    return _flat("zero2", topology, None, topology.names[-1], topology.names[-1])


def zero3(topology: Topology) -> Plan:
    """ZeRO-3: everything over all ranks, flat collectives as DeepSpeed runs them. 3 M per micro-batch."""
    top = topology.names[-1]
    return _flat("zero3", topology, top, top, top)


def hpz(topology: Topology) -> Plan:
    """ZeRO-3 and hpZ of ZeRO++ (arXiv 2306.10209): secondary shards of the weights, over the ranks of a node.
    ValueError on a topology of one level."""
    ring = comm.flat(topology)
    return replace(zero3(topology), name="hpz", secondary=_node(topology), secondary_route=ring)


def qwz(topology: Topology, bits: int = 8) -> Plan:
    """ZeRO-3 and qwZ of ZeRO++: weights are gathered as INT8."""
    gather = comm.flat(topology, bits)
    return replace(zero3(topology), name="qwz", weight_route=gather, update_route=gather)


def qgz(topology: Topology, bits: int = 4, hops: Literal[1, 2] = 2) -> Plan:
    """ZeRO-3 and qgZ of ZeRO++: gradients are reduced as INT4 by an all-to-all in the node and one across nodes.

    `hops` 1 is the scheme that qgZ improves on: one all-to-all over all ranks, in which a node sends every rank's
    contribution separately (M P / Z bytes for P ranks a node and Z-fold compression, instead of M / Z).
    """
    _node(topology)
    *inside, top = topology.names
    route = comm.flat(topology, bits) if hops == 1 else Route((tuple(inside), (top,)), (bits, bits))
    return replace(zero3(topology), name="qgz", gradient_route=route)


def zeropp(topology: Topology, weight_bits: int = 8, gradient_bits: int = 4) -> Plan:
    """ZeRO++: hpZ, qwZ (which quantises the gather of the secondary shards too, as DeepSpeed does) and qgZ.

    On a machine of one level there is no node to keep secondary shards in: refused.
    """
    gather = comm.flat(topology, weight_bits)
    return replace(
        qgz(topology, gradient_bits),
        name="zeropp",
        weight_route=gather,
        update_route=gather,
        secondary=_node(topology),
        secondary_route=gather,
    )


def mics(topology: Topology, level: str | None = None) -> Plan:
    """MiCS (arXiv 2205.00119): all states over one unit of `level` (default: a node) with hierarchical gathers;
    gradients are all-reduced between the units once per step."""
    level = level or _node(topology)
    route = comm.hierarchical(topology)
    return Plan("mics", topology, level, level, level, route, route, route)


def hsdp(topology: Topology, level: str | None = None) -> Plan:
    """HSDP, as PyTorch's FSDP calls it: the partition of MiCS with flat gathers, and an all-reduce between the units
    after every micro-batch."""
    level = level or _node(topology)
    inside = topology.names[: topology.index(level) + 1]
    hops = tuple(hop for hop in (inside, topology.names[len(inside) :]) if hop)
    route = Route(hops, (16,) * len(hops))
    return Plan("hsdp", topology, level, level, level, route, route, route, reduce_across="micro_batch")


def hfsdp(topology: Topology, level: str | None = None) -> Plan:
    """HFSDP of Megatron-FSDP (`outer_dp_sharding_strategy="optim"`): HSDP with the optimizer states over all ranks.

    The all-reduce between the units becomes, once per step, a reduce-scatter of gradients and an all-gather of weights.
    Per rank 2 psi / S of weights and of gradients as HSDP over S ranks, but 12 psi / N of optimizer states.
    """
    return replace(hsdp(topology, level), name="hfsdp", optimizer=topology.names[-1], reduce_across="step")


def hierarchical(
    topology: Topology,
    weights: str | None = None,
    gradients: str | None = None,
    optimizer: str | None = None,
    *,
    secondary: str | None = None,
    weight_bits: int | Sequence[int] = 8,
    gradient_bits: int | Sequence[int] = 4,
    update_bits: int | Sequence[int] = 8,
    reduce_across: Literal["step", "micro_batch"] = "step",
    block: int = BLOCK,
) -> Plan:
    """The three-level plan of arXiv 2501.04266: weights over the GCD pair, gradients the node, optimizer all ranks.

    Levels left out are the innermost, the last but one and the outermost of the topology. Bits are one number, or one
    per level, innermost first. [INF] defaults: everything is quantised as in ZeRO++, of which the paper is an
    extension, so also what stays in the pair (on its fast link 16 bits may take less time: a switch); nodes exchange
    gradients once per step. `secondary`: level of secondary shards, gathered with `weight_bits`; `block`: values per
    scale. Raises ValueError as `Plan` and `Route` do.
    """
    names = topology.names
    gather = comm.hierarchical(topology, weight_bits, block)
    return Plan(
        "hierarchical",
        topology,
        weights or names[0],
        gradients or names[-2:][0],
        optimizer or names[-1],
        weight_route=gather,
        gradient_route=comm.hierarchical(topology, gradient_bits, block),
        update_route=comm.hierarchical(topology, update_bits, block),
        secondary=secondary,
        secondary_route=gather if secondary else None,
        reduce_across=reduce_across,
    )


def hierarchical_fp(topology: Topology) -> Plan:
    """The three-level plan without quantisation: what partitioning alone is worth."""
    return replace(unquantised(hierarchical(topology), 16), name="hierarchical_fp")


NAMED: dict[str, Callable[[Topology], Plan]] = {
    function.__name__: function
    for function in (ddp, zero1, zero2, zero3, hpz, qwz, qgz, zeropp, mics, hsdp, hfsdp, hierarchical, hierarchical_fp)
}


def named(name: str, topology: Topology) -> Plan:
    """A named plan with its default bits. ValueError for an unknown name (it lists the known ones), and on a topology of
    one level for the plans that need a node: hpz, qgz, zeropp, mics, hsdp and hfsdp."""
    if name not in NAMED:
        raise ValueError(f"unknown plan {name!r}, known: {', '.join(NAMED)}")
    return NAMED[name](topology)


def unquantised(plan: Plan, bits: int = 32) -> Plan:
    """The same partition and the same hops with `bits` (32 or 16) on each: for exactness tests and ablations. At 32,
    16-bit weights are still sent in 16."""
    return _with_routes(plan, lambda route: replace(route, bits=(bits,) * len(route.bits)))


def blockwise(plan: Plan, block: int) -> Plan:
    """The same plan with `block` values per quantisation scale."""
    return _with_routes(plan, lambda route: replace(route, block=block))


def _with_routes(plan: Plan, change: Callable[[Route], Route]) -> Plan:
    names = ("weight_route", "gradient_route", "update_route", "secondary_route")
    changed: dict[str, Any] = {name: change(route) for name in names if (route := getattr(plan, name)) is not None}
    return replace(plan, **changed)


def _flat(name: str, topology: Topology, weights: str | None, gradients: str | None, optimizer: str | None) -> Plan:
    ring = comm.flat(topology)
    return Plan(name, topology, weights, gradients, optimizer, ring, ring, ring)


def _node(topology: Topology) -> str:
    """The level below the outermost; ValueError where there is none."""
    if len(topology.names) < 2:
        raise ValueError("this plan needs a node, a level below the outermost; the topology has one level")
    return topology.names[-2]

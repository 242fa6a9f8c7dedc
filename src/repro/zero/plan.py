"""Which state is partitioned over which level of the machine, and how many bits each message takes: the space of ZeRO plans.

A state that is partitioned over a level is spread over the ranks of one unit of that level and repeated in every other unit:
over `node` each node holds the whole of it once; over None every rank does. With M = 2 psi bytes of 16-bit weights:

    plan              weights   secondary   gradients   optimizer     sent by a node per step (large machines)
    ddp               -         -           -           -             2 M   (all-reduce)
    zero3             cluster   -           cluster     cluster       3 M
    zeropp            cluster   node        cluster     cluster       0.75 M  (INT8 gather, INT4 reduce)
    hierarchical      package   -           node        cluster       0.75 M, and none of it inside a forward or backward

The last row is arXiv 2501.04266 as `hierarchical` below reads it. Only "three levels" is published: the degrees, and every
field marked [INF] below, are inferences; each is a switch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from repro import comm
from repro.comm import Route
from repro.topology import Topology

# Values per quantisation scale. Smaller blocks follow outliers better and cost 4 bytes per block: 1.6 % of INT8 at 256.
BLOCK = 256


@dataclass(frozen=True)
class Plan:
    """A point of the space. Level names belong to `topology`; None means: repeated on every rank.

    weight_route     all-gather of the weights before a forward (and a backward, without a secondary copy)
    secondary_route  all-gather of the secondary copy before a backward. [INF]: has the hierarchical plan such a copy?
    gradient_route   reduce-scatter of the gradients; the all-reduce too where the optimizer level is not the outermost
    update_route     all-gather of the updated weights, from the optimizer's partition to that of the weights, per step
    reduce_across    [INF] when gradients leave their partition for the optimizer's: once per step, or per micro-batch

    Raises ValueError, with the reason, for a plan that cannot work.
    """

    name: str
    topology: Topology
    weights: str | None
    gradients: str | None
    optimizer: str | None
    weight_route: Route
    gradient_route: Route
    update_route: Route
    secondary: str | None = None
    secondary_route: Route | None = None
    reduce_across: Literal["step", "micro_batch"] = "step"

    def __post_init__(self) -> None:
        self._require(
            "gradients", "weights", "the gradient of a sharded weight arrives as a shard of that size already"
        )
        self._require("optimizer", "gradients", "a rank would update weights whose gradient it does not hold")
        if self.secondary is not None and self._depth("secondary") >= self._depth("weights"):
            raise ValueError(
                f"plan {self.name!r}: secondary copy over {self.secondary}, weights over {self.weights or 'nothing'}: "
                "a copy saves traffic only when it is gathered from fewer ranks than the weights"
            )
        if (self.secondary is None) != (self.secondary_route is None):
            raise ValueError(f"plan {self.name!r}: `secondary` and `secondary_route` come together")
        if self.reduce_across not in ("step", "micro_batch"):
            raise ValueError(f"reduce_across is {self.reduce_across!r}, allowed: step, micro_batch")
        for route in (self.weight_route, self.gradient_route, self.update_route, self.secondary_route):
            if route is not None and tuple(v for hop in route.hops for v in hop) != self.topology.names:
                raise ValueError(
                    f"plan {self.name!r}: the hops {route.hops} do not walk the levels {self.topology.names} in order"
                )

    def _depth(self, state: str) -> int:
        level = getattr(self, state)
        if level is None:
            return -1
        try:
            return self.topology.index(level)
        except ValueError as error:
            raise ValueError(f"plan {self.name!r}, {state}: {error}") from None

    def _require(self, state: str, other: str, reason: str) -> None:
        if self._depth(state) < self._depth(other):
            raise ValueError(
                f"plan {self.name!r}: {state} over {getattr(self, state) or 'nothing'}, {other} over "
                f"{getattr(self, other)}: {state} need a level at least as wide, because {reason}"
            )

    def degree(self, level: str | None) -> int:
        """Ranks that a state is spread over."""
        return 1 if level is None else self.topology.span(level)

    @property
    def keeps_copy(self) -> bool:
        """Whether the secondary copy is spread over fewer ranks than the weights, and over more than one. On a machine of one
        node a plan with a copy in the node has no use for it."""
        return 1 < self.degree(self.secondary) < self.degree(self.weights)

    def levels(self, below: str | None, upto: str | None) -> tuple[str, ...]:
        """Levels above `below` (None: from the innermost on) up to and with `upto` (None: none)."""
        first = 0 if below is None else self.topology.index(below) + 1
        last = 0 if upto is None else self.topology.index(upto) + 1
        return self.topology.names[first:last]


def ddp(topology: Topology, bits: int = 16) -> Plan:
    """Everything repeated, gradients all-reduced over one ring: the baseline that needs the most memory."""
    ring = comm.flat(topology, bits, BLOCK)
    return Plan("ddp", topology, None, None, None, ring, ring, ring)


def zero3(topology: Topology, bits: int = 16) -> Plan:
    """ZeRO-3: everything over all ranks, flat collectives as DeepSpeed runs them. 3 M per step."""
    top, ring = topology.names[-1], comm.flat(topology, bits, BLOCK)
    return Plan("zero3", topology, top, top, top, ring, ring, ring)


def zeropp(topology: Topology, weight_bits: int = 8, gradient_bits: int = 4, block: int = BLOCK) -> Plan:
    """ZeRO++ as in DeepSpeed: INT8 flat all-gather (qwZ; it quantises the gather of the secondary copy too), a secondary copy
    of the weights in the node (hpZ), and a two-hop INT4 all-to-all reduction: all ranks of a node, then across nodes (qgZ).

    On a machine of one level there is no node to keep a copy in: refused.
    """
    if len(topology.names) < 2:
        raise ValueError("zeropp needs a level below the outermost for its secondary copy, the topology has one level")
    *node, top = topology.names
    two_hops = Route((tuple(node), (top,)), (gradient_bits, gradient_bits), block)
    gather = comm.flat(topology, weight_bits, block)
    return Plan("zeropp", topology, top, top, top, gather, two_hops, gather, node[-1], gather)


def hierarchical(
    topology: Topology,
    weights: str = "package",
    gradients: str = "node",
    optimizer: str | None = None,
    *,
    secondary: str | None = None,
    weight_bits: int | Sequence[int] = 16,
    gradient_bits: int | Sequence[int] = (16, 4, 4),
    update_bits: int | Sequence[int] = 8,
    reduce_across: Literal["step", "micro_batch"] = "step",
    block: int = BLOCK,
) -> Plan:
    """The three-level plan of arXiv 2501.04266: weights over the GCD pair, gradients over the node, optimizer over all ranks.

    Bits are one number, or one per level, innermost first. [INF] defaults: the pair's link is 16 times as fast as the network,
    so inside it weights and gradients stay 16 bits wide (quantising costs more time than it saves there); gradients are INT4
    between packages and nodes; the updated weights travel as INT8; nodes exchange gradients once per step.
    """
    optimizer = optimizer or topology.names[-1]
    gather = comm.hierarchical(topology, weight_bits, block)
    return Plan(
        "hierarchical",
        topology,
        weights,
        gradients,
        optimizer,
        weight_route=gather,
        gradient_route=comm.hierarchical(topology, gradient_bits, block),
        update_route=comm.hierarchical(topology, update_bits, block),
        secondary=secondary,
        secondary_route=gather if secondary else None,
        reduce_across=reduce_across,
    )


def hierarchical_fp(topology: Topology, bits: int = 16) -> Plan:
    """The three-level plan without quantisation: what partitioning alone is worth."""
    plan = hierarchical(topology, weight_bits=bits, gradient_bits=bits, update_bits=bits)
    return replace(plan, name="hierarchical_fp")


NAMED = {
    "ddp": ddp,
    "zero3": zero3,
    "zeropp": zeropp,
    "hierarchical": hierarchical,
    "hierarchical_fp": hierarchical_fp,
}


def named(name: str, topology: Topology) -> Plan:
    """A named plan with its default bits; ValueError lists the names."""
    if name not in NAMED:
        raise ValueError(f"unknown plan {name!r}, known: {', '.join(NAMED)}")
    return NAMED[name](topology)


def unquantised(plan: Plan, bits: int = 32) -> Plan:
    """The same partition and the same hops with every value sent `bits` wide: for exactness tests and ablations."""

    def widen(route: Route | None) -> Route | None:
        return route and replace(route, bits=(bits,) * len(route.bits))

    return replace(
        plan,
        weight_route=widen(plan.weight_route),
        gradient_route=widen(plan.gradient_route),
        update_route=widen(plan.update_route),
        secondary_route=widen(plan.secondary_route),
    )

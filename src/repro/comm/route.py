"""How one kind of message travels: a sequence of hops over the levels of a machine, each with its own bits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from repro import quantize
from repro.topology import Topology

BITS = (32, 16, *quantize.BITS)
# Values per quantisation scale. Smaller blocks follow outliers better and cost 4 bytes per block: 1.6 % of INT8 at 256.
BLOCK = 256


@dataclass(frozen=True)
class Route:
    """Hops from the innermost to the outermost, each a run of consecutive levels, and the bits of a value on each hop.

    At 32 bits a gather sends its own dtype and a reduction fp32; 16 turns wider values into bf16; 8 and 4 send blocks
    of `block` values as integers with a scale. A hop over one level is a direct exchange; a hop over several levels is
    a ring, except that a quantised reduce-scatter is a one-shot all-to-all (a ring would quantise sums at each step).
    ValueError unless every hop has levels and bits, the bits are in BITS, and `block` is an integer of at least 1.
    """

    hops: tuple[tuple[str, ...], ...]
    bits: tuple[int, ...]
    block: int = BLOCK

    def __post_init__(self) -> None:
        if not self.hops or not all(self.hops) or len(self.hops) != len(self.bits):
            raise ValueError(f"a route needs hops of at least one level and bits for each, found {self}")
        if wrong := [bits for bits in self.bits if bits not in BITS]:
            raise ValueError(f"bits {wrong[0]} is not a wire format, allowed: {', '.join(map(str, BITS))}")
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"block is {self.block!r}, must be an integer of at least 1")

    def within(self, levels: Sequence[str]) -> "Route | None":
        """The part of this route that runs over `levels`; None when nothing is left."""
        kept = [(tuple(v for v in hop if v in levels), bits) for hop, bits in zip(self.hops, self.bits, strict=True)]
        kept = [(hop, bits) for hop, bits in kept if hop]
        return Route(tuple(h for h, _ in kept), tuple(b for _, b in kept), self.block) if kept else None


def flat(topology: Topology, bits: int = 16, block: int = BLOCK) -> Route:
    """One hop over all levels."""
    return Route((topology.names,), (bits,), block)


def hierarchical(topology: Topology, bits: int | Sequence[int] = 16, block: int = BLOCK) -> Route:
    """One hop per level; `bits` for all of them or one value per level, innermost first."""
    per_level = (bits,) * len(topology.names) if isinstance(bits, int) else tuple(bits)
    return Route(tuple((name,) for name in topology.names), per_level, block)


def ring_orders(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Cyclic orders of the group ranks of a hop over levels of `sizes` (innermost first); none for a single level.

    A single ring leaves every outer unit through the same inner unit, so one NIC would carry all of a node's traffic.
    There is one ring per inner unit, each leaving through another one, and each carries its share of the tensor (NCCL's
    channels).
    """
    sizes = [size for size in sizes if size > 1]
    if len(sizes) < 2:
        return ()
    inside, unit = math.prod(sizes[:-1]), math.prod(sizes[:-2])
    return tuple(
        tuple(o * inside + (i + ring * unit) % inside for o in range(sizes[-1]) for i in range(inside))
        for ring in range(sizes[-2])
    )


def most_under_way(topology: Topology, *routes: Route | None) -> int:
    """Most collectives that a stream along `routes` has under way: as many as there are hops of several ranks, and one
    that has arrived and is worked on."""
    sizes = {level.name: level.size for level in topology.levels}
    hops = [hop for route in routes if route is not None for hop in route.hops]
    return 1 + sum(any(sizes[name] > 1 for name in hop) for hop in hops)

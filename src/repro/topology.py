"""Where ranks sit: named levels of a machine, from the fastest link to the slowest, and the rank numbering over them.

Frontier, as in arXiv 2501.04266: 2 GCDs share an MI250X package, 4 packages share a node, nodes share Slingshot.
Ranks are numbered innermost first, so rank = (node * packages + package) * gcds + gcd.
"""

import math
from dataclasses import dataclass, replace
from numbers import Integral


@dataclass(frozen=True)
class Level:
    """One level of a machine: `size` members of the level below, on links of `bytes_per_s` per rank and direction, where
    a round of messages takes `latency_s` more. ValueError for a size below 1, a rate of 0 or less, a latency below 0."""

    name: str
    size: int
    bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.size, Integral) or self.size < 1:
            raise ValueError(f"level {self.name!r}: size is {self.size!r}, must be an integer of at least 1")
        if not (self.bytes_per_s > 0 and self.latency_s >= 0):  # NaN is neither
            found = f"{self.bytes_per_s} and {self.latency_s}"
            raise ValueError(f"level {self.name!r}: bandwidth must be positive and latency not negative, found {found}")


@dataclass(frozen=True)
class Topology:
    """Levels from innermost (fastest) to outermost (slowest); their sizes multiply to the world size. ValueError for no
    level, and for two of one name."""

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"levels need distinct names and at least one of them, found {names}")

    @property
    def world_size(self) -> int:
        return math.prod(level.size for level in self.levels)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(level.name for level in self.levels)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes outermost first: the shape of a torch `DeviceMesh` whose row-major ranks are ours."""
        return tuple(level.size for level in reversed(self.levels))

    def index(self, name: str) -> int:
        """Position of a level (0 is innermost); ValueError lists the known ones."""
        if name not in self.names:
            raise ValueError(f"level {name!r} is not in the topology, allowed: {', '.join(self.names)}")
        return self.names.index(name)

    def span(self, name: str) -> int:
        """Ranks inside one unit of `name`: 2 for a package of 2 GCDs, 8 for a node of 4 such packages."""
        return math.prod(level.size for level in self.levels[: self.index(name) + 1])

    def place(self, rank: int) -> tuple[int, ...]:
        """Coordinates of `rank`, innermost first."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        coordinates = []
        for level in self.levels:
            rank, inside = divmod(rank, level.size)
            coordinates.append(inside)
        return tuple(coordinates)

    def level_between(self, a: int, b: int) -> str | None:
        """Name of the level whose link joins ranks `a` and `b` (the outermost that differs); None for a == b."""
        differing = [name for name, x, y in zip(self.names, self.place(a), self.place(b), strict=True) if x != y]
        return differing[-1] if differing else None


# Per-rank bandwidth of Frontier when all 8 GCDs of a node communicate at once (OLCF user guide): 200, 50 and 12.5 GB/s.
FRONTIER_BYTES_PER_S = (200e9, 50e9, 12.5e9)


def frontier(nodes: int, packages: int = 4, gcds: int = 2) -> Topology:
    """Frontier's levels, named by the unit that they make up: `package` (GCD pair), `node`, `cluster`. Rates are
    FRONTIER_BYTES_PER_S, latencies 2, 3 and 5 microseconds."""
    package, node, cluster = FRONTIER_BYTES_PER_S
    return Topology(
        (
            Level("package", gcds, package, 2e-6),
            Level("node", packages, node, 3e-6),
            Level("cluster", nodes, cluster, 5e-6),
        )
    )


def scaled(topology: Topology, outer_bytes_per_s: float) -> Topology:
    """The same shape, latencies and ratios between rates, with the outermost link at `outer_bytes_per_s`. ValueError
    where that link has no finite rate, before or after."""
    outer = topology.levels[-1]
    if not (math.isfinite(outer.bytes_per_s) and math.isfinite(outer_bytes_per_s)):
        rates = f"{outer.bytes_per_s} bytes/s, to become {outer_bytes_per_s}"
        raise ValueError(f"level {outer.name!r}: {rates}; both must be finite")
    factor = outer_bytes_per_s / outer.bytes_per_s
    return Topology(tuple(replace(level, bytes_per_s=level.bytes_per_s * factor) for level in topology.levels))

"""The GPUs of a machine as nested levels (node, rack, cluster), and what one hop costs at each level."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from repro.topology import Level, Topology

NODE = "node"
LEAST_COST, MOST_COST = 1e-9, 1e9  # of a hop: the search adds them up in single precision
MOST_LEVELS = 16


@dataclass(frozen=True)
class Levels:
    """Innermost first: `sizes[0]` GPUs make a unit of level 0, `sizes[1]` of those a unit of level 1, and so on.

    GPUs are numbered like the ranks of `repro.topology`: those of one unit are consecutive. `costs[l]` is what a token
    pays for a hop between two GPUs that share a unit of level l, but none further in.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def gpus(self) -> int:
        return math.prod(self.sizes)

    @property
    def spans(self) -> tuple[int, ...]:
        """GPUs in one unit of each level: (8, 32) for nodes of 8 GPUs in racks of 4 nodes."""
        return tuple(math.prod(self.sizes[: level + 1]) for level in range(len(self.sizes)))

    @property
    def node_level(self) -> int:
        """The level named `node`, else the innermost: hops up to it count as inside a node."""
        return self.names.index(NODE) if NODE in self.names else 0

    def hop_levels(self) -> np.ndarray:
        """int64 [gpus, gpus]: the level at which a hop between two GPUs travels; -1 on the diagonal, no hop."""
        gpu = np.arange(self.gpus)
        level = np.full((self.gpus, self.gpus), -1)
        for inner in (1, *self.spans[:-1]):  # units that the two GPUs do not share lift the hop by one level
            unit = gpu // inner
            level += unit[:, None] != unit[None, :]
        return level

    def distances(self) -> np.ndarray:
        """float64 [gpus, gpus]: cost of a hop; 0 on the diagonal."""
        return np.array([*self.costs, 0.0])[self.hop_levels()]


def make_levels(gpus: int | Topology, gpus_per_node: int | None = None, costs: Sequence[float] | None = None) -> Levels:
    """Levels of `gpus` GPUs in nodes of `gpus_per_node` (None: one node), or of any `Topology`.

    `costs`: of a hop at each level, innermost first; default 1, 2, 3, ..., for two levels the published solver's.
    Raises ValueError when nodes are not whole, both a topology and `gpus_per_node` are given, there are more than
    MOST_LEVELS, or the costs are not one number from LEAST_COST to MOST_COST per level that never falls from the inside
    out.
    """
    if isinstance(gpus, Topology):
        if gpus_per_node is not None:
            raise ValueError(f"gpus_per_node is {gpus_per_node}: a topology already has its levels, leave it out")
        names, sizes = gpus.names, tuple(level.size for level in gpus.levels)
    elif gpus < 1:
        raise ValueError(f"gpus is {gpus}: experts cannot be shared by {gpus} GPUs")
    elif gpus_per_node is None:
        names, sizes = (NODE,), (gpus,)
    elif gpus_per_node < 1 or gpus % gpus_per_node:
        raise ValueError(f"gpus_per_node is {gpus_per_node}: {gpus} GPUs do not make whole nodes of {gpus_per_node}")
    else:
        names, sizes = (NODE, "cluster"), (gpus_per_node, gpus // gpus_per_node)
    if len(sizes) > MOST_LEVELS:
        raise ValueError(f"the machine has {len(sizes)} levels, allowed: at most {MOST_LEVELS}")
    costs = tuple(range(1, len(sizes) + 1)) if costs is None else tuple(costs)
    if len(costs) != len(sizes):
        raise ValueError(f"costs are {costs}, must be one per level, innermost first: {', '.join(names)}")
    if not all(LEAST_COST <= cost <= MOST_COST for cost in costs):
        raise ValueError(f"costs are {costs}, must be positive: {LEAST_COST:g} to {MOST_COST:g}")
    if list(costs) != sorted(costs):
        raise ValueError(f"costs are {costs}, must be positive and not decreasing from the innermost level out")
    return Levels(names, sizes, tuple(float(cost) for cost in costs))


def parse_levels(text: str) -> Topology:
    """The topology of `node=8,rack=4,cluster=2`: innermost level first, each with the number of units that it joins.
    ValueError for anything else."""
    levels = []
    for item in text.split(","):
        name, equals, size = item.partition("=")
        if not (name.strip() and name.isprintable() and equals and size.strip().isdecimal()):
            raise ValueError(f"{item!r} is not NAME=SIZE, as in node=8,rack=4,cluster=2 (innermost level first)")
        levels.append(Level(name.strip(), int(size)))
    return Topology(tuple(levels))

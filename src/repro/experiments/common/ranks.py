"""Points that run on ranks, on a machine of three levels: package, node and cluster."""

from typing import Literal, get_args

from pydantic import Field

from repro.experiments.base import Point, Shape
from repro.topology import Level, Topology

LevelName = Literal["package", "node", "cluster"]
LEVELS: tuple[str, ...] = get_args(LevelName)


class Ranked(Point):
    """A point on nodes * packages * gcds ranks."""

    nodes: int = Field(2, ge=1)
    packages: int = Field(2, ge=1, description="GPU packages per node")
    gcds: int = Field(2, ge=1, description="ranks per package")

    @property
    def shape(self) -> Shape:
        return Shape(self.nodes, self.packages, self.gcds)

    @property
    def ranks(self) -> int:
        return self.shape.ranks

    @property
    def shape_label(self) -> str:
        return f"{self.nodes}x{self.packages}x{self.gcds}"

    def describe(self, state: str) -> str:
        """The machine, with the state of its network, for a record's provenance."""
        return f"{self.nodes} nodes x {self.packages} packages x {self.gcds} GCDs, {state}"


class OnRanks(Ranked):
    """A point on ranks whose network is emulated where the machine allows it.

    `cluster_mbit_s` is the rate between nodes per rank with all ranks busy. The rates inside a node are higher by the
    ratios, 16 and 4 on Frontier. 8 ranks on 2 cores send 400 to 900 Mbit/s each without shaping. At 25 Mbit/s even the
    package link (400) is therefore limited by the shaper and not by the cores.
    """

    cluster_mbit_s: float = Field(25.0, gt=0)
    package_ratio: float = Field(16.0, gt=0)
    node_ratio: float = Field(4.0, gt=0)
    fabric: Literal["auto", "unshaped"] = "auto"

    @property
    def topology(self) -> Topology:
        """Sizes and rates of the levels."""
        slow = self.cluster_mbit_s * 1e6 / 8
        sizes, factors = (self.gcds, self.packages, self.nodes), (self.package_ratio, self.node_ratio, 1.0)
        return Topology(tuple(Level(n, size, slow * f) for n, size, f in zip(LEVELS, sizes, factors, strict=True)))

    @property
    def fabric_label(self) -> str:
        """End of a label."""
        return "-unshaped" if self.fabric == "unshaped" else ""

    def describe(self, state: str) -> str:
        """With the rates of a shaped network."""
        rates = "/".join(f"{level.bytes_per_s * 8 / 1e6:g}" for level in self.topology.levels)
        return super().describe(f"{rates} Mbit/s per rank" if state == "shaped" else state)

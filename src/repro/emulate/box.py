"""The shaped network between GCDs of the box: a namespace per GCD, wired as `repro.emulate.netns` does for ranks."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from repro.emulate.netns import Fabric
from repro.topology import Topology, frontier

HERE = Path("/etc/slurm/box.json")  # inside a node: `like`, the machine whose nodes the box has, and its `prefix`
MAX_NODES = 16


def machine(like: str, nodes: int) -> Topology:
    """Levels of a box: `frontier` has four packages of two GCDs in a node, `nvidia` one package of four."""
    if like == "frontier":
        return frontier(nodes)
    package, node, cluster = frontier(nodes).levels
    return Topology((replace(package, size=4), replace(node, size=1), cluster))


class BoxFabric(Fabric):
    """A fabric that outlives the process that built it. Its namespaces are named by box and GCD, counted over all
    nodes: `prefix` and the number."""

    shared = True

    def __init__(self, topology: Topology, prefix: str) -> None:
        super().__init__(topology)
        self._prefix = prefix


class JobFabric(BoxFabric):
    """The links of a job's `nodes` (1, 2, ...), on which its ranks make up `topology`. The first rank gives them its
    rates when it enters. ValueError where a node lacks the packages or GCDs, or `nodes` are not as many as those of
    `topology`; FileNotFoundError outside a node; FabricError on entry when the machine refuses."""

    def __init__(self, topology: Topology, nodes: Sequence[int], first: bool) -> None:
        here = json.loads(HERE.read_text())
        super().__init__(topology, here["prefix"])
        gcds, packages, count = (level.size for level in topology.levels)
        self._machine = machine(here["like"], MAX_NODES)
        has_gcds, has_packages, _ = (level.size for level in self._machine.levels)
        if gcds > has_gcds or packages > has_packages or count != len(nodes):
            raise ValueError(
                f"{count} nodes of {packages} packages of {gcds} GCDs do not fit {len(nodes)} nodes of the box,"
                f" which have {has_packages} packages of {has_gcds}"
            )
        self._first = first
        self._packages = [(node - 1) * has_packages + package for node in nodes for package in range(packages)]
        self._ports = [package * has_gcds + gcd for package in self._packages for gcd in range(gcds)]

    def __enter__(self) -> "JobFabric":
        if self._first:
            self.set_rates()
        return self

    def __exit__(self, *error: object) -> None:
        """The links stay."""

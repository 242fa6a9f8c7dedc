"""The network between an experiment's ranks: emulated where it can be, the box's in its jobs, else the machine's."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from repro.emulate import netns
from repro.emulate.box import JobFabric
from repro.emulate.netns import Fabric
from repro.launch.joined import place_in_job
from repro.launch.slurm_env import hosts
from repro.topology import Topology

BOX = "reprobox"  # the name that the box's Slurm gives its cluster (slurm/box/slurm.conf.j2)


@dataclass(frozen=True)
class Network:
    """`fabric`: for `launch`; None for a network that nobody shapes. `state`: what a record says of it."""

    fabric: Fabric | None
    state: str

    @property
    def evidence(self) -> Literal["measured", "emulated"]:
        """Times on a shaped network are emulated."""
        return "measured" if self.fabric is None else "emulated"


def _node(host: str) -> int:
    """Number of a node of the box."""
    number = host.removeprefix("node")
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"SLURM_CLUSTER_NAME is {BOX}, whose nodes are called node1, node2, ...; found host {host!r}")
    return int(number)


@contextlib.contextmanager
def between(topology: Topology, asked: Literal["auto", "unshaped"] = "auto") -> Iterator[Network]:
    """The network between the ranks of `topology`; `asked` "unshaped" shapes none. FabricError when refused, ValueError
    for a topology or an environment that does not fit, FileNotFoundError in a job of the box but outside its nodes."""
    place = place_in_job()
    if asked == "unshaped":
        yield Network(None, "unshaped: asked for")
    elif place is not None and os.environ.get("SLURM_CLUSTER_NAME") != BOX:
        yield Network(None, "the machine's own")
    elif place is not None:
        nodes = [_node(name) for name in hosts()]
        with JobFabric(topology, nodes, first=place[0] == 0) as fabric:
            yield Network(fabric, "shaped")
    elif reason := netns.unavailable():
        yield Network(None, f"unshaped: {reason}")
    else:
        with Fabric(topology) as fabric:
            yield Network(fabric, "shaped")

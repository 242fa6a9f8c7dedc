"""Namespaces of a box: one per node on a bridge of the host, for Slurm; one per GCD on shaped links, for ranks."""

import contextlib
import os
from pathlib import Path

import psutil

from repro.box.boxes import OwnedBox
from repro.emulate.box import BoxFabric
from repro.emulate.netns import FabricError, command, inode, remove
from repro.topology import Topology


def namespace(box: OwnedBox, node: int) -> str:
    """Of node 1, 2, ..."""
    return f"repro-{box.id}-node{node}"


def gcds(box: OwnedBox) -> str:
    """How the namespaces of the GCDs begin."""
    return f"repro-{box.id}-gcd-"


def bridge(box: OwnedBox) -> str:
    """Name of the host's bridge, which is an end of every node's link."""
    return f"rb{box.id}"


def address(box: OwnedBox, node: int) -> str:
    return f"{box.net}.{node}"


def controller(box: OwnedBox) -> str:
    """Address of the host, as nodes see it."""
    return f"{box.net}.254"


def up(box: OwnedBox, topology: Topology) -> None:
    """Everything, or FabricError: namespaces may not be allowed."""
    lines = [
        f"link add {bridge(box)} type bridge mcast_snooping 0",
        f"addr add {controller(box)}/24 dev {bridge(box)}",
        f"link set {bridge(box)} up",
    ]
    for node in range(1, box.nodes + 1):
        lines += [
            f"netns add {namespace(box, node)}",
            f"link add {_end(box, node)} type veth peer name hsn0 netns {namespace(box, node)}",
            f"link set {_end(box, node)} master {bridge(box)}",
            f"link set {_end(box, node)} up",
        ]
    command(["ip", "-batch", "-"], lines)
    for node in range(1, box.nodes + 1):
        inside = ["link set lo up", f"addr add {address(box, node)}/24 dev hsn0", "link set hsn0 up"]
        command(["ip", "-n", namespace(box, node), "-batch", "-"], inside)
    BoxFabric(topology, gcds(box)).build()


def down(box: OwnedBox) -> None:
    """Whatever of it is there. Links first: those of a namespace that is gone, and their names, linger a moment."""
    for device in [*(_end(box, node) for node in range(1, box.nodes + 1)), bridge(box)]:
        try:
            if _there(device):
                command(["ip", "link", "del", device])
        except FabricError:
            if _there(device):
                raise
    remove(_namespaces(box))


def processes(box: OwnedBox) -> set[int]:
    """Those that run inside one of the namespaces, jobs among them."""
    ours = {inode(name) for name in _namespaces(box)} - {None}
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{pid}/ns/net").st_ino in ours:
                found.add(pid)
    return found


def _namespaces(box: OwnedBox) -> list[str]:
    nodes = [namespace(box, node) for node in range(1, box.nodes + 1)]
    return nodes + [f"{gcds(box)}{end}" for end in ("fab", *range(box.nodes * box.gcds))]


def _end(box: OwnedBox, node: int) -> str:
    """The host's end of a node's link; at most 15 characters."""
    return f"{bridge(box)}n{node}"


def _there(device: str) -> bool:
    return Path("/sys/class/net", device).exists()

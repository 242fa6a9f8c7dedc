"""Namespaces of the box: one per node on a bridge of the host, for Slurm; one per GCD on shaped links, for ranks."""

import contextlib
import os
from pathlib import Path

import psutil

from repro.emulate.box import GCDS, BoxFabric
from repro.emulate.netns import FabricError, command, names, remove
from repro.topology import Topology

BRIDGE = "repro-box"
_NODES, _VETHS = "repro-box-node", "rb-node"  # names of namespaces and of the host's ends of their links begin so
_NET = "10.77.0"
CONTROLLER = f"{_NET}.254"  # the host, as nodes see it


def namespace(node: int) -> str:
    """Of node 1, 2, ..."""
    return f"{_NODES}{node}"


def address(node: int) -> str:
    return f"{_NET}.{node}"


def up(nodes: int, topology: Topology) -> None:
    """Everything, or FabricError: the host's address may be taken, or namespaces may not be allowed."""
    lines = [
        f"link add {BRIDGE} type bridge mcast_snooping 0",
        f"addr add {CONTROLLER}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ]
    for node in range(1, nodes + 1):
        lines += [
            f"netns add {namespace(node)}",
            f"link add {_VETHS}{node} type veth peer name hsn0 netns {namespace(node)}",
            f"link set {_VETHS}{node} master {BRIDGE}",
            f"link set {_VETHS}{node} up",
        ]
    command(["ip", "-batch", "-"], lines)
    for node in range(1, nodes + 1):
        inside = ["link set lo up", f"addr add {address(node)}/24 dev hsn0", "link set hsn0 up"]
        command(["ip", "-n", namespace(node), "-batch", "-"], inside)
    BoxFabric(topology).build()


def down() -> None:
    """Whatever of it is there. Links first: those of a namespace that is gone, and their names, linger a moment."""
    for device in sorted(Path("/sys/class/net").glob(f"{_VETHS}*")):
        try:
            command(["ip", "link", "del", device.name])
        except FabricError:
            if device.exists():
                raise
    for prefix in (_NODES, GCDS):
        remove(prefix)
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        command(["ip", "link", "del", BRIDGE])


def taken() -> str | None:
    """The host's interface that has an address of ours already, and which."""
    found = ((name, one.address) for name, addresses in psutil.net_if_addrs().items() for one in addresses)
    ours = (f"{name} has {place}" for name, place in found if name != BRIDGE and place.startswith(f"{_NET}."))
    return next(ours, None)


def present() -> bool:
    """Whether anything of it is there."""
    return bool(names(_NODES) or names(GCDS)) or Path(f"/sys/class/net/{BRIDGE}").exists()


def processes() -> set[int]:
    """Those that run inside one of the namespaces, jobs among them."""
    ours = {os.stat(Path("/run/netns") / name).st_ino for prefix in (_NODES, GCDS) for name in names(prefix)}
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{pid}/ns/net").st_ino in ours:
                found.add(pid)
    return found

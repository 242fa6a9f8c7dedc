"""Namespaces of the box: one per node, on a bridge of the host, for Slurm itself; one per GCD, on shaped links, for the ranks of jobs."""

import contextlib
import os
from pathlib import Path

import psutil

from repro.fabric import Fabric, FabricError, _names, _remove, _run
from repro.topology import Topology

BRIDGE = "repro-box"
_NODES, _GCDS = "repro-box-node", "repro-box-gcd-"
_NET = "10.77.0"
CONTROLLER = f"{_NET}.254"  # the host, as nodes see it


class Links(Fabric):
    """A fabric that outlives the process that built it. Its namespaces are named by GCD, not by owner."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self._prefix = _GCDS

    def build(self) -> None:
        """FabricError when the machine refuses."""
        self._build()


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
            f"link add {_veth(node)} type veth peer name hsn0 netns {namespace(node)}",
            f"link set {_veth(node)} master {BRIDGE}",
            f"link set {_veth(node)} up",
        ]
    _run(["ip", "-batch", "-"], lines)
    for node in range(1, nodes + 1):
        inside = ["link set lo up", f"addr add {address(node)}/24 dev hsn0", "link set hsn0 up"]
        _run(["ip", "-n", namespace(node), "-batch", "-"], inside)
    Links(topology).build()


def down() -> None:
    """Whatever of it is there. Links first: those of a namespace that is gone linger for a moment, and their names with them."""
    for device in sorted(Path("/sys/class/net").glob(f"{_veth('')}*")):
        try:
            _run(["ip", "link", "del", device.name])
        except FabricError:
            if device.exists():
                raise
    for prefix in (_NODES, _GCDS):
        _remove(prefix)
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        _run(["ip", "link", "del", BRIDGE])


def taken() -> str | None:
    """The host's interface that has an address of ours already, and which."""
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if name != BRIDGE and found.address.startswith(f"{_NET}."):
                return f"{name} has {found.address}"
    return None


def present() -> bool:
    """Whether anything of it is there."""
    return bool(_names(_NODES) or _names(_GCDS)) or Path(f"/sys/class/net/{BRIDGE}").exists()


def processes() -> set[int]:
    """Those that run inside one of the namespaces, jobs among them."""
    ours = {os.stat(Path("/run/netns") / name).st_ino for prefix in (_NODES, _GCDS) for name in _names(prefix)}
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if os.stat(folder / "ns" / "net").st_ino in ours:
                    found.add(int(folder.name))
    return found


def _veth(node: int | str) -> str:
    return f"rb-node{node}"


__all__ = [
    "BRIDGE",
    "CONTROLLER",
    "FabricError",
    "Links",
    "address",
    "down",
    "namespace",
    "present",
    "processes",
    "taken",
    "up",
]

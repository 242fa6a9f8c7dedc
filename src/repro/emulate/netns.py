"""The emulated network: a network namespace per rank, wired and rate-limited like a three-level machine (Linux, root).

    rank eth0 ─ v0 ┐                            rank rate: TBF on both ends of a rank's veth
                   ├ bridge pk0 ─ u0 ═ d0 ┐     uplink u/d of a package, in HTB classes by address:
    rank eth0 ─ v1 ┘                      ├ bridge spine     1:10 the same node, 1:20 another node
              ...    bridge pk1 ─ u1 ═ d1 ┘

The ranks of a package share its uplink, so an uplink class gets the rate of one rank times the ranks of a package.
Everything but the ranks' ends lives in a namespace of its own, so addresses may repeat between fabrics. Rates only:
`Level.latency_s` is not emulated, as many kernels lack sch_netem.
"""

import ctypes
import functools
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from repro.emulate import owners
from repro.topology import Level, Topology

_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
# Jumbo frames, as fast networks have them. No segmentation offload: a packet of up to 64 KiB would pass at once.
_PACKETS = "mtu 9000 gso_max_size 9000"
_PACKET = 9100  # bytes, with its header
# So many seconds of its rate a link lets pass at once after it was idle. With less, rate is lost to timers that come
# late on busy cores. It must be a small part of what a layer of a small model sends: 24 KB every 20 ms.
_BURST_S = 1e-3
_QUEUE = 1_000_000  # bytes, at least; the default of 1000 packets would hold 9 MB, seconds of delay on slow links
_QUEUE_S = 10e-3  # of its rate, where that is more
_FASTEST = (2**32 - 1) / (_QUEUE_S + _BURST_S)  # bytes/s: tc counts the bytes of a queue in 32 bits


class FabricError(RuntimeError):
    """The network could not be built or read: the failing command and what it said."""


class Fabric:
    """Context manager: the network of `topology` (three levels, innermost first) exists inside the `with` block.

    Raises ValueError for a topology it cannot shape, FabricError when the machine refuses. Networks of owners that were
    killed are removed on entry (`repro.emulate.owners`). Namespaces are called `repro-<owner's pid>-<random>-<rank>`.
    """

    interface = "eth0"
    shared = False  # whether processes may enter it that its owner did not start
    _owned = _prefix = ""  # its record; how its namespaces begin

    def __init__(self, topology: Topology) -> None:
        _check(topology)
        self.topology = self._machine = topology
        self._ports: Sequence[int] = range(topology.world_size)  # number of each rank's wire
        self._packages: Sequence[int] = range(topology.world_size // topology.levels[0].size)  # and of each package's

    def __enter__(self) -> "Fabric":
        if reason := _lacking():
            raise FabricError(reason)
        self._owned = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._prefix = f"repro-{self._owned}-"
        try:
            for left in owners.abandoned():
                remove(left)
            owners.claim(self._owned, self.namespaces())
        except OSError as error:
            raise FabricError(str(error)) from error
        try:
            self.build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        remove(self.namespaces())
        owners.release(self._owned)

    def namespaces(self) -> list[str]:
        """Names of all that it is made of: the ranks', and the one of the wires between them."""
        return [self._prefix + "fab", *map(self.namespace, range(self.topology.world_size))]

    def namespace(self, rank: int) -> str:
        """Name of the network namespace of `rank`. ValueError before there is one."""
        if not 0 <= rank < self.topology.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.topology.world_size}")
        if not self._prefix:
            raise ValueError("this network is not built yet; allowed: inside its `with` block")
        return f"{self._prefix}{self._ports[rank]}"

    def address(self, rank: int) -> str:
        """IPv4 address of `rank`, which the others reach it by."""
        return address(self._machine, self._ports[rank])

    def counters(self) -> dict[str, int]:
        """Bytes delivered so far (headers and retransmissions included) by the level that carried them.

        A transfer counts for the one level that joins its ends (`Topology.level_between`). What a killed rank had
        already handed to its kernel still flows for a while, and counts.
        """
        package, node, cluster = self.topology.names
        show = command(["tc", "-n", self._prefix + "fab", "-s", "-j", "qdisc", "show"])
        ports, packages = ({f"v{port}" for port in self._ports}, {f"d{number}" for number in self._packages})
        count = {"rank": 0, "1:10": 0, "1:20": 0}
        for qdisc in json.loads(show):
            if qdisc["dev"] in ports and qdisc.get("root"):
                count["rank"] += qdisc["bytes"]
            elif qdisc["dev"] in packages and qdisc.get("parent") in count:
                count[qdisc["parent"]] += qdisc["bytes"]
        inside = count["rank"] - count["1:10"] - count["1:20"]
        return {package: max(0, inside), node: count["1:10"], cluster: count["1:20"]}

    def build(self) -> None:
        """Make it, with links of the topology's rates; FabricError when the machine refuses."""
        fab, ranks = self._prefix + "fab", range(self.topology.world_size)
        command(["ip", "-batch", "-"], [f"netns add {name}" for name in self.namespaces()])
        command(["ip", "-n", fab, "-batch", "-"], list(_links(self.topology, self._prefix)))
        command(["tc", "-n", fab, "-batch", "-"], list(_uplinks(self.topology)))
        for rank in ranks:
            command(["ip", "-n", self.namespace(rank), "-batch", "-"], _rank_link(self.topology, rank))
        self.set_rates()

    def set_rates(self) -> None:
        """Give every wire the rate of its level; FabricError when the machine refuses."""
        rates = list(_rates(self.topology, self._ports, self._packages))
        command(["tc", "-n", self._prefix + "fab", "-batch", "-"], rates)
        own = [_limit(self.interface, self.topology.levels[0].bytes_per_s)]
        for rank in range(self.topology.world_size):
            command(["tc", "-n", self.namespace(rank), "-batch", "-"], own)


@functools.cache
def unavailable() -> str | None:
    """None when a fabric can be built here, else the reason in words. Builds a small one to find out; cached."""
    try:
        with Fabric(Topology((Level("package", 2, 1e8), Level("node", 1, 1e7), Level("cluster", 1, 1e6)))) as fabric:
            fabric.counters()
    except FabricError as error:
        return str(error)
    return None


def enter(namespace: str) -> None:
    """Move the calling thread, and what it starts from now on, into a network namespace. OSError where there is none of
    this name, or the kernel refuses. (os.setns: Python 3.12.)"""
    handle = os.open(_NAMESPACES / namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}", namespace)
    finally:
        os.close(handle)


def _check(topology: Topology) -> None:
    if len(topology.levels) != 3:
        found = f"{len(topology.levels)}: {', '.join(topology.names)}"
        raise ValueError(f"a fabric has three levels, the topology has {found}")
    for level in topology.levels:
        if not math.isfinite(level.bytes_per_s):
            raise ValueError(f"level {level.name!r} has no rate: a fabric shapes every level")
        most = _FASTEST / (1 if level is topology.levels[0] else topology.levels[0].size)  # the ranks of an uplink
        if not 1 <= level.bytes_per_s <= most:
            raise ValueError(f"level {level.name!r}: {level.bytes_per_s:g} bytes/s, allowed here: 1 to {most:.3g}")
    nodes, in_node = topology.levels[2].size, topology.span(topology.names[1])
    if nodes > 256 or in_node > 254:
        raise ValueError(f"{nodes} nodes of {in_node} ranks: at most 256 nodes of 254 ranks have addresses")


# --- the commands that build it ------------------------------------------------------------------------------------


def address(topology: Topology, rank: int) -> str:
    """IPv4 address of `rank` in a fabric of this shape."""
    node, inside = divmod(rank, topology.span(topology.names[1]))
    return f"10.99.{node}.{inside + 1}"


def _up(device: str, bridge: str | None = None) -> list[str]:
    """Without IPv6 addresses, whose announcements would be counted as traffic."""
    master = [f"link set {device} master {bridge}"] if bridge else []
    return [*master, f"link set {device} addrgenmode none", f"link set {device} up"]


def _links(topology: Topology, prefix: str) -> Iterator[str]:
    """`ip` lines for the bridges, the uplinks, and the veth of every rank."""
    in_package = topology.levels[0].size
    bridge = "type bridge mcast_snooping 0"
    yield from [f"link add spine {bridge}", *_up("spine")]
    for package in range(topology.world_size // in_package):
        yield from [f"link add pk{package} {bridge}", *_up(f"pk{package}")]
        yield f"link add u{package} {_PACKETS} type veth peer name d{package} {_PACKETS}"
        yield from [*_up(f"u{package}", f"pk{package}"), *_up(f"d{package}", "spine")]
    for rank in range(topology.world_size):
        yield f"link add v{rank} {_PACKETS} type veth peer name eth0 {_PACKETS} netns {prefix}{rank}"
        yield from _up(f"v{rank}", f"pk{rank // in_package}")


def _rank_link(topology: Topology, rank: int) -> list[str]:
    """`ip` lines inside a rank's namespace. Reno, which every kernel has, so that hosts' defaults do not matter."""
    own = address(topology, rank)
    route = f"route replace 10.99.0.0/16 dev eth0 scope link src {own} congctl reno"
    return ["link set lo up", *_up("eth0"), f"addr add {own}/16 dev eth0 noprefixroute", route]


def _uplinks(topology: Topology) -> Iterator[str]:
    """`tc` lines: HTB on both directions of every package's uplink. 1:10 is traffic within the node, 1:20 between
    nodes, both made by `set_rates`; 1:30 is the rest (ARP)."""
    for package in range(topology.world_size // topology.levels[0].size):
        node = package // topology.levels[1].size
        for device, field in ((f"u{package}", "dst"), (f"d{package}", "src")):
            yield f"qdisc add dev {device} root handle 1: htb default 30"
            yield f"class add dev {device} parent 1: classid 1:30 htb rate 1000000bps quantum 60000"
            match = f"filter add dev {device} parent 1: protocol ip prio"
            yield f"{match} 1 u32 match ip {field} 10.99.{node}.0/24 flowid 1:10"
            yield f"{match} 2 u32 match ip {field} 10.99.0.0/16 flowid 1:20"


def _rates(topology: Topology, ports: Sequence[int], packages: Sequence[int]) -> Iterator[str]:
    """`tc` lines: towards the ranks, and both directions of every package's uplink."""
    package, node, cluster = topology.levels
    for port in ports:
        yield _limit(f"v{port}", package.bytes_per_s)
    for device in [f"{end}{number}" for number in packages for end in "ud"]:
        for name, level in (("1:10", node), ("1:20", cluster)):
            rate = level.bytes_per_s * package.size
            limits = f"rate {rate:.0f}bps ceil {rate:.0f}bps burst {_burst(rate)} cburst {_burst(rate)} quantum 60000"
            yield f"class replace dev {device} parent 1: classid {name} htb {limits}"
            yield f"qdisc replace dev {device} parent {name} bfifo limit {_queue(rate)}"


def _limit(device: str, bytes_per_s: float) -> str:
    # TBF sends no packet that is longer; HTB does, and waits for it afterwards.
    burst = max(_PACKET, _burst(bytes_per_s))
    limits = f"rate {bytes_per_s:.0f}bps burst {burst} limit {_queue(bytes_per_s)}"
    return f"qdisc replace dev {device} root tbf {limits}"


def _burst(bytes_per_s: float) -> int:
    return round(bytes_per_s * _BURST_S)


def _queue(bytes_per_s: float) -> int:
    return max(_QUEUE, round(bytes_per_s * _QUEUE_S)) + _burst(bytes_per_s)


# --- the machine ---------------------------------------------------------------------------------------------------


def _lacking() -> str | None:
    """Why no fabric can be built here, as far as one can tell without trying."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces and rates need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool, path=_search_path()) is None]
    return f"{' and '.join(missing)} (package iproute2) not found" if missing else None


def _search_path() -> str:
    """PATH, and the folders of the system's tools, which root's lacks behind a plain `su`."""
    return os.pathsep.join([*os.get_exec_path(), "/usr/sbin", "/sbin"])


def command(words: list[str], lines: list[str] | None = None) -> str:
    """Standard output of the command `words`, fed with `lines` (a batch); FabricError names the line that failed."""
    text = None if lines is None else "".join(line + "\n" for line in lines)
    found = os.environ | {"PATH": _search_path()}
    done = subprocess.run(words, input=text, capture_output=True, text=True, env=found)
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.strip() or f"exit code {done.returncode}"  # negative: killed
    place = said.rpartition("Command failed -:")[2]  # a batch stops at "Command failed -:<line>"
    failing = [*words[:-2], lines[int(place) - 1]] if lines and place.isdigit() else words
    raise FabricError(f"`{' '.join(failing)}` failed: {said.partition('Command failed -:')[0].strip() or said}")


def remove(namespaces: Iterable[str]) -> None:
    """Delete the namespaces that are there, and with them all that is in them."""
    for name in namespaces:
        try:
            if present(name):
                command(["ip", "netns", "del", name])
        except FabricError:
            if present(name):  # else another process removed the same abandoned network
                raise


def present(namespace: str) -> bool:
    return (_NAMESPACES / namespace).exists()


def inode(namespace: str) -> int | None:
    """By which a process in the namespace is known (`/proc/<pid>/ns/net`); None where it is not there."""
    try:
        return (_NAMESPACES / namespace).stat().st_ino
    except OSError:
        return None

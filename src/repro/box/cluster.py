"""up, down, status of the box that this user has for this checkout."""

import json
import os
import socket
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

import jinja2

from repro import paths
from repro.box import boxes, daemons, network, packages
from repro.box.boxes import OwnedBox
from repro.box.packages import BoxError
from repro.emulate import box as fabric
from repro.emulate.netns import FabricError
from repro.launch.network import BOX
from repro.topology import Topology, scaled

Like = Literal["frontier", "nvidia"]
# Munge refuses a socket that not everybody can reach. What jobs and the database leave is for root alone.
_FOLDERS = {"etc": 0o755, "run": 0o755, "dev": 0o755, "spool": 0o755, "log": 0o700, "state": 0o700, "db": 0o700}


@dataclass(frozen=True)
class Settings:
    """`nodes` of four packages of two GCDs (`like` frontier) or of four GPUs (nvidia). `cluster_mbit_s`: a rank's share
    of the link between nodes; in a node it is 4 times that, in a package 16 times. `accounting`: a database, for sacct.
    ValueError for values out of range."""

    nodes: int = 4
    cluster_mbit_s: float = 50.0
    accounting: bool = False
    like: Like = "frontier"

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= fabric.MAX_NODES:
            raise ValueError(f"nodes is {self.nodes}, allowed: 1 to {fabric.MAX_NODES}")
        if self.like not in get_args(Like):
            raise ValueError(f"like is {self.like!r}, allowed: {', '.join(get_args(Like))}")
        if not self.cluster_mbit_s > 0:
            raise ValueError(f"cluster_mbit_s is {self.cluster_mbit_s}, must be positive")

    @property
    def topology(self) -> Topology:
        return scaled(fabric.machine(self.like, self.nodes), self.cluster_mbit_s * 1e6 / 8)


@dataclass
class Box:
    """What is there. `SLURM_CONF`: for commands outside the nodes; `daemons`: processes by name; `nodes`: states by name;
    `jobs`: ids that wait or run; `others`: boxes of other checkouts and users."""

    up: bool
    folder: str = ""
    SLURM_CONF: str = ""
    daemons: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    jobs: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def up(settings: Settings, install: bool = False) -> Box:
    """Start it. BoxError where one is up, or something is missing; a start that failed leaves nothing behind."""
    _check(settings, install)
    for left in filter(OwnedBox.abandoned, boxes.known()):
        _end(left)
    box = boxes.take(settings.nodes, settings.topology.span("node"))
    try:
        _write(box, settings)
        network.up(box, settings.topology)
        daemons.munged(box)
        if settings.accounting:
            daemons.accounting(box)
        daemons.slurmctld(box)
        daemons.slurmd(box)
        box.complete()
    except BaseException as error:
        _end(box)
        if isinstance(error, (FabricError, OSError)):
            raise BoxError(str(error)) from error
        raise
    return status()


def down(folder: Path | None = None) -> bool:
    """End it and remove all of it, jobs as well, in whatever state it is. Whether there was one. `folder`: of another
    checkout's or user's box; BoxError where that is none, and without root."""
    box = boxes.mine() if folder is None else next((box for box in boxes.known() if box.folder == folder), None)
    if folder is not None and box is None:
        raise BoxError(f"{folder}: no box; there are: {', '.join(map(str, boxes.known())) or 'none'}")
    if box is not None:
        _check_root(box)
        _end(box)
    return box is not None


def status() -> Box:
    """`up` where all nodes answer slurmctld. BoxError without root, for whom the daemons cannot be seen."""
    box = boxes.mine()
    others = [str(each) for each in boxes.known() if each != box]
    if box is None:
        return Box(False, others=others)
    _check_root(box)
    processes = Counter(map(daemons.name_of, daemons.running(box)))
    counts = {name: processes[name] for name in reversed(daemons.NAMES) if name in processes}
    found = Box(False, str(box.folder), str(box.configuration), counts, others=others)
    if "slurmctld" in counts:
        found.nodes, found.jobs = daemons.nodes(box), daemons.jobs(box)
        states = found.nodes.values()
        found.up = bool(states) and not any(state.endswith("*") or state.startswith("down") for state in states)
    return found


def configuration() -> Path:
    """What SLURM_CONF has to be for commands outside the nodes. BoxError where there is no box."""
    if (box := boxes.mine()) is None:
        others = "".join(f"; {each}" for each in boxes.known())
        raise BoxError(f"no box of this user for {paths.root()}: `repro box up` starts one{others}")
    return box.configuration


def _end(box: OwnedBox) -> None:
    daemons.stop(box)
    try:
        network.down(box)
    except FabricError as error:
        raise BoxError(str(error)) from error
    boxes.drop(box)


def _check_root(box: OwnedBox) -> None:
    if os.geteuid() != 0:
        raise BoxError(f"{box}: needs root: call it with sudo, as `up` was")


def _check(settings: Settings, install: bool) -> None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise BoxError("the box needs Linux and root: network namespaces, and daemons that change users")
    if lacking := packages.missing(settings.accounting):
        if not install:
            raise BoxError(f"missing: {', '.join(lacking)}; `apt-get install {' '.join(lacking)}`, or --install")
        packages.install(lacking)


def _write(box: OwnedBox, settings: Settings) -> None:
    """Folders, Slurm's configuration, names of the nodes, and devices that stand for GCDs. Modes do not depend on the
    user's umask: what root's daemons read, nobody else may write."""
    for name, mode in _FOLDERS.items():
        (box.folder / name).mkdir(mode=0o700)
        (box.folder / name).chmod(mode)
    host = socket.gethostname().partition(".")[0]
    span = f"[1-{box.nodes}]" if box.nodes > 1 else "1"
    values = asdict(settings) | {
        "host": host,
        "cluster": BOX,
        "controller": network.controller(box),
        "controller_port": box.controller_port,
        "accounting_port": box.accounting_port,
        "folder": box.folder,
        "nodes": f"node{span}",
        "addresses": network.address(box, 1)[:-1] + span,
        "gcds": box.gcds,
    }
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.root() / "slurm/box"), undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    names = ["slurm.conf", "gres.conf", *(["slurmdbd.conf"] if settings.accounting else [])]
    files = {name: templates.get_template(f"{name}.j2").render(values) for name in names}
    lines = ["127.0.0.1 localhost", f"{network.controller(box)} {host}"]
    files["hosts"] = "\n".join([*lines, *(f"{network.address(box, n)} node{n}" for n in range(1, box.nodes + 1))])
    files[fabric.HERE.name] = json.dumps({"like": settings.like, "prefix": network.gcds(box)})
    for name, text in files.items():
        file = box.folder / "etc" / name
        file.touch(mode=0o600)
        file.write_text(text + "\n")
        file.chmod(0o600 if name == "slurmdbd.conf" else 0o644)  # slurmdbd refuses another
    for number in range(box.gcds):
        device = box.folder / f"dev/gpu{number}"
        os.mknod(device, 0o20666, os.makedev(1, 3))  # a character device, as /dev/null
        device.chmod(0o666)

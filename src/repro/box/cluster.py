"""up, down, status. One box per machine: its names are fixed, so `down` finds everything whatever became of `up`."""

import os
import shutil
import socket
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

import jinja2

from repro import paths
from repro.box import daemons, network, packages
from repro.box.daemons import CONFIGURATION
from repro.box.packages import BoxError
from repro.emulate import box as fabric
from repro.emulate.box import FOLDER
from repro.emulate.netns import FabricError
from repro.launch.network import BOX
from repro.topology import Topology, scaled

Like = Literal["frontier", "nvidia"]
_MADE = "made-etc-slurm"  # a file in the folder: /etc/slurm was not there before


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
    """What is there. `daemons`: processes by name; `nodes`: states by name; `jobs`: ids that wait or run."""

    up: bool
    folder: str = str(FOLDER)
    daemons: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    jobs: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"SLURM_CONF": str(CONFIGURATION)}


def up(settings: Settings, install: bool = False) -> Box:
    """Start it. BoxError where one is up, or something is missing; a start that failed leaves nothing behind."""
    _check(settings, install)
    FOLDER.mkdir(mode=0o755)
    try:
        _write(settings)
        network.up(settings.nodes, settings.topology)
        daemons.munged()
        if settings.accounting:
            daemons.accounting()
        daemons.slurmctld()
        daemons.slurmd(settings.nodes)
    except BaseException as error:
        down()
        if isinstance(error, (FabricError, OSError)):
            raise BoxError(str(error)) from error
        raise
    return status()


def down() -> bool:
    """End it and remove all of it, jobs as well, in whatever state it is. Whether there was anything."""
    there = FOLDER.exists() or network.present() or bool(daemons.running())
    daemons.stop()
    network.down()
    if (FOLDER / _MADE).exists():
        Path("/etc/slurm").rmdir()
    shutil.rmtree(FOLDER, ignore_errors=True)
    return there


def status() -> Box:
    """`up` where all nodes answer slurmctld."""
    processes = [process.name() for process in daemons.running()]
    counts = {name: processes.count(name) for name in reversed(daemons.NAMES) if name in processes}
    if "slurmctld" not in counts:
        return Box(False, daemons=counts)
    nodes = daemons.nodes()
    answering = bool(nodes) and not any(state.endswith("*") or state.startswith("down") for state in nodes.values())
    return Box(answering, daemons=counts, nodes=nodes, jobs=daemons.jobs())


def _check(settings: Settings, install: bool) -> None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise BoxError("the box needs Linux and root: network namespaces, and daemons that change users")
    if lacking := packages.missing(settings.accounting):
        if not install:
            raise BoxError(f"missing: {', '.join(lacking)}; `apt-get install {' '.join(lacking)}`, or --install")
        packages.install(lacking)
    if conflict := network.taken():
        raise BoxError(f"the box needs the addresses 10.77.0.0/24, and {conflict}")
    if FOLDER.exists() or network.present():
        raise BoxError(f"a box is there already ({FOLDER}); `repro box status` shows it, `repro box down` removes it")


def _write(settings: Settings) -> None:
    """Folders, Slurm's configuration, names of the nodes, and devices that stand for GCDs."""
    for name in ("etc", "run", "log", "state", "spool", "dev", "db"):
        (FOLDER / name).mkdir(mode=0o755)
    gcds = settings.topology.span("node")
    span = f"[1-{settings.nodes}]" if settings.nodes > 1 else "1"
    values = asdict(settings) | {
        "host": socket.gethostname().partition(".")[0],
        "cluster": BOX,
        "controller": network.CONTROLLER,
        "folder": FOLDER,
        "nodes": f"node{span}",
        "addresses": network.address(1)[:-1] + span,
        "gcds": gcds,
    }
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.root() / "slurm/box"), undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    for name in ("slurm.conf", "gres.conf", *(["slurmdbd.conf"] if settings.accounting else [])):
        file = FOLDER / "etc" / name
        file.write_text(templates.get_template(f"{name}.j2").render(values) + "\n")
        file.chmod(0o600 if name == "slurmdbd.conf" else 0o644)
    fabric.LIKE.write_text(settings.like)
    lines = ["127.0.0.1 localhost", f"{network.CONTROLLER} {values['host']}"]
    lines += [f"{network.address(node)} node{node}" for node in range(1, settings.nodes + 1)]
    (FOLDER / "etc/hosts").write_text("\n".join(lines) + "\n")
    for number in range(gcds):
        os.mknod(FOLDER / f"dev/gpu{number}", 0o20666, os.makedev(1, 3))  # a character device, as /dev/null
    if not Path("/etc/slurm").exists():  # a place for the nodes to mount theirs
        Path("/etc/slurm").mkdir()
        (FOLDER / _MADE).touch()

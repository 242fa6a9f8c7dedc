"""Which boxes this machine has, and whose each is: a folder per box, which begins with a record of its owner.

A box has a number, by which its addresses and ports go, so that several are up at a time; and a random id, which is in
the names of its namespaces and links and in the environment of its daemons. `down` ends what has the id, nothing else.
"""

import contextlib
import fcntl
import json
import os
import pwd
import secrets
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from repro import paths
from repro.box.packages import BoxError

FOLDER = Path("/run/repro-boxes")
MOST = 16  # boxes at a time
_MOUNT_POINT = Path("/etc/slurm")  # where the nodes mount theirs; made where the machine has none
_RECORD, _COMPLETE, _MADE = "owner.json", "complete", "made-etc-slurm"
_ENDED = ".ended-"  # beginning of the name of a folder that is being removed


@dataclass(frozen=True)
class OwnedBox:
    """A box, and whose it is: of `user`, for the checkout `root`. Process `pid`, which began at `began`, started it."""

    number: int
    id: str
    user: str
    root: str
    pid: int
    began: str
    nodes: int
    gcds: int  # of a node

    @property
    def folder(self) -> Path:
        return FOLDER / str(self.number)

    @property
    def configuration(self) -> Path:
        """What SLURM_CONF has to be for commands outside the nodes."""
        return self.folder / "etc/slurm.conf"

    @property
    def net(self) -> str:
        """Beginning of its addresses."""
        return f"10.77.{self.number}"

    @property
    def controller_port(self) -> int:
        return 16817 + 10 * self.number

    @property
    def accounting_port(self) -> int:
        return 16819 + 10 * self.number

    def abandoned(self) -> bool:
        """Whether it is this user's, and its start was killed."""
        dead = not (self.folder / _COMPLETE).exists() and _began(self.pid) != self.began
        return dead and self.user == _user()

    def complete(self) -> None:
        """Its start is over: it lives until `down`, whoever is alive."""
        (self.folder / _COMPLETE).touch()

    def __str__(self) -> str:
        return f"{self.folder} of user {self.user}, for {self.root}"


def known() -> list[OwnedBox]:
    """All of this machine."""
    files = sorted(FOLDER.glob(f"[0-9]*/{_RECORD}"), key=lambda file: int(file.parent.name))
    found = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            found.append(OwnedBox(**json.loads(file.read_text())))
    return found


def mine() -> OwnedBox | None:
    """This user's for this checkout."""
    here = _user(), str(paths.root().resolve())
    return next((box for box in known() if (box.user, box.root) == here), None)


def take(nodes: int, gcds: int) -> OwnedBox:
    """A number that no other box has, and whose addresses and ports are free. BoxError where there is none, and where
    this user has a box for this checkout."""
    with _locked():
        if there := mine():
            raise BoxError(f"a box is there already: {there}; `repro box status` shows it, `repro box down` removes it")
        conflicts = dict[int, str]()
        for number in range(MOST):
            if not (conflict := _conflict(number)):
                break
            conflicts[number] = conflict
        else:
            raise BoxError(f"no number is left for another box: {'; '.join(conflicts.values())}")
        whose = _user(), str(paths.root().resolve()), os.getpid(), _began(os.getpid())
        box = OwnedBox(number, secrets.token_hex(3), *whose, nodes, gcds)
        begun = FOLDER / ".begun"  # of a killed process: there is no folder without its record
        shutil.rmtree(begun, ignore_errors=True)
        _sweep()
        begun.mkdir(mode=0o700)
        (begun / _RECORD).write_text(json.dumps(asdict(box)))
        (begun / _RECORD).chmod(0o644)  # whatever the umask
        begun.chmod(0o755)
        begun.rename(box.folder)
        if not _MOUNT_POINT.exists():
            (FOLDER / _MADE).touch()
            _MOUNT_POINT.mkdir(mode=0o755)
        return box


def drop(box: OwnedBox) -> None:
    """Remove the folder, unless another box has its number by now; with the last box also the mount point, if a box made
    it and nobody has used it since."""
    with _locked():
        if box in known():
            box.folder.rename(FOLDER / f"{_ENDED}{box.id}")  # at once: without its record a number would be lost
        _sweep()
        if not known() and (FOLDER / _MADE).exists():
            with contextlib.suppress(OSError):
                _MOUNT_POINT.rmdir()
            (FOLDER / _MADE).unlink()


def _sweep() -> None:
    for ended in FOLDER.glob(f"{_ENDED}*"):
        shutil.rmtree(ended, ignore_errors=True)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    handle = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchmod(handle, 0o755)  # whatever the umask
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _conflict(number: int) -> str | None:
    """Who has the folder, an address or a port of box `number` already."""
    box = OwnedBox(number, "", "", "", 0, "", 0, 0)
    if box.folder.exists():
        return next(
            (str(each) for each in known() if each.number == number), f"{box.folder} is there, without an owner"
        )
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.address.startswith(f"{box.net}."):
                return f"{name} has the address {one.address}"
    for port in (box.controller_port, box.accounting_port):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                return f"port {port}: {error.strerror}"
    return None


def _user() -> str:
    """Who is at work: behind sudo, or as whom this runs."""
    if name := os.environ.get("SUDO_USER"):
        return name
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a user without an entry, as in some containers
        return str(os.getuid())


def _began(pid: int) -> str:
    """Kernel ticks at which process `pid` began (a later one with that pid has others); empty when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]

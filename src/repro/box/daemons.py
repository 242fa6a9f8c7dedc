"""The programs of the box: how each is started, and how all are found and ended, also after half were killed.

BoxError where one does not come up, with the end of its log.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from repro.box import network
from repro.box.boxes import OwnedBox
from repro.box.packages import BoxError, search_path
from repro.launch.network import BOX

_MARK = "REPRO_BOX"  # in the environment of each: the box's id
NAMES = ("slurmstepd", "slurmd", "slurmctld", "slurmdbd", "mariadbd", "munged")  # in the order in which they are ended
_READY_S = 20.0  # for a daemon to start
_PATIENCE_S = 5.0  # for one to end


def munged(box: OwnedBox) -> None:
    """With a key and a socket of its own."""
    run, log, key = box.folder / "run", box.folder / "log/munged.log", box.folder / "etc/munge.key"
    with open(key, "xb", opener=lambda path, flags: os.open(path, flags, mode=0o600)) as file:
        file.write(os.urandom(1024))
    places = {"key-file": key, "socket": run / "munge.socket", "pid-file": run / "munged.pid"}
    places |= {"log-file": log, "seed-file": run / "munged.seed"}
    _start(box, ["munged", *(f"--{name}={place}" for name, place in places.items())])
    _await("munged", places["socket"].exists, log)


def slurmctld(box: OwnedBox) -> None:
    _start(box, ["slurmctld", "-f", str(box.configuration)])
    _await("slurmctld", lambda: "is UP" in _said(box, "scontrol", "ping"), box.folder / "log/slurmctld.log")


def slurmd(box: OwnedBox) -> None:
    """One per node, in its namespace, with its name and the box's /etc/slurm and /etc/hosts. Not by `ip netns exec`:
    that hides /sys/fs/cgroup, without which slurmd ends."""
    names = [f"node{node + 1}" for node in range(box.nodes)]
    for node, name in enumerate(names, 1):
        (box.folder / "spool" / name).mkdir(mode=0o755)
        inside = (
            f"mount --bind {box.folder}/etc/hosts /etc/hosts && mount --bind {box.folder}/etc /etc/slurm && "
            f"hostname {name} && exec slurmd -N {name} -f {box.configuration}"
        )
        entering = ["nsenter", f"--net=/run/netns/{network.namespace(box, node)}", "unshare", "--uts", "--mount"]
        _start(box, [*entering, "sh", "-c", inside])
    logs = [box.folder / f"log/slurmd.{name}.log" for name in names]
    _await("slurmd", lambda: nodes(box) == dict.fromkeys(names, "idle"), *logs)


def accounting(box: OwnedBox) -> None:
    """MariaDB, slurmdbd, and an account that root may use. The database has no password and no network: its socket lies
    in a folder of root's alone, and it lets in who is root for the kernel."""
    database, log = box.folder / "db", box.folder / "log/mariadb.log"
    socket = database / "mysql.sock"
    making = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={database}", "--skip-test-db"]
    _start(box, [*making, "--auth-root-authentication-method=socket"])
    options = ["--no-defaults", "--user=root", f"--datadir={database}", "--skip-networking"]
    options += [f"--socket={socket}", f"--pid-file={database / 'mariadb.pid'}", f"--log-error={log}"]
    options += ["--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0"]
    quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)  # it would keep what it was given
    subprocess.Popen(["mariadbd", *options], start_new_session=True, env=_environment(box), umask=0o077, **quiet)
    ping = "mariadb-admin", "--no-defaults", f"--socket={socket}", "ping"
    _await("mariadbd", lambda: bool(_said(box, *ping)), log)
    _start(box, ["slurmdbd"], MYSQL_UNIX_PORT=str(socket))
    _await("slurmdbd", lambda: bool(_said(box, "sacctmgr", "list", "cluster")), box.folder / "log/slurmdbd.log")
    for what in (f"cluster {BOX}", "account box Description=box Organization=box", "user root Account=box"):
        _said(box, "sacctmgr", "-i", "add", *what.split())


def nodes(box: OwnedBox) -> dict[str, str]:
    """Their states, by name."""
    pairs = (line.split() for line in _said(box, "sinfo", "-h", "-N", "-o", "%N %T").splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def jobs(box: OwnedBox) -> list[str]:
    """Ids of those that wait or run."""
    return _said(box, "squeue", "-h", "-o", "%A").split()


def running(box: OwnedBox) -> list[psutil.Process]:
    """What this box has started, by its environment, and whatever runs inside its namespaces."""
    inside = network.processes(box)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid in inside or process.environ().get(_MARK) == box.id:
                found.append(process)
    return found


def name_of(process: psutil.Process) -> str:
    """Empty when it has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""


def stop(box: OwnedBox) -> None:
    """All of them, in order; what does not end in seconds is killed."""
    for name in NAMES:
        named = [(process, name_of(process)) for process in running(box)]
        _end(process for process, found in named if found == name or (name == "slurmd" and found not in NAMES))
    _end(running(box))


def _end(processes: Iterable[psutil.Process]) -> None:
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(processes, _PATIENCE_S)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, _PATIENCE_S)


def _environment(box: OwnedBox) -> dict[str, str]:
    return os.environ | {"SLURM_CONF": str(box.configuration), "PATH": search_path(), _MARK: box.id}


def _start(box: OwnedBox, command: list[str], **more: str) -> None:
    """Run what puts itself into the background. `more`: environment."""
    log = box.folder / "log/start.log"
    with log.open("ab") as out:
        environment = _environment(box) | more
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        done = subprocess.run(command, **streams, env=environment, start_new_session=True, umask=0o022)
    if done.returncode:
        raise BoxError(f"`{' '.join(command)}` ended with {done.returncode}: {_tail(log)}")


def _said(box: OwnedBox, *command: str) -> str:
    """Standard output; empty when the command fails or takes over 5 s: without slurmctld, Slurm's commands wait a
    minute."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(box), timeout=5)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _await(name: str, ready: Callable[[], bool], *logs: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while not ready():
        if time.monotonic() > deadline:
            raise BoxError(f"{name} was not ready after {_READY_S:g} s:\n" + "\n".join(map(_tail, logs)))
        time.sleep(0.05)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-5:]) if log.exists() else f"{log}: no such log"

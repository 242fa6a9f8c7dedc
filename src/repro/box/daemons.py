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
from repro.box.packages import BoxError, search_path
from repro.emulate.box import FOLDER

CONFIGURATION = FOLDER / "etc/slurm.conf"  # what SLURM_CONF has to be for commands outside the nodes
_RUN, _LOG = FOLDER / "run", FOLDER / "log"
NAMES = ("slurmstepd", "slurmd", "slurmctld", "slurmdbd", "mariadbd", "munged")  # in the order in which they are ended
_READY_S = 20.0  # for a daemon to start
_PATIENCE_S = 5.0  # for one to end


def munged() -> None:
    """With a key and a socket of its own."""
    log, key, socket = _LOG / "munged.log", FOLDER / "etc/munge.key", _RUN / "munge.socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    places = {"key-file": key, "socket": socket, "pid-file": _RUN / "munged.pid"}
    places |= {"log-file": log, "seed-file": _RUN / "munged.seed"}
    _start(["munged", *(f"--{name}={place}" for name, place in places.items())])
    _await("munged", socket.exists, log)


def slurmctld() -> None:
    _start(["slurmctld", "-f", str(CONFIGURATION)])
    _await("slurmctld", lambda: "is UP" in _said("scontrol", "ping"), _LOG / "slurmctld.log")


def slurmd(count: int) -> None:
    """One per node, in its namespace, with its name and the box's /etc/slurm and /etc/hosts. Not by `ip netns exec`:
    that hides /sys/fs/cgroup, without which slurmd ends."""
    names = [f"node{node + 1}" for node in range(count)]
    for node, name in enumerate(names, 1):
        (FOLDER / "spool" / name).mkdir(parents=True)
        inside = (
            f"mount --bind {FOLDER}/etc/hosts /etc/hosts && mount --bind {FOLDER}/etc /etc/slurm && "
            f"hostname {name} && exec slurmd -N {name} -f {CONFIGURATION}"
        )
        entering = ["nsenter", f"--net=/run/netns/{network.namespace(node)}", "unshare", "--uts", "--mount"]
        _start([*entering, "sh", "-c", inside])
    logs = [_LOG / f"slurmd.{name}.log" for name in names]
    _await("slurmd", lambda: nodes() == dict.fromkeys(names, "idle"), *logs)


def accounting() -> None:
    """MariaDB, slurmdbd, and an account that root may use."""
    database, socket = FOLDER / "db", _RUN / "mysql.sock"
    making = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={database}", "--skip-test-db"]
    _start([*making, "--auth-root-authentication-method=normal"])
    options = ["--no-defaults", "--user=root", f"--datadir={database}", "--skip-networking", "--skip-grant-tables"]
    options += [f"--socket={socket}", f"--pid-file={_RUN / 'mariadb.pid'}", f"--log-error={_LOG / 'mariadb.log'}"]
    options += ["--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0"]
    quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)  # it would keep what it was given
    subprocess.Popen(["mariadbd", *options], start_new_session=True, env=_environment(), **quiet)
    ping = "mariadb-admin", "--no-defaults", f"--socket={socket}", "ping"
    _await("mariadbd", lambda: bool(_said(*ping)), _LOG / "mariadb.log")
    _start(["slurmdbd"], MYSQL_UNIX_PORT=str(socket))
    _await("slurmdbd", lambda: bool(_said("sacctmgr", "list", "cluster")), _LOG / "slurmdbd.log")
    for what in ("cluster box", "account box Description=box Organization=box", "user root Account=box"):
        _said("sacctmgr", "-i", "add", *what.split())


def nodes() -> dict[str, str]:
    """Their states, by name."""
    pairs = (line.split() for line in _said("sinfo", "-h", "-N", "-o", "%N %T").splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def jobs() -> list[str]:
    """Ids of those that wait or run."""
    return _said("squeue", "-h", "-o", "%A").split()


def running() -> list[psutil.Process]:
    """Daemons of this box, by their command line or environment, and whatever runs inside its namespaces."""
    inside, mark = network.processes(), f"{FOLDER}/"
    found = []
    for process in psutil.process_iter(["pid", "name"]):
        with contextlib.suppress(psutil.Error):
            named = process.info["name"] in NAMES
            if process.pid in inside or (named and _mentions(process, mark)):
                found.append(process)
    return found


def stop() -> None:
    """All of them, in order; what does not end in seconds is killed."""
    for name in NAMES:
        _end(
            process
            for process in running()
            if process.name() == name or (name == "slurmd" and process.name() not in NAMES)
        )
    _end(running())


def _end(processes: Iterable[psutil.Process]) -> None:
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(processes, _PATIENCE_S)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, _PATIENCE_S)


def _mentions(process: psutil.Process, mark: str) -> bool:
    return any(mark in text for text in (*process.cmdline(), *process.environ().values()))


def _environment() -> dict[str, str]:
    return os.environ | {"SLURM_CONF": str(CONFIGURATION), "PATH": search_path()}


def _start(command: list[str], **more: str) -> None:
    """Run what puts itself into the background. `more`: environment."""
    log = _LOG / "start.log"
    with log.open("ab") as out:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=_environment() | more, start_new_session=True
        )
    if done.returncode:
        raise BoxError(f"`{' '.join(command)}` ended with {done.returncode}: {_tail(log)}")


def _said(*command: str) -> str:
    """Standard output; empty when it fails or does not answer, as Slurm's commands do for a minute when slurmctld is
    gone."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=5)
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

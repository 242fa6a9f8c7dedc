"""The programs of the box: how each is started, and how all are found and ended, also after half were killed."""

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from repro.box import network, packages

NAMES = ("slurmstepd", "slurmd", "slurmctld", "slurmdbd", "mariadbd", "munged")  # in the order in which they are ended
_PATIENCE_S = 5.0


class StartError(RuntimeError):
    """A daemon did not come up: which, and the end of its log."""


def munged(folder: Path) -> None:
    """With a key and a socket of its own."""
    etc, run, log = folder / "etc", folder / "run", folder / "log"
    key = etc / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    places = {"key-file": key, "socket": run / "munge.socket", "pid-file": run / "munged.pid"}
    places |= {"log-file": log / "munged.log", "seed-file": run / "munged.seed"}
    _start([_path("munged"), *(f"--{name}={place}" for name, place in places.items())], folder)
    _await("munged", (run / "munge.socket").exists, log / "munged.log")


def slurmctld(folder: Path) -> None:
    _start([_path("slurmctld"), "-f", str(folder / "etc/slurm.conf")], folder)
    _await("slurmctld", lambda: "is UP" in _said(["scontrol", "ping"], folder), folder / "log/slurmctld.log")


def slurmd(folder: Path, nodes: int) -> None:
    """One per node, in its namespace, with its name, and with the box's /etc/slurm and /etc/hosts mounted where only it
    and its jobs see them.

    Not `ip netns exec`: that hides /sys/fs/cgroup, without which slurmd ends.
    """
    conf = folder / "etc/slurm.conf"
    for node in range(1, nodes + 1):
        name = f"node{node}"
        (folder / "spool" / name).mkdir(parents=True)
        inside = (
            f"mount --bind {shlex.quote(str(folder / 'etc/hosts'))} /etc/hosts && "
            f"mount --bind {shlex.quote(str(folder / 'etc'))} /etc/slurm && "
            f"hostname {name} && exec {_path('slurmd')} -N {name} -f {shlex.quote(str(conf))}"
        )
        entering = ["nsenter", f"--net=/run/netns/{network.namespace(node)}", "unshare", "--uts", "--mount"]
        _start([*entering, "sh", "-c", inside], folder)
    _await(
        "slurmd", lambda: len(idle(folder)) == nodes, *(folder / f"log/slurmd.node{n + 1}.log" for n in range(nodes))
    )


def accounting(folder: Path) -> None:
    """MariaDB, slurmdbd, and an account that root may use."""
    run, log, database = folder / "run", folder / "log", folder / "db"
    socket = run / "mysql.sock"
    making = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={database}", "--skip-test-db"]
    _start([*making, "--auth-root-authentication-method=normal"], folder)
    options = ["--no-defaults", "--user=root", f"--datadir={database}", "--skip-networking", "--skip-grant-tables"]
    options += [f"--socket={socket}", f"--pid-file={run / 'mariadb.pid'}", f"--log-error={log / 'mariadb.log'}"]
    options += ["--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0"]
    subprocess.Popen([_path("mariadbd"), *options], start_new_session=True, **_QUIET)
    _await(
        "mariadbd",
        lambda: _ok(["mariadb-admin", "--no-defaults", f"--socket={socket}", "ping"], folder),
        log / "mariadb.log",
    )
    _start([_path("slurmdbd")], folder, MYSQL_UNIX_PORT=str(socket))
    _await("slurmdbd", lambda: _ok(["sacctmgr", "-n", "list", "cluster"], folder), log / "slurmdbd.log")
    for what in (
        ["cluster", "box"],
        ["account", "box", "Description=box", "Organization=box"],
        ["user", "root", "Account=box"],
    ):
        _said(["sacctmgr", "-i", "add", *what], folder)


def idle(folder: Path) -> list[str]:
    """Names of the nodes that wait for jobs."""
    return sorted(set(_said(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], folder).split()))


def nodes(folder: Path) -> dict[str, str]:
    """Their states, by name."""
    pairs = (line.split() for line in _said(["sinfo", "-h", "-N", "-o", "%N %T"], folder).splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def jobs(folder: Path) -> list[str]:
    """Ids of those that wait or run."""
    return _said(["squeue", "-h", "-o", "%A"], folder).split()


def running(folder: Path) -> list[psutil.Process]:
    """Daemons of this box, by their command line or environment, and whatever runs inside its namespaces."""
    inside, mark = network.processes(), f"{folder}/"
    found = []
    for process in psutil.process_iter(["pid", "name"]):
        with contextlib.suppress(psutil.Error):
            named = process.info["name"] in NAMES
            if process.pid in inside or (named and _mentions(process, mark)):
                found.append(process)
    return found


def stop(folder: Path) -> None:
    """All of them, in order; what does not end in seconds is killed."""
    for name in NAMES:
        _end(
            process
            for process in running(folder)
            if process.name() == name or (name == "slurmd" and process.name() not in NAMES)
        )
    _end(running(folder))


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


_QUIET = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.DEVNULL,
    "stderr": subprocess.DEVNULL,
}  # daemons keep what they were given


def _environment(folder: Path, **more: str) -> dict[str, str]:
    return os.environ | {"SLURM_CONF": str(folder / "etc/slurm.conf")} | more


def _start(command: list[str], folder: Path, **more: str) -> None:
    """Runs what puts itself into the background."""
    log = folder / "log" / "start.log"
    with log.open("ab") as out:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=_environment(folder, **more),
            start_new_session=True,
        )
    if done.returncode:
        raise StartError(f"`{' '.join(command)}` ended with {done.returncode}: {_tail(log)}")


def _said(command: list[str], folder: Path) -> str:
    """Standard output; empty when it fails or does not answer."""
    done = _run(command, folder)
    return done.stdout if done is not None and done.returncode == 0 else ""


def _ok(command: list[str], folder: Path) -> bool:
    done = _run(command, folder)
    return done is not None and done.returncode == 0


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str] | None:
    """None when it does not answer, as Slurm's commands do for a minute when slurmctld is gone."""
    try:
        return subprocess.run(command, capture_output=True, text=True, env=_environment(folder), timeout=5)
    except subprocess.TimeoutExpired:
        return None


def _await(name: str, ready: Callable[[], bool], *logs: Path, patience_s: float = 20.0) -> None:
    deadline = time.monotonic() + patience_s
    while not ready():
        if time.monotonic() > deadline:
            raise StartError(f"{name} was not ready after {patience_s:g} s:\n" + "\n".join(map(_tail, logs)))
        time.sleep(0.05)


def _tail(log: Path, lines: int = 5) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else f"{log}: no such log"


def _path(command: str) -> str:
    return packages.path(command) or command

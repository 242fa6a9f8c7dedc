"""The Slurm cluster on one machine: it runs jobs as a cluster would, and leaves nothing behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_box import lacking

from repro import box
from repro.box import cluster, daemons, network, packages

pytestmark = pytest.mark.xdist_group("network")


def in_box(test):
    """A test that sets up a cluster, or what a killed set-up leaves."""
    return pytest.mark.root(pytest.mark.skipif(lacking() is not None, reason=str(lacking()))(test))


def repro(*command, code=0):
    done = subprocess.run([sys.executable, "-m", "repro", "box", *command], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextlib.contextmanager
def up(**settings):
    """A box of two nodes; whatever a test does to it, nothing of it is there afterwards."""
    before = traces()
    try:
        yield box.up(box.Settings(**{"nodes": 2} | settings))
    finally:
        box.down()
        assert traces() == before


def traces():
    """What a box could leave behind."""
    slurm = Path("/etc/slurm")
    return (
        sorted(process.name() for process in daemons.running()),
        network.present(),
        cluster.FOLDER.exists(),
        sorted(map(str, slurm.rglob("*"))) if slurm.exists() else None,
        Path("/etc/hosts").read_text(),
    )


def slurm(*command, timeout=60):
    environment = os.environ | {"SLURM_CONF": str(box.CONFIGURATION)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, cwd="/tmp")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.box
@in_box
def test_a_cluster_that_runs_jobs():
    with up() as found:
        assert found.up and found.nodes == {"node1": "idle", "node2": "idle"}
        assert found.daemons == {"munged": 1, "slurmctld": 1, "slurmd": 2} and found.jobs == []
        # Every task has a GCD of its own, nodes have names and find each other by them.
        tell = "echo $(hostname) $SLURM_PROCID $ROCR_VISIBLE_DEVICES $(getent hosts node2 | cut -d' ' -f1)"
        ranks = slurm("srun", "-N2", "-n16", "--gpus-per-task=1", "--gpu-bind=single:1", "sh", "-c", tell).split("\n")
        ranks = sorted((line.split() for line in ranks if line), key=lambda words: int(words[1]))
        assert [words[0] for words in ranks] == ["node1"] * 8 + ["node2"] * 8
        assert sorted(words[2] for words in ranks) == sorted(str(gcd) for gcd in range(8) for _ in range(2))
        assert {words[3] for words in ranks} == {network.address(2)}
        # A job without SLURM_CONF finds this cluster, and nothing else, at Slurm's usual place.
        inside = slurm("srun", "-N1", "env", "-u", "SLURM_CONF", "sinfo", "-h", "-o", "%R")
        assert inside.split() == ["batch", "urgent"]
        # A job that can never run is refused at once.
        refused = subprocess.run(
            ["sbatch", "-N3", "--wrap=true"],
            env=os.environ | {"SLURM_CONF": str(box.CONFIGURATION)},
            capture_output=True,
            text=True,
        )
        assert refused.returncode != 0 and "Node count specification invalid" in refused.stderr
        assert "up" in repro("status") and "node1 idle" in repro("status")
        assert "there already" in repro("up", code=2)
        assert repro("env").startswith("export SLURM_CONF=/run/repro-box/etc/slurm.conf")


@in_box
def test_links_between_gcds_are_shaped():
    with up(cluster_mbit_s=20.0):
        rates = subprocess.run(
            ["tc", "-n", "repro-box-gcd-fab", "class", "show", "dev", "u0"], capture_output=True, text=True, check=True
        ).stdout
        # A package's uplink: two GCDs, 4 times and once the rate between nodes.
        assert "rate 160Mbit" in rates and "rate 40Mbit" in rates
        ends = subprocess.run(
            ["tc", "-n", "repro-box-gcd-0", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True, check=True
        ).stdout
        assert "rate 320Mbit" in ends


@pytest.mark.box
@in_box
def test_jobs_and_daemons_that_were_killed_leave_nothing():
    with up():
        slurm("sbatch", "-N2", "--output=/dev/null", "--wrap=srun -n2 sleep 1000")
        deadline = time.monotonic() + 20
        while sum(p.name() == "sleep" for p in daemons.running()) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        processes = daemons.running()
        assert sum(process.name() == "sleep" for process in processes) == 2 and box.status().jobs
        for process in processes:
            if process.name() in ("slurmctld", "slurmd", "munged"):
                process.send_signal(signal.SIGKILL)
        assert "not up" in repro("status", code=1)
        assert "is down" in repro("down")
        assert "there was no box" in repro("down")


@pytest.mark.box
@in_box
@pytest.mark.parametrize("after_s", [0.15, 0.8])
def test_a_start_that_was_killed_leaves_nothing(after_s):
    start = "from repro import box; box.up(box.Settings(nodes=2))"
    process = subprocess.Popen([sys.executable, "-c", start])
    deadline = time.monotonic() + 20
    while not cluster.FOLDER.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(after_s)
    process.kill()
    process.wait()
    box.down()
    with up() as found:  # which is refused while anything is there
        assert found.up


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nodes": 0}, "nodes is 0, allowed: 1 to 16"),
        ({"cluster_mbit_s": 0.0}, "cluster_mbit_s is 0.0, must be positive"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        box.Settings(**settings)


def test_what_is_missing_is_named_and_not_installed(monkeypatch):
    monkeypatch.setattr(packages, "missing", lambda accounting: ["munge", "slurmd"])
    monkeypatch.setattr(packages, "install", lambda names: pytest.fail("installed without being asked"))
    with pytest.raises(box.BoxError, match="missing: munge, slurmd; `apt-get install munge slurmd`, or --install"):
        box.up(box.Settings())

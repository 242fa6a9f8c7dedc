"""The Slurm cluster on one machine: it runs jobs as a cluster would, and leaves nothing behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import copied_project
from slurm_box import lacking

from repro import box
from repro.box import boxes, daemons, network, packages
from repro.emulate import netns

pytestmark = pytest.mark.xdist_group("network")


def in_box(test):
    """A test that sets up a cluster, or what a killed set-up leaves."""
    return pytest.mark.root(pytest.mark.skipif(lacking() is not None, reason=str(lacking()))(test))


def repro(*command, code=0):
    done = subprocess.run([sys.executable, "-m", "repro", "box", *command], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextlib.contextmanager
def up(before=None, **settings):
    """A box of two nodes; whatever a test does to it, nothing is there afterwards that was not there before."""
    before = before or traces()
    try:
        yield box.up(box.Settings(**{"nodes": 2} | settings))
    finally:
        left = boxes.mine()
        box.down()
        assert left is None or not daemons.running(left)
        assert traces() == before


def traces():
    """What a box could leave behind: a folder, namespaces, links, files of the machine."""
    slurm = Path("/etc/slurm")
    return (
        sorted(map(str, boxes.known())),
        sorted(path.name for path in Path("/run/netns").glob("*-node*")),
        sorted(path.name for path in Path("/run/netns").glob("*-gcd-*")),
        sorted(path.name for path in Path("/sys/class/net").glob("rb*")),
        sorted(map(str, slurm.rglob("*"))) if slurm.exists() else None,
        Path("/etc/hosts").read_text(),
    )


def slurm(*command, timeout=60):
    environment = os.environ | {"SLURM_CONF": str(box.configuration())}
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
        assert {words[3] for words in ranks} == {network.address(boxes.mine(), 2)}
        # A job without SLURM_CONF finds this cluster, and nothing else, at Slurm's usual place.
        inside = slurm("srun", "-N1", "env", "-u", "SLURM_CONF", "sinfo", "-h", "-o", "%R")
        assert inside.split() == ["batch", "urgent"]
        # A job that can never run is refused at once.
        refused = subprocess.run(
            ["sbatch", "-N3", "--wrap=true"],
            env=os.environ | {"SLURM_CONF": str(box.configuration())},
            capture_output=True,
            text=True,
        )
        assert refused.returncode != 0 and "Node count specification invalid" in refused.stderr
        assert "up" in repro("status") and "node1 idle" in repro("status")
        assert "there already" in repro("up", code=2)
        assert repro("env") == f"export SLURM_CONF={found.folder}/etc/slurm.conf\n"


@pytest.mark.box
@in_box
def test_links_between_gcds_are_shaped():
    with up(cluster_mbit_s=20.0):
        gcds = network.gcds(boxes.mine())
        rates = subprocess.run(
            ["tc", "-n", f"{gcds}fab", "class", "show", "dev", "u0"], capture_output=True, text=True, check=True
        ).stdout
        # A package's uplink: two GCDs, 4 times and once the rate between nodes.
        assert "rate 160Mbit" in rates and "rate 40Mbit" in rates
        ends = subprocess.run(
            ["tc", "-n", f"{gcds}0", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True, check=True
        ).stdout
        assert "rate 320Mbit" in ends


@pytest.mark.box
@in_box
def test_jobs_and_daemons_that_were_killed_leave_nothing():
    with up():
        own = boxes.mine()
        slurm("sbatch", "-N2", "--output=/dev/null", "--wrap=srun -n2 sleep 1000")
        deadline = time.monotonic() + 20
        while sum(p.name() == "sleep" for p in daemons.running(own)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        processes = daemons.running(own)
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
    before = traces()
    start = "from repro import box; box.up(box.Settings(nodes=2))"
    process = subprocess.Popen([sys.executable, "-c", start])
    deadline = time.monotonic() + 20
    while boxes.mine() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(after_s)
    process.kill()
    process.wait()
    left = boxes.mine()
    if not left.abandoned():  # on a fast machine it was complete
        box.down()
    with up(before) as found:  # which ends what the killed start has left
        assert found.up and left not in boxes.known() and not daemons.running(left)


@pytest.mark.box
@in_box
def test_two_users_two_checkouts_and_what_is_foreign_live_side_by_side(tmp_path):
    """A foreign namespace and bridge have names that a box once had; a foreign daemon knows a box by its environment."""
    lines = ["netns add repro-box-node1", "link add repro-box type bridge", "netns add repro-2024-01-01-mine"]
    netns.command(["ip", "-batch", "-"], lines)
    before = traces()
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        first = stack.enter_context(up(before, nodes=1))
        conf = os.environ | {"SLURM_CONF": f"{first.folder}/etc/slurm.conf"}
        munged = tmp_path / "munged"
        munged.symlink_to("/bin/sleep")
        foreign = subprocess.Popen([munged, "1000"], env=conf)
        try:
            patch.setenv("SUDO_USER", "somebody")
            with up(nodes=1) as second:
                assert second.folder != first.folder and second.others == [str(boxes.known()[0])]
                assert "somebody" in repro("up", code=2)
                slurm("srun", "-N1", "true")
            patch.delenv("SUDO_USER")
            with copied_project(tmp_path / "copy"), up(nodes=1) as third:
                assert third.folder == second.folder, "the number is free again"
                slurm("srun", "-N1", "true")
                assert f"left alone: {first.folder} of user" in repro("down")
            assert box.status().up and slurm("srun", "-N1", "hostname") == "node1\n"
            assert foreign.poll() is None
        finally:
            foreign.kill()
            foreign.wait()
    assert "repro-2024-01-01-mine" in os.listdir("/run/netns")
    lines = [f"{what} del {name}" for what, name in (line.split(" add ") for line in lines)]
    netns.command(["ip", "-batch", "-"], [line.removesuffix(" type bridge") for line in lines])


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

"""What can happen to a job on a cluster, done to real jobs: each ends as a typed cause in the record, and nothing finished is lost.

Most of these jobs run at the same time on the nodes of one box: the fixture `jobs` does to each what is to be done to it, the tests say what must
come of it.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_box import boxed, own, slurm
from slurm_job import QUICK, SECONDS, Job, environment, process

from repro.box import daemons, network
from repro.jobs import journal, queue, srun
from repro.plan import config
from repro.plan import jobs as plan
from repro.records import record
from repro.records.record import Cause

pytestmark = [pytest.mark.root, pytest.mark.box, pytest.mark.xdist_group("network")]

LONG = ("moe_train", {"iterations": 10**6})  # hours
RANKS = ("zero_train", {"plan": "zero3", "nodes": 1, "packages": 1, "gcds": 2, "steps": 10**6})
WIDE = ("zero_train", {"plan": "zero3", "nodes": 2, "packages": 1, "gcds": 2, "steps": 10**6})


@pytest.fixture(scope="module")
def box(module_project):
    with boxed(nodes=8):
        yield module_project


@pytest.fixture(scope="module")
def jobs(box):
    """Each is let down as soon as it runs. The one that hangs runs alone until then, as its two minutes are also the time to notice; all others at once."""
    refuses = Path("refuses")
    refuses.write_text("#!/bin/sh\necho 'no such thing'\nexit 3\n")
    refuses.chmod(0o755)
    made = {"hang": Job("hang", RANKS, minutes=2)}
    _let_down(made, {"hang": lambda job: _rank(job, 1).suspend()})
    made |= {
        "time": Job("time", QUICK, LONG, (QUICK[0], {"requests": 3, "seeds": 2}), minutes=2),
        "memory": Job("memory", LONG, options=["--mem=200"]),
        "exit": Job("exit", QUICK, variables=f"REPRO_PYTHON={refuses.absolute()}"),
        "cancel": Job("cancel", QUICK, LONG),
        "killed": Job("killed", RANKS, QUICK),
        "node": Job("node", WIDE, QUICK),
    }
    actions = {
        "killed": lambda job: _rank(job, 1).kill(),
        "cancel": lambda job: slurm("scancel", job.id),
        "node": _lose_second_node,
    }
    _let_down(made, actions)
    return made


def _let_down(made, actions):
    """Does to each job its action once it runs."""
    deadline = time.monotonic() + 150
    while actions:
        for case, action in list(actions.items()):
            if made[case].runs(1 if case == "cancel" else 0):
                action(made[case])
                del actions[case]
        assert time.monotonic() < deadline, {case: made[case].state for case in actions}
        time.sleep(0.2)


def _rank(job, number):
    return next(rank for rank in job.runs() if rank.environ()["SLURM_PROCID"] == str(number))


def _lose_second_node(job):
    """Power loss: all that runs on it is gone at once, and nobody says so."""
    number = int(slurm("scontrol", "show", "hostnames", queue.facts(job.id).nodes).split()[1].removeprefix("node"))
    inside = os.stat(Path("/run/netns") / network.namespace(own(), number)).st_ino
    for found in filter(None, map(process, network.processes(own()))):
        if _namespace(found) == inside or f"SLURMD_NODENAME=node{number}" in environment(found):
            found.kill()


def _namespace(found):
    try:
        return os.stat(f"/proc/{found.pid}/ns/net").st_ino
    except OSError:
        return None


def test_exit_code(jobs):
    """Only the step fails: the job goes on and ends well."""
    job = jobs["exit"]
    (found,) = job.ended()
    assert found.cause is Cause.UNEXPECTED and "exit code 3" in found.detail and "no such thing" in found.detail
    assert job.state.state == "COMPLETED" and Path(job.folder, "done.json").exists()
    assert found.provenance.slurm["SLURM_JOB_ID"] == job.id and found.provenance.slurm["SLURM_JOB_NODELIST"].startswith(
        "node"
    )


def test_a_killed_rank(jobs):
    """The job goes on with the next point, and leaves this one to the next job."""
    job = jobs["killed"]
    first, second = job.ended()
    assert first.cause is Cause.NODE_FAILURE and second.status == "ok", (first.cause, first.detail)
    assert not job.processes() and not Path(job.folder, "done.json").exists()
    assert "left to the next job: " + str(job.records[0]) in " ".join(Path(job.folder, "job.log").read_text().split())


def test_scancel(jobs):
    first, second = jobs["cancel"].ended()
    assert first.status == "ok" and second.cause is Cause.CANCELLED, second.detail


def test_memory(jobs):
    (found,) = jobs["memory"].ended()
    assert found.cause is Cause.OOM, found.detail


def test_a_node_that_is_gone(jobs):
    """Its neighbours notice before Slurm does; no further point is tried on what is left of the job."""
    (found,) = jobs["node"].ended(seconds=150)
    assert found.cause is Cause.NODE_FAILURE, (found.cause, found.detail)
    assert not jobs["node"].records[1].exists()


def test_a_rank_that_hangs(jobs):
    """A stopped rank answers nobody; the others tell that they wait for it."""
    job = jobs["hang"]
    (found,) = job.ended(seconds=150)
    assert found.cause is Cause.COMM_HANG, (found.cause, found.detail)
    assert "blocked in torch.distributed: rank 0" in found.detail
    assert not job.processes()


def test_the_end_of_the_jobs_time(jobs):
    """The point that runs says so; those behind it wait for the next job."""
    job = jobs["time"]
    first, second = job.ended(seconds=180)
    assert first.status == "ok" and second.cause is Cause.TIMEOUT and "TimeoutError" in second.detail
    assert not job.records[2].exists() and not Path(job.folder, "done.json").exists()
    log = Path(job.folder, "job.log").read_text()
    assert "left to the next job" in log and job.state.state == "FAILED"


def test_a_job_that_is_killed_whole(box):
    """Nobody in the job can say anything; the driver reads what it was doing."""
    job = Job("whole", QUICK, LONG)
    job.wait(lambda: job.runs(1), 90, "should run")
    for found in job.processes():
        found.kill()
    first, second = job.ended()
    assert first.status == "ok" and second.status == "failed" and "while this ran" in second.detail
    assert second.cause in (Cause.UNEXPECTED, Cause.NODE_FAILURE) and not journal.entries(job.folder)


def test_preemption_with_requeue(box):
    """Another job takes the nodes; Slurm puts this one back, and it goes on with what is missing, a finished point not among it."""
    job = Job("preempted", QUICK, SECONDS, options=["--requeue"])
    job.wait(lambda: job.runs(1), 90, "should run")
    first = record.read(job.records[0])
    node = queue.facts(job.id).nodes
    urgent = slurm(
        "sbatch", "--parsable", "-p", "urgent", f"--nodelist={node}", "--exclusive", "-o/dev/null", "--wrap=sleep 1"
    )
    job.wait(lambda: job.state.state == "PENDING", 60, "should be preempted")
    found = record.read(job.records[1]) if job.records[1].exists() else None
    assert found is None or found.cause is Cause.PREEMPTED, found.detail
    job.wait(lambda: queue.state(urgent.strip()).over, 60, "the other should end")
    slurm("scontrol", "update", f"jobid={job.id}", "StartTime=now")  # Slurm would wait two minutes
    one, two = job.ended(seconds=200)
    assert one == first and two.status == "ok" and two.attempt == 2
    assert job.state.state == "COMPLETED" and " Restarts=1 " in slurm("scontrol", "show", "job", job.id)


def test_slurmctld_restarts(box):
    """Jobs go on meanwhile."""
    job = Job("controller", QUICK, SECONDS)
    job.wait(lambda: job.runs(1), 90, "should run")
    (controller,) = [p for p in daemons.running(own()) if p.name() == "slurmctld"]
    controller.kill()
    controller.wait(10)
    daemons.slurmctld(own())
    found = job.ended(seconds=90)
    assert [run.status for run in found] == ["ok", "ok"]


def test_ranks_on_other_nodes_than_the_topology_says(box):
    """Two ranks on one node, where the point has one on each of two."""
    arguments = (
        "zero_train --set plan=zero3 --set nodes=2 --set packages=1 --set gcds=1 --set steps=3 --set fabric=unshaped"
    )
    command = f"srun -N1 -n2 -p batch --gpus-per-node=8 --kill-on-bad-exit=1 {sys.executable} -m repro run {arguments} --record-failure --out results/placed.json"
    done = subprocess.run(
        command.split(), capture_output=True, text=True, env=os.environ | {"GLOO_SOCKET_IFNAME": "hsn0"}
    )
    assert done.returncode
    found = record.read(Path("results/placed.json"))
    assert found.cause is Cause.BAD_INPUT
    assert "PlacementError: rank 1 should be on another node than rank 0, but both are on host node" in found.detail


def test_srun_binds_what_the_topology_says(box):
    """Two ranks of a point with one rank per package get GCDs of two packages."""
    _, platform = config.load("smoke", "box")
    (job,) = plan._jobs(
        "flover_parallel", config.Grid(grid={"nodes": 1, "packages": 2, "gcds": 1}), "results/x", {}, "t"
    )
    command = srun.command(job, platform.slurm, platform.node)
    said = slurm(*command, "-p", "batch", "sh", "-c", "echo $SLURM_PROCID $ROCR_VISIBLE_DEVICES")
    assert sorted(said.split("\n"))[1:] == ["0 0", "1 2"]


def test_nothing_is_left_on_the_nodes(box):
    deadline = time.monotonic() + 60  # the job that was ended last may still be completing
    while left := slurm("squeue", "--noheader").strip():
        assert time.monotonic() < deadline, left
        time.sleep(0.5)

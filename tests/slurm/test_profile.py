"""`snakemake --profile workflows/profiles/box`: the DAG through real Slurm jobs, from points to report, whatever happens to the driver."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import smoke_points, wait_for
from slurm_box import SNAKEMAKE, boxed, own, slurm
from typer.testing import CliRunner

from repro.box import network
from repro.cli import app
from repro.jobs import driver, queue, runner
from repro.plan import config
from repro.plan import jobs as plan
from repro.records import record

pytestmark = [pytest.mark.root, pytest.mark.box, pytest.mark.xdist_group("network")]

POINTS = {
    "zero_train": [{"grid": {"plan": ["zero3", "hierarchical"], "packages": 1, "steps": 4}}],  # 2 nodes of 2 GCDs
    "flover_queue": [{"grid": {"requests": [1, 2], "seeds": 2}}],
    "moe_decode": [
        {"grid": {"experts": 8, "keys_values": "shared", "requests": 8, "new_tokens": 5, "packages": 1, "nodes": 2}}
    ],
}
SECONDS = {"iterations": 500, "layers": 2, "hidden": 32}


@pytest.fixture(scope="module", autouse=True)
def disk(tmp_path_factory):
    """A small one; a job sees only what was mounted before its box began."""
    folder = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", folder], check=True)
    try:
        with boxed(nodes=3):
            yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def points(project):
    """Replace the points of the smoke tier."""

    return partial(smoke_points, project)


def command(*arguments):
    settings = [
        "--profile",
        "workflows/profiles/box",
        "--slurm-init-seconds-before-status-checks",
        "1",
        "--latency-wait",
        "5",
    ]
    return [sys.executable, SNAKEMAKE, *settings, "--config", "tier=smoke", *arguments]


def snakemake(*arguments, code=0):
    done = subprocess.run(command(*arguments), capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def records():
    return [record.read(Path(job.record)) for job in plan.make("smoke", "box").jobs]


def test_from_points_to_the_report(points, project):
    points(POINTS)
    wanted = ("--", "points", "sarathi", "results/box-smoke/claims.json")  # one notebook: all others are jobs as it is
    snakemake(*wanted)
    found = records()
    assert [run.status for run in found] == ["ok"] * 5, [run.detail for run in found]
    assert all(run.provenance.slurm["SLURM_CLUSTER_NAME"] == "reprobox" for run in found)
    wide = [run for run in found if run.experiment == "zero_train"]
    assert all(run.provenance.hosts == ["node1", "node2"] and run.conditions["fabric"] == "shaped" for run in wide)
    assert all(run.evidence == "emulated" for run in wide)
    report = CliRunner().invoke(app, ["report", "--results", "results/box-smoke"])
    assert report.exit_code == 0, report.output
    assert "zero_train" in (project / "results/box-smoke/report.html").read_text()
    assert json.loads((project / "results/box-smoke/claims.json").read_text())
    for run in wide:  # a job of two nodes moves the same bytes and learns the same as ranks of one machine
        here = runner.run("zero_train", config.point("zero_train", run.point, "test"))
        same = [name for name in run.metrics if name.startswith(("bytes_", "loss_"))]
        assert len(same) == 5 and {n: run.metrics[n] for n in same} == {n: here.metrics[n] for n in same}
    assert "Nothing to be done" in snakemake(*wanted)
    stale = Path(plan.make("smoke", "box").jobs[0].record)
    stale.write_text(stale.read_text().replace(found[0].provenance.source_hash, "of other code"))
    said = snakemake("-n", *wanted)
    assert re.search(r"^allocation +1$", said, re.MULTILINE)  # though its job had said that it was done


def running(text):
    """Processes of the box's jobs with `text` in their command line."""
    found = []
    for pid in network.processes(own()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if any(text in word for word in words) and "srun" not in words[0]:
            found.append(pid)
    return found


def test_a_driver_that_is_killed_and_started_again(points):
    """It does not hear of its jobs again: the next one cancels them, keeps what is finished and runs what is missing."""
    points({"moe_train": [{"grid": SECONDS | {"iterations": [20, 500]}, "minutes": 1}]})
    quick, slow = (Path(job.record) for job in plan.make("smoke", "box").jobs)
    first = subprocess.Popen(
        command("--", "points"), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(lambda: quick.exists() and running(str(slow)), first)
    with pytest.raises(driver.DriverError, match="another snakemake drives these jobs"):
        driver.drive("results/box-smoke", io.StringIO())
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    finished, orphans = quick.read_bytes(), queue.jobs_of(Path.cwd(), "rule_allocation_")
    assert len(orphans) == 1 and not slow.exists()
    said = snakemake("--", "points")
    assert f"cancelling jobs that an earlier driver left in the queue: {orphans[0]}" in said
    assert queue.state(orphans[0]).state == "CANCELLED"
    assert quick.read_bytes() == finished
    found = record.read(slow)
    assert found.status == "ok" and found.attempt == 2 and found.provenance.slurm["SLURM_JOB_ID"] != orphans[0]


@pytest.mark.parametrize("how", ["cancelled", "preempted"])
def test_a_job_that_dies_is_replaced(points, how):
    """By `retries` of the profile; the point that it was running counts the attempt. Other calls of Snakemake meanwhile do no harm."""
    points({"flover_queue": [{"grid": {"requests": 2, "seeds": 2}}], "moe_train": [{"grid": SECONDS, "minutes": 1}]})
    (slow,) = (Path(job.record) for job in plan.make("smoke", "box").jobs if job.experiment == "moe_train")
    first = subprocess.Popen(command("--", "points"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: running(str(slow)), first)
    (line,) = [line for line in slurm("squeue", "--noheader", "--format=%i|%k").splitlines() if "moe_train" in line]
    snakemake("-n")
    if how == "cancelled":
        slurm("scancel", line.split("|")[0])
    else:
        node = queue.facts(line.split("|")[0]).nodes
        slurm("sbatch", "-p", "urgent", f"--nodelist={node}", "--exclusive", "-o/dev/null", "--wrap=sleep 1")
    assert first.wait(240) == 0
    found = record.read(slow)
    assert found.status == "ok" and found.attempt == 2 and found.provenance.slurm["SLURM_JOB_ID"] != line.split("|")[0]


def test_a_failed_point_is_a_record_and_no_failed_job(points):
    points({"exflow_placement": [{"grid": {"method": "contiguous", "gpus": 4, "train_tokens": [1000, 10**9]}}]})
    snakemake("--", "points")
    assert [(run.status, run.cause) for run in records()] == [("ok", None), ("failed", "bad_input")]


def test_a_full_disk_and_a_truncated_record(points, disk):
    """What is finished stays; the next call runs what is missing, and what is no record any more."""
    seeds = {"method": "contiguous", "gpus": 4, "train_tokens": 1000, "seed": list(range(6))}
    points({"exflow_placement": [{"grid": seeds}]})
    Path("results").mkdir(exist_ok=True)
    Path("results/box-smoke").symlink_to(disk)
    snakemake("--retries", "0", "--", "points", code=1)
    wanted = [Path(job.record) for job in plan.make("smoke", "box").jobs]
    kept = {path: path.read_bytes() for path in wanted if path.exists()}
    assert 1 < len(kept) < 6 and {record.read(path).status for path in kept} == {"ok"}
    assert any("No space left on device" in log.read_text() for log in (disk / "logs").glob("*.log"))
    subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
    cut = next(iter(kept))
    cut.write_bytes(kept.pop(cut)[:100])
    snakemake("--", "points")
    assert [run.status for run in records()] == ["ok"] * 6
    assert all(path.read_bytes() == old for path, old in kept.items())

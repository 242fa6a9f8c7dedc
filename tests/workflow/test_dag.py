"""The DAG: formatted, linted, resumable, and honest about failures. Points are real processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import smoke_points, wait_for
from typer.testing import CliRunner

from repro.cli import app
from repro.plan import jobs as plan
from repro.records import record
from repro.report import figures

exhaustive = pytest.mark.exhaustive
QUICK = {"method": "affinity", "gpus": [4, 8, 16]}  # three points of one to two seconds


def snakemake(*arguments: str, check: bool = True, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "snakemake", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, **options)
    assert not check or found.returncode == 0, found.stdout + found.stderr
    return found


def targets() -> list[str]:
    return [job.record for job in plan.make("smoke").jobs]


def run_smoke(**options) -> subprocess.CompletedProcess:
    """Its last timer is waited for at the end: of a second, since points of seconds need no longer one."""
    return snakemake("--config", "tier=smoke", "--max-jobs-per-timespan", "300/1s", "--", "points", **options)


def test_slurm_jobs_want_a_profile(project):
    found = snakemake("--config", "platform=box", "--", "zero", check=False)
    assert (
        found.returncode and "platform box: its points are Slurm jobs; submit them with" in found.stdout + found.stderr
    )


@exhaustive
def test_lint_of_slurm_jobs_is_clean(project):
    """`make lint` asks for points as processes."""
    snakemake("--lint", "--config", "platform=box")


@pytest.mark.parametrize(
    ("targets", "notebooks"),
    [
        (["zero", "zero_bytes", "results/laptop/figures/zero_bytes.png"], {"zero": "1"}),
        pytest.param(  # once for the run, and all once for the shipped records
            ["exflow", "flover", "scaling", "replot"],
            dict.fromkeys(figures.NOTEBOOKS, "1") | dict.fromkeys(["exflow", "flover", "scaling"], "2"),
            marks=exhaustive,
        ),
    ],
    ids=["zero", "others"],
)
def test_targets_resolve(project, targets, notebooks):
    text = snakemake("-n", *targets).stdout
    assert dict(re.findall(r"^(\w+)_notebook +(\d+)$", text, re.MULTILINE)) == notebooks


def test_dry_run_agrees_with_the_plan(project):
    text = snakemake("-n", "--config", "tier=smoke").stdout
    found = plan.make("smoke")
    assert re.search(rf"^allocation +{len(found.allocations)}$", text, re.MULTILINE)
    assert sorted(name for each in found.allocations for name in each.jobs) == sorted(job.record for job in found.jobs)


def test_a_job_without_its_plan_says_what_it_needs(project, monkeypatch):
    monkeypatch.delenv("REPRO_PLAN", raising=False)
    found = snakemake("-n", "--mode", "subprocess", "zero", check=False)
    assert found.returncode and "REPRO_PLAN is not set: jobs need the environment" in found.stdout + found.stderr


@exhaustive
def test_a_notebook_takes_the_records_of_what_its_figures_show(project):
    """So an experiment that is configured, and named by a figure of the catalogue, is in the DAG."""
    smoke_points(project, {name: [{"grid": {}}] for name in ("zero_train", "scaling_train", "moe_train")})
    text = snakemake("-n", "--config", "tier=smoke", "--", *figures.NOTEBOOKS).stdout
    inputs = dict(re.findall(r"^(?:local)?rule (\w+)_notebook:\n    input: (.*)$", text, re.MULTILINE))
    assert inputs.keys() == figures.NOTEBOOKS.keys()
    planned = {job.experiment for job in plan.make("smoke").jobs}
    for notebook, files in inputs.items():
        shown = {name for figure in figures.NOTEBOOKS[notebook].figures for name in figures.entry(figure).reads}
        assert {name for name in planned if f"done/{name}-" in files} == shown & planned, notebook


def test_a_wrong_config_option_is_an_error(project):
    found = snakemake("-n", "--config", "teir=smoke", check=False)
    assert found.returncode and "allowed: tier, platform" in found.stdout + found.stderr


def test_an_occasion_that_would_count_for_the_one_before_is_told(project):
    smoke_points(project, {"zero_train": [{"grid": {}, "repeats": 2}]})
    found = snakemake("-n", "--config", "tier=smoke", "occasion=2", "--", "points")
    assert "--occasion 2: 2 points of the first occasion are still to run" in found.stderr


def _edited(path: Path, **changes) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | changes))


def test_the_plan_decides_what_runs_again(project):
    """A single record can be asked for. A point that fails stops no other and is tried again; a record that is truncated
    or of other code is made again; finished ones are left alone."""
    queue, beyond = {"requests": [1, 2, 3], "seeds": 2}, {"method": "contiguous", "train_tokens": 10**9}
    smoke_points(project, {"flover_queue": [{"grid": queue}], "exflow_placement": [{"grid": beyond}]})
    failed, kept, cut, stale = sorted(map(Path, targets()), key=lambda path: (path.parent.name, path.name))
    snakemake("--config", "tier=smoke", "--", str(kept))
    assert record.read(kept).status == "ok" and not any(path.exists() for path in (cut, failed, stale))
    before = kept.read_bytes()
    assert plan.make("smoke").allocations[-1].jobs == [str(path) for path in (cut, stale)]
    run_smoke()
    found = record.read(failed)
    assert (found.status, found.cause, found.attempt) == ("failed", "bad_input", 1)  # the trace has fewer tokens
    cut.write_text(cut.read_text()[:300])
    _edited(stale, provenance=json.loads(stale.read_text())["provenance"] | {"source_hash": "other"})
    run_smoke()
    assert [job.state for job in plan.make("smoke").jobs if job.record != str(failed)] == ["done"] * 3
    assert record.read(failed).attempt == 2 and kept.read_bytes() == before
    report = CliRunner().invoke(app, ["report", "--results", "results/laptop-smoke"])
    assert report.exit_code == 0, report.output
    assert "failed: bad_input" in (project / "results/laptop-smoke/report.html").read_text()


@exhaustive
def test_without_snakemakes_metadata_the_plan_still_decides(project):
    smoke_points(project, {"flover_queue": [{"grid": {"requests": [1, 2], "seeds": 2}}]})
    kept, failed = map(Path, targets())
    run_smoke()
    before = kept.read_bytes()
    _edited(failed, status="failed", cause="oom", metrics={}, evidence=None)
    shutil.rmtree(".snakemake")
    run_smoke()
    assert [job.state for job in plan.make("smoke").jobs] == ["done"] * 2 and kept.read_bytes() == before
    assert "Nothing to be done" in run_smoke().stderr


@exhaustive
@pytest.mark.parametrize("how", ["SIGKILL to the driver", "SIGKILL to everything"])
def test_interrupted_work_resumes(project, how):
    smoke_points(project, {"exflow_placement": [{"grid": QUICK}]})
    wanted = [project / path for path in targets()]
    command = [sys.executable, "-m", "snakemake", "--config", "tier=smoke", "--", "points"]
    driver = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: any(path.exists() for path in wanted), driver)
    family = psutil.Process(driver.pid).children(recursive=True)
    if how == "SIGKILL to the driver":
        driver.kill()
    else:
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait(timeout=60)
    kept = {path: path.read_bytes() for path in wanted if path.exists()}
    for path in kept:
        assert record.read(path).status == "ok"
    run_smoke()
    assert all(record.read(path).status == "ok" for path in wanted)
    assert all(path.read_bytes() == old for path, old in kept.items())
    assert record.collect(project / "results/laptop-smoke/records").problems == []
    _gone, alive = psutil.wait_procs(family, timeout=20)
    assert family and not alive


@exhaustive
def test_a_full_disk_loses_no_finished_record(project):
    smoke_points(project, {"exflow_placement": [{"grid": QUICK | {"seed": [0, 1]}}]})
    disk = project / "results/laptop-smoke"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        found = run_smoke(check=False)
        kept = {path: path.read_bytes() for path in map(Path, targets()) if path.exists()}
        assert found.returncode and "No space left on device" in found.stdout + found.stderr and 0 < len(kept) < 6
        assert {record.read(path).status for path in kept} == {"ok"}
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        run_smoke()
        assert all(record.read(project / name).status == "ok" for name in targets())
        assert all(path.read_bytes() == old for path, old in kept.items())
    finally:
        subprocess.run(["umount", disk], check=True)


@exhaustive
def test_a_killed_rerun_keeps_the_old_record(project):
    smoke_points(project, {"exflow_placement": [{"grid": {"method": "exflow", "gpus": 8, "time_limit_s": 30}}]})
    (target,) = map(Path, targets())
    quick = ["--set", "method=contiguous", "--out", str(target)]
    subprocess.run([sys.executable, "-m", "repro", "run", "exflow_placement", *quick], check=True)
    _edited(target, provenance=json.loads(target.read_text())["provenance"] | {"source_hash": "other"})
    old = target.read_bytes()
    command = [sys.executable, "-m", "snakemake", "--config", "tier=smoke", "--", str(target)]
    driver = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    for line in driver.stderr:
        if "rule point" in line:
            break
    else:
        pytest.fail("nothing ran")
    time.sleep(3)  # the job runs for 30 s
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    assert target.read_bytes() == old


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
def test_a_killed_allocation_goes_on_within_the_same_call(project):
    smoke_points(project, {"exflow_placement": [{"grid": QUICK}]})
    wanted = [project / path for path in targets()]
    command = [sys.executable, "-m", "snakemake", "--config", "tier=smoke", "--", "points"]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(wanted[0].exists, driver)
    first = wanted[0].read_bytes()
    (entry,) = (project / "results/laptop-smoke/running").glob("process-*.json")
    os.kill(int(entry.stem.removeprefix("process-")), signal.SIGKILL)
    assert driver.wait(timeout=120) == 0
    assert all(record.read(path).status == "ok" for path in wanted) and wanted[0].read_bytes() == first


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_killed_rank_is_a_failed_record(project):
    smoke_points(
        project,
        {"zero_train": [{"grid": {"steps": 2000, "plan": "zero3", "fabric": "unshaped", "nodes": 1, "packages": 1}}]},
    )
    (job,) = plan.make("smoke").jobs
    command = [sys.executable, "-m", "repro", "run", *plan.arguments(job), "--out", job.record]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    below = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
    wait_for(lambda: len(below.read_text().split()) >= job.ranks, driver)
    time.sleep(1)  # let training begin
    children = [int(pid) for pid in below.read_text().split()]
    os.kill(children[-1], signal.SIGKILL)
    assert driver.wait(timeout=60) == 1
    found = record.read(project / job.record)
    assert (found.status, found.cause) == ("failed", "node_failure")
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


@exhaustive
@pytest.mark.timeout(900)  # on cores that other tests share
def test_replot_from_the_shipped_records(project):
    """Every figure, verdict and the report from shipped records, on a machine that never ran a point."""
    snakemake("replot")
    for name in figures.FIGURES:
        assert (project / f"results/replot/figures/{name}.png").stat().st_size > 5000
    page = (project / "results/replot/report.html").read_text()
    assert page.count("data:image/webp;base64,") == len(figures.FIGURES)
    rows = json.loads((project / "results/replot/claims.json").read_text())
    assert {row["agreement"] for row in rows} >= {"reproduced", "not run"}
    assert "http://" not in page.replace("http://www.w3.org", "") and len(page) < 8e6

"""`repro reproduce`: one call from points to the summary, and what a person sees of it."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from conftest import smoke_points, wait_for
from typer.testing import CliRunner

from repro import cli, paths
from repro.claims import registry, sides
from repro.cli import console, reproduction, whole
from repro.emulate import netns
from repro.experiments import stored
from repro.plan import jobs as plan
from repro.plan import occasions
from repro.records import provenance, record
from repro.report import figures

COMMAND = [sys.executable, "-m", "repro", "reproduce"]
SHOWN = {name: (each.notebook, each.reads) for name, each in figures.FIGURES.items()}


def call(*arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)


def test_it_runs_what_is_missing_and_says_so_in_a_few_lines(project, monkeypatch):
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "of_a_cluster")  # a user's own, for other work
    smoke_points(project, {"flover_queue": [{"grid": {"requests": [1, 2], "seeds": 2}}]})
    first = call("points", "--tier", "smoke")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "2 of 2 points of tier smoke to run" in first.stdout and "rule allocation" not in first.stdout + first.stderr
    assert f"Done: {project / 'results/laptop-smoke'}" in first.stdout
    assert "rule allocation" in (project / "results/laptop-smoke/snakemake.log").read_text()
    assert all(record.read(project / job.record).status == "ok" for job in plan.make("smoke").jobs)
    assert "0 of 2 points" in call("points", "--tier", "smoke", "--verbose").stdout


def test_what_goes_wrong_is_shown(project):
    smoke_points(project, {"flover_queue": [{"grid": {"requests": 1, "seeds": 2}}]})
    found = call("results/no_such_figure.png", "--tier", "smoke")
    assert found.returncode and "no_such_figure" in found.stderr and "snakemake.log" in found.stderr
    assert "docs/slurm.md" in call("--platform", "box", "--tier", "smoke").stderr


def test_another_occasion_begins_an_hour_later(project):
    """Its runs would count for the occasion before, and nobody would hear of it until the verdicts."""
    made = [plan.make("laptop", occasion=n) for n in (1, 2)]
    first, again = ([job for job in each.jobs if job.experiment == "zero_train"] for each in made)
    path = next(project / job.record for job in first if job.repeat == 1)
    assert len(again) > len(first)
    shipped = paths.root() / made[0].reference / "records/zero_train" / path.name
    document = json.loads(shipped.read_text())
    path.parent.mkdir(parents=True)
    shutil.copy(shipped.with_suffix(".parquet"), path.parent)
    records = {job.record for job in first}
    jobs = [job.model_copy(update={"state": "done"}) if job.record in records else job for job in again]
    found = made[1].model_copy(update={"jobs": jobs})
    for minutes in (59, 61):
        began = datetime.now(UTC) - timedelta(minutes=minutes)
        document["provenance"]["start"] = began.isoformat()
        path.write_text(json.dumps(document))
        allowed = f"{(began + timedelta(hours=1)).astimezone():%H:%M}"
        problem = occasions.problem(found, 2)
        assert (problem == "") == (minutes > 60)
        assert not problem or re.match(f"--occasion 2: too soon: .* allowed from {allowed} on", problem)


def test_another_occasion_of_a_figure_asks_for_the_points_that_it_reads_alone(project):
    """A fresh clone in which only these were run; one of them failed, and may do so each time."""
    first = {job.record for job in plan.make("laptop").jobs}
    again = plan.make("laptop", None, SHOWN, 2)
    found = reproduction._needed(again, "zero_step_time")
    assert {job.experiment for job in found.jobs} == {"zero_train"} and 0 < found.minutes < again.minutes
    assert {job.experiment for job in reproduction._needed(again, "zero").jobs} >= {"zero_train", "zero_plan"}
    states = {job.record: "done" for job in found.jobs if job.record in first}
    states[min(states)] = "failed"
    jobs = [job.model_copy(update={"state": states.get(job.record, job.state)}) for job in found.jobs]
    assert occasions.problem(found.model_copy(update={"jobs": jobs}), 2) == ""
    assert "points of the first occasion are still to run" in occasions.problem(found, 2)
    with pytest.raises(ValueError, match="points of the first occasion are still to run"):
        reproduction.run(again, "zero_step_time", False, 2)
    said = CliRunner().invoke(cli.app, ["plan", "--tier", "laptop", "--occasion", "2", "--keep"])  # as Snakemake asks
    assert not said.exit_code and "points of the first occasion are still to run" in said.stderr
    assert {job.experiment for job in reproduction._needed(again, "zero_plan").jobs} == {"zero_plan"}
    assert reproduction._needed(again, None) == reproduction._needed(again, "points") == again


def test_outdated_are_the_points_of_an_occasion_whose_shipped_records_the_present_code_did_not_make(
    project, monkeypatch, capsys
):
    def those(runs):
        return {path for path in runs if path.parent.name == "sarathi_prefill"}

    monkeypatch.setattr(provenance, "older", those)
    laptop, again = plan.make("laptop"), plan.make("laptop", None, None, 2)
    first, second = reproduction._needed(laptop, "outdated"), reproduction._needed(again, "outdated", 2)
    assert first.jobs == [job for job in laptop.jobs if job.experiment == "sarathi_prefill"] != []
    assert {job.repeat for job in first.jobs} == {0, 1} and {job.repeat for job in second.jobs} == {2, 3}
    assert reproduction._targets(second, "outdated") == [job.record for job in second.jobs]

    monkeypatch.setattr(provenance, "older", lambda runs: set())
    assert reproduction.run(laptop, "outdated", False) == 0  # without a target Snakemake would run everything
    assert "every shipped record of tier laptop, occasion 1, is of the present code" in capsys.readouterr().out
    smoke_points(project, {"exflow_placement": [{"grid": {"method": "exflow", "gpus": 8, "time_limit_s": [61]}}]})
    assert len(reproduction._needed(plan.make("smoke"), "outdated").jobs) == 1  # of which no record is shipped


def test_a_claim_asks_for_the_points_that_its_shipped_runs_have(project, monkeypatch):
    monkeypatch.setattr(stored, "collect", functools.cache(stored.collect))
    laptop, again, full = (plan.make(tier, None, SHOWN, n) for tier, n in (("laptop", 1), ("laptop", 2), ("full", 1)))
    judged = {row.id: row for row in sides.shipped(registry.load()).verdicts}
    for name, found in (("ZT-1.a", laptop), ("ZT-3.a", full), ("FL-F8.b", laptop)):
        mine = reproduction._needed(found, name)
        files, shipped = {Path(job.record).name for job in mine.jobs}, {Path(r).name for r in judged[name].records}
        assert files <= shipped and 0 < mine.minutes < found.minutes, name
        assert reproduction._targets(mine, name) == [job.record for job in mine.jobs]
    one, two = (reproduction._needed(found, "ZT-1.a").jobs for found in (laptop, again))
    assert len(two) == 2 * len(one)
    with pytest.raises(ValueError, match=r"ZT-3\.a: tier laptop lacks .* of the .* points that it reads"):
        reproduction._needed(laptop, "ZT-3.a")
    on_gpu = plan.make("gpu", None, SHOWN)
    assert {job.point.engine for job in reproduction._needed(on_gpu, "FL-F4a.k").jobs} == {"fused", "serial"}
    monkeypatch.setattr(sides, "shipped", lambda claims: sides.read("shipped", project / "none", claims))
    waiting = reproduction._needed(on_gpu, "FL-F4a.k").jobs  # no runs are shipped: all that it may read
    known = [job for job in on_gpu.jobs if job.experiment == "flover_serving"]
    reading = registry.claim("FL-F4a.k").value
    assert waiting == [job for job in known if reading.may_read(dict(job.point))] and len(waiting) < len(known)


@pytest.mark.parametrize("claim, platform", [("ZT-2.c", "frontier"), ("FL-TP.c", "a100"), ("ZT-1.a", "frontier")])
def test_a_plan_for_one_claim_has_the_points_that_it_may_read_alone(project, claim, platform):
    """As Snakemake asks with `--config claim=ID`; on a cluster they are of the paper's size."""
    whole, mine = (
        json.loads(CliRunner().invoke(cli.app, ["plan", "--platform", platform, "--json", *words]).stdout)
        for words in ([], ["--claim", claim])
    )
    reading = registry.claim(claim).value
    assert 0 < len(mine["jobs"]) < len(whole["jobs"]) / 3
    assert all(reading.may_read(job["point"]) for job in mine["jobs"])
    assert {name for each in mine["allocations"] for name in each["jobs"]} == {job["record"] for job in mine["jobs"]}
    assert mine["slurm"]["cost"]["node_hours"] < whole["slurm"]["cost"]["node_hours"]


@pytest.mark.parametrize(
    "target, near", [("zero_bites", "zero_bytes"), ("none", "allowed: "), ("zero_peers", "no point")]
)
def test_an_unknown_target_is_told_before_anything_runs(target, near):
    said = CliRunner().invoke(cli.app, ["reproduce", target, "--tier", "smoke"])
    assert said.exit_code == 2 and target in said.stderr and near in said.stderr and not said.stdout


def test_an_unknown_claim_of_a_plan_is_told():
    said = CliRunner().invoke(cli.app, ["plan", "--claim", "ZT-2.z"])
    assert said.exit_code == 2 and "no claim 'ZT-2.z'" in said.stderr and "allowed: ZT-1.a" in said.stderr


def test_a_claim_and_a_figure_are_answered(project):
    smoke_points(project, {"flover_queue": [{"grid": {"figure": ["fig7", "fig8"]}}]})
    told = call("FL-F7", "--tier", "smoke")
    assert told.returncode == 0, told.stderr
    assert "1 of 1 points of tier smoke to run" in told.stdout and "for FL-F7" in told.stdout
    assert re.search(r"FL-F7 .* yes ", told.stdout) and "repro claims FL-F7" in told.stdout
    drawn = call("flover_model", "--tier", "smoke")
    assert "1 of 2 points of tier smoke to run" in drawn.stdout and re.search(r"FL-F7 .* yes ", drawn.stdout)
    assert (project / "results/laptop-smoke/figures/flover_model.png").exists()
    assert not (project / "results/laptop-smoke/notebooks/flover.html").exists()


def test_a_file_asks_for_what_makes_it(project):
    """Snakemake's rule for a figure's file runs the whole notebook."""
    found = plan.make("smoke", None, SHOWN)
    folder, one = found.results, found.jobs[0].record

    def asked(target):
        return [job.record for job in reproduction._needed(found, target).jobs]

    assert asked(one) == [one]
    assert asked(f"{folder}/figures/zero_loss.png") == asked(f"{folder}/notebooks/zero.html") == asked("zero")
    assert 0 < len(asked("zero")) < len(found.jobs)
    assert asked("replot") == asked("results/replot/figures/zero_loss.png") == asked("results/replot/report.html") == []
    everything = [job.record for job in found.jobs]
    assert asked(f"{folder}/report.html") == asked(f"{folder}/claims.json") == asked("points") == everything


def test_claims_that_wait_for_links_are_those_of_the_points_to_run(project, monkeypatch, capsys):
    monkeypatch.setattr(reproduction.netns, "unavailable", lambda: "no [root]")
    monkeypatch.setattr(reproduction.plan, "unfinished", lambda job: True)
    found = plan.make("laptop")
    waiting = {claim.value.experiment for claim in registry.load() if claim.needs_shaped_links}
    lacking = {}
    for name in [None, *{job.experiment for job in found.jobs}]:
        jobs = [job for job in found.jobs if name in (None, job.experiment)]
        reproduction._announce(found.model_copy(update={"jobs": jobs}), name)
        told = re.search(r"cannot be shaped here \(no \[root\]\): (\d+) claims? ", capsys.readouterr().out)
        lacking[name] = int(told[1]) if told else 0
    assert {name for name in lacking if name and lacking[name]} == waiting & lacking.keys()
    everything = lacking.pop(None)
    assert 0 < max(lacking.values()) < everything == sum(lacking.values())


@pytest.mark.parametrize(("target", "verbose"), [(None, False), ("points", True)])
def test_a_failed_run_has_no_summary(project, monkeypatch, capsys, target, verbose):
    monkeypatch.setattr(reproduction, "_show", lambda watch, snakemake: None)
    fails = [sys.executable, "-c", "import sys; sys.exit(7)"]
    begin = whole.started
    monkeypatch.setattr(reproduction.whole, "started", lambda words, **options: begin(fails, **options))
    assert reproduction.run(plan.make("smoke"), target, verbose) == 7
    said = capsys.readouterr()
    assert "Report:" not in said.out and "arXiv" not in said.out
    assert ("ended with code 7" in said.err) != verbose


def test_points_without_numbers_are_told_at_the_end(project, make_record, capsys):
    smoke_points(project, {"flover_queue": [{"grid": {"requests": [1, 2, 3], "seeds": 2}}]})
    found = plan.make("smoke")
    reproduction._tell_missing(found)
    assert capsys.readouterr().out == ""
    source = provenance.source_hash("repro.experiments.flover_queue")
    nothing = {"metrics": {}, "evidence": None}
    nothing["provenance"] = make_record().provenance.model_copy(update={"source_hash": source})
    ends = [("failed", "oom"), ("skipped", "missing_hardware")]
    for job, (status, cause) in zip(found.jobs[:2], ends, strict=True):
        run = make_record(point=job.point.model_dump(), status=status, cause=cause, **nothing)
        record.write(run, project / job.record)
    reproduction._tell_missing(found)
    said = capsys.readouterr().out
    assert "1 of 3 points failed" in said and "1 of 3 points were skipped" in said


def test_folders_are_shown_as_they_are_called(project, capsys):
    found = plan.make("smoke").model_copy(update={"results": "results/[red]"})
    reproduction._answer(found, "flover_model")
    said = capsys.readouterr().out
    assert "Figure:" in said and "--results results/[red]" in said and "/[red]/figures/flover_model.png" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_program_is_started_ends_it(monkeypatch, heard, number):
    """It comes before anybody could know the program."""
    begun = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            begun.append(self)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(whole.subprocess, "Popen", Interrupted)
    with pytest.raises(SystemExit) as ended, whole.started([sys.executable, "-c", "import time; time.sleep(60)"]):
        pytest.fail("went on")
    assert ended.value.code == 128 + number and begun[0].poll() is not None


@pytest.fixture
def heard():
    """SIGHUP is not ignored, as it is where the tests run behind nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_behind_nohup_a_closed_terminal_ends_nothing(heard):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with whole.started([sys.executable, "-c", "import sys; sys.exit(7)"]) as program:
        os.kill(os.getpid(), signal.SIGHUP)
        assert program.wait() == 7


def test_a_program_that_hears_nothing_is_killed(monkeypatch):
    monkeypatch.setattr(whole, "_HEARING_S", 0.3)
    monkeypatch.setattr(whole, "_PATIENCE_S", 0.3)
    code = "import signal, time\nfor each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, signal.SIG_IGN)\n"
    words = [sys.executable, "-c", f"{code}print(1, flush=True)\ntime.sleep(60)"]
    with pytest.raises(SystemExit), whole.started(words, stdout=subprocess.PIPE) as program:
        program.stdout.readline()  # it is deaf now
        sys.exit(3)
    assert program.poll() == -signal.SIGKILL


def test_parents_are_asked_to_end_before_what_they_have_started(monkeypatch):
    """A point whose `ip` ended first would take its network down, and be interrupted at that."""
    code = "import subprocess as s, sys, time; depth, code = int(sys.argv[1]), sys.argv[2]\n"
    code += "for _ in range(2 if depth else 0): s.Popen([sys.executable, '-c', code, str(depth - 1), code])\n"
    code += "time.sleep(60)"
    asked, send_signal = [], psutil.Process.send_signal

    def noted(process, number):
        asked.append(process.pid)
        send_signal(process, number)

    monkeypatch.setattr(psutil.Process, "send_signal", noted)
    words = [sys.executable, "-c", code, "3", code]
    with pytest.raises(SystemExit), whole.started(words, stderr=subprocess.DEVNULL) as top:
        wait_for(lambda: len(psutil.Process(top.pid).children(recursive=True)) >= 14, top)
        parents = {one.pid: one.ppid() for one in psutil.Process(top.pid).children(recursive=True)}
        sys.exit(0)
    assert asked[0] == top.pid and set(asked[1:]) == set(parents)
    assert all(asked.index(parent) < asked.index(pid) for pid, parent in parents.items())


def test_another_occasion_needs_the_first(project):
    """In a fresh clone both would run together, and count as one."""
    refused = CliRunner().invoke(cli.app, ["reproduce", "--occasion", "3"])
    assert refused.exit_code and "points of the first occasion are still to run" in refused.stderr
    assert "without --occasion" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_keeps_what_is_done_and_leaves_nothing_running(project, number):
    """Ctrl-C reaches every process of the terminal; `kill` the driver alone."""
    smoke_points(project, {"exflow_placement": [{"grid": {"method": "exflow", "gpus": 8, "time_limit_s": [0.1, 60]}}]})
    first, second = (project / job.record for job in plan.make("smoke").jobs)
    driver = subprocess.Popen([*COMMAND, "points", "--tier", "smoke"], start_new_session=True, stderr=subprocess.PIPE)
    wait_for(first.exists, driver)
    if number == signal.SIGINT:
        beside = call("points", "--tier", "smoke")
        assert beside.returncode and "laptop-smoke: another `repro reproduce` runs here" in beside.stderr
    (os.killpg if number == signal.SIGINT else os.kill)(driver.pid, number)
    said = driver.communicate(timeout=60)[1].decode()
    assert driver.returncode == 128 + number and "what is finished stays" in said
    assert first.exists() and not second.exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(driver.pid, 0)


def networks_of(driver):
    """Namespaces of the ranks of its points: their names have the pid of the point."""
    pids = {each.pid for each in psutil.Process(driver.pid).children(recursive=True)}
    return {path for pid in pids for path in Path("/run/netns").glob(f"repro-{pid}-*")}


@pytest.mark.slow
@pytest.mark.skipif(bool(netns.unavailable()), reason="links cannot be shaped here")
@pytest.mark.parametrize("kill", [os.killpg, pytest.param(os.kill, marks=pytest.mark.exhaustive)])
def test_a_kill_takes_the_emulated_network_down(project, kill):
    """As `timeout` kills, the whole group, or the driver alone."""
    smoke_points(project, {"zero_train": [{"grid": {"steps": 2000}}]})
    driver = subprocess.Popen([*COMMAND, "points", "--tier", "smoke"], start_new_session=True)
    wait_for(lambda: len(networks_of(driver)) >= 8, driver)
    networks = networks_of(driver)
    kill(driver.pid, signal.SIGTERM)
    assert driver.wait(60) == 128 + signal.SIGTERM
    assert not any(path.exists() for path in networks)


@pytest.mark.slow
def test_a_second_run_is_refused_while_what_a_killed_driver_has_left_goes_on(project):
    smoke_points(project, {"exflow_placement": [{"grid": {"method": "exflow", "gpus": 8, "time_limit_s": 60}}]})
    driver = subprocess.Popen([*COMMAND, "points", "--tier", "smoke"], start_new_session=True)
    log = project / "results/laptop-smoke/snakemake.log"
    wait_for(lambda: log.exists() and "rule allocation" in log.read_text(), driver)
    left = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    assert "another `repro reproduce` runs here" in call("points", "--tier", "smoke").stderr
    os.killpg(driver.pid, signal.SIGKILL)  # those others
    psutil.wait_procs(left, 30)
    with reproduction._alone(log):
        pass


def test_the_summary_names_every_paper_and_compares_with_the_shipped(monkeypatch, capsys):
    monkeypatch.setattr(console.stdout, "width", console.OF_FILES)  # narrower ones fold titles: tests/cli/test_cli.py
    found = plan.make("laptop")
    reproduction._summarise(found.model_copy(update={"results": found.reference}))
    said = capsys.readouterr().out
    papers, primary = registry.papers(), [claim for claim in registry.load() if claim.primary]
    assert said.count("arXiv") == len(papers) and len(said.splitlines()) < len(primary) + len(papers) + 10
    told = re.search(r"(\d+) of (\d+) claims agree\. ", said)
    assert told and int(told[1]) == int(told[2]) > 50
    assert all(claim.id in said for claim in primary)

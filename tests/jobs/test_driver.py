"""One driver at a time, plans that no later call disturbs, and Slurm's answers as they come."""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import snakemake_executor_plugin_slurm as plugin
from snakemake.exceptions import WorkflowError

from repro import paths
from repro.cli import planned
from repro.jobs import allocation, driver, journal, queue, srun
from repro.jobs.queue import JobState, QueueError
from repro.plan import jobs as plan
from repro.records import record
from repro.records.record import Cause


@pytest.fixture
def answers(project, monkeypatch):
    """What Slurm says: a text, or an exception, by the first words of the question."""
    said = {}

    def say(*command, timeout_s=60):
        for words, answer in said.items():
            if " ".join(command).startswith(words):
                if isinstance(answer, list):
                    answer = answer.pop(0)
                if isinstance(answer, Exception):
                    raise answer
                return answer
        raise AssertionError(command)

    monkeypatch.setattr(queue, "_said", say)
    monkeypatch.setattr(journal, "LATE_FILES_S", 0)
    monkeypatch.setattr(queue, "_PAUSES_S", (0.0, 0.0))
    return said


@pytest.fixture
def file(tmp_path):
    return tmp_path / "driver.json"


def test_a_second_driver_is_refused(file):
    refused = pytest.raises(driver.DriverError, match="another snakemake drives these jobs")
    with driver._alone(file), refused, driver._alone(file):
        pass
    with driver._alone(file):
        pass


def test_jobs_that_an_interrupted_snakemake_left_are_cancelled_when_it_ends(answers, monkeypatch, capsys):
    """It forgets its jobs while it asks for their states: of them nobody would hear."""
    asked, said = [], queue._said
    monkeypatch.setattr(queue, "_said", lambda *command, **how: (asked.append(command), said(*command, **how))[1])
    answers["squeue"] = ["", f"7|{paths.root()}|rule_allocation_wildcards_x_1\n"]
    answers["scancel"] = ""
    driver.drive("results/x", io.StringIO("settle\n"))
    assert ("scancel", "7") in asked and "jobs that Snakemake has left in the queue: 7" in capsys.readouterr().err
    assert any(word.startswith("--states=PENDING") for word in asked[-2])  # those that end by themselves are let be


def test_a_job_that_is_ending_is_waited_for(answers, monkeypatch):
    """The retry of a job whose node died starts while that one is COMPLETING."""
    monkeypatch.setattr(srun.time, "sleep", lambda seconds: None)
    answers["squeue"] = ["COMPLETING|None\n", "COMPLETING|None\n", "NODE_FAIL|None\n"]
    assert srun._over("5", 60)
    answers["squeue"] = "COMPLETING|None\n"
    assert not srun._over("5", 0)


def test_a_point_is_begun_only_where_its_start_fits_too():
    steps = object.__new__(srun.JobSteps)
    steps.slurm, steps.reserve_s = SimpleNamespace(start_minutes=2.0), 0.0
    steps.facts = SimpleNamespace(ends_at=datetime.now(UTC) + timedelta(minutes=9))
    assert steps.has_time(6.5) and not steps.has_time(7.5)


@pytest.mark.exhaustive
def test_a_step_is_ended_where_slurm_does_not_obey(answers):
    """srun ignores the signal, and scancel fails, as it does for a step that has just ended."""
    steps = object.__new__(srun.JobSteps)
    steps.job_id, answers["squeue"], answers["scancel"] = "5", "5.0\n", QueueError("scancel: Invalid job id")
    words = ["sh", "-c", "trap '' TERM; echo; while :; do sleep 1; done"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as step:
        assert step.stdout.readline() == b"\n"
        steps._end(step)
        assert step.returncode == -signal.SIGKILL


def test_a_driver_that_cannot_cancel_still_settles(answers, monkeypatch, capsys):
    answers["squeue"], settled = ["", *[QueueError("Socket timed out")] * 3], []
    monkeypatch.setattr(driver, "settle", settled.append)
    driver.drive("results/x", io.StringIO("settle\n"))
    said = capsys.readouterr()
    assert settled == ["results/x"] * 2 and said.out == "driving\n" and "Socket timed out" in said.err


def test_a_driver_ends_with_who_started_it(project, monkeypatch):
    (project / "bin").mkdir()
    (project / "bin/squeue").write_text("#!/bin/sh\n")
    (project / "bin/squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{project}/bin:{os.environ['PATH']}")
    rules = workflow_rules(PLAN={"results": "results/x"})
    rules["drive"]()
    (process,) = rules["DRIVERS"]
    with pytest.raises(WorkflowError):  # a second one
        workflow_rules(PLAN={"results": "results/x"})["drive"]()
    rules["DRIVERS"].clear()
    process.stdin.close()
    assert process.wait(30) == 0
    with driver._alone(project / "results/x/slurm/driver.json"):
        pass


def test_a_driver_that_lives_says_so(file, monkeypatch):
    """Else a second host would take it for dead, and submit its jobs again."""
    monkeypatch.setattr(driver, "_BEAT_S", 0.02)
    with driver._alone(file):
        os.utime(file, (0, 0))
        deadline = time.monotonic() + 30
        while file.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_jobs_of_an_earlier_driver_that_do_not_end_are_named(answers, monkeypatch):
    monkeypatch.setattr(driver, "_PATIENCE_S", 0)
    answers["squeue"] = "COMPLETING|None\n"
    with pytest.raises(driver.DriverError, match="jobs 7, 8 were cancelled and have not ended yet"):
        driver._wait_for(["7", "8"])


def test_a_run_ends_when_its_driver_does(monkeypatch, capsys):
    ended = []
    rules = workflow_rules()
    monkeypatch.setattr(rules["os"], "kill", lambda *arguments: ended.append(arguments))
    process = subprocess.Popen(["false"])
    rules["DRIVERS"].append(process)
    rules["end_with"](process)
    assert ended == [(os.getpid(), signal.SIGTERM)] and "start it again" in capsys.readouterr().err


def workflow_rules(**given):
    """Functions of the workflow."""
    rules = {"WorkflowError": WorkflowError, **given}
    exec((paths.root() / "workflows/rules/slurm.smk").read_text(), rules)
    return rules


@pytest.mark.parametrize("locks", [True, False])
def test_a_driver_on_another_host(file, monkeypatch, locks):
    """Its lock may not reach here; what it says in the file does, while it is fresh."""
    if not locks:
        monkeypatch.setattr(driver.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError("no locks here")))
    file.write_text(json.dumps({"host": "login2", "pid": 7}))
    with pytest.raises(driver.DriverError, match="process 7 on login2"), driver._alone(file):
        pass
    old = time.time() - driver._DEAD_S - 1
    os.utime(file, (old, old))
    with driver._alone(file):
        assert json.loads(file.read_text())["pid"] == os.getppid()
    assert file.read_text() == ""


def test_a_driver_of_this_host_counts_where_there_are_no_locks(file, monkeypatch):
    monkeypatch.setattr(driver.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError("no locks here")))
    file.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
    with pytest.raises(driver.DriverError, match=f"process {os.getpid()} on"), driver._alone(file):
        pass
    ended = subprocess.Popen(["true"])
    ended.wait()
    file.write_text(json.dumps({"host": socket.gethostname(), "pid": ended.pid}))
    with driver._alone(file):
        pass


def test_jobs_that_an_earlier_driver_left_are_those_of_points_and_readers(project, answers):
    names = ("allocation_wildcards_x_zero-1", "html_report_wildcards_x", "zero_notebook_wildcards_x")
    others = ("html_report_wildcards_x-full", "allocation_wildcards_y_x", "points")
    lines = [f"{number}|{project}|rule_{name}" for number, name in enumerate((*names, *others))]
    answers["squeue"] = "\n".join(lines)
    assert queue.jobs_of(project, driver._COMMENT.format("x")) == ["0", "1", "2"]
    assert "rule allocation:" in (paths.root() / "workflows/rules/points.smk").read_text()


def test_each_call_has_a_plan_of_its_own(project):
    first, second = planned.keep("one"), planned.keep("two")
    assert first != second and (project / first).read_text() == "one"


def test_what_slurm_cannot_answer_for_the_moment_is_asked_again(answers):
    answers["squeue"] = [
        QueueError("Unable to contact slurm controller"),
        QueueError("Socket timed out"),
        "RUNNING|None\n",
    ]
    assert queue.state("5") == JobState("RUNNING", "None")
    answers["squeue"] = [QueueError("Unable to contact slurm controller")] * 3
    with pytest.raises(QueueError):
        queue.state("5")


def test_a_job_that_squeue_has_forgotten(answers):
    answers["squeue"] = QueueError("slurm_load_jobs error: Invalid job id specified")
    answers["sacct"] = "CANCELLED by 0|None\n"
    assert queue.state("5") == JobState("CANCELLED", "None")
    answers["sacct"] = QueueError("Slurm accounting storage is disabled")
    assert queue.state("5") == JobState("") and queue.state("5").over
    answers["sacct"] = QueueError("Error connecting to slurmdbd")  # an outage says nothing of the job
    with pytest.raises(QueueError):
        queue.state("5")


def entry(attempt=1):
    (job,) = (job for job in plan.make("smoke").jobs if job.experiment == "flover_queue" and job.point.requests == 1)
    values = job.model_dump(include={"record", "experiment", "point", "repeat"})
    running = journal.Running(**values, attempt=attempt, since="2026-01-01T00:00:00Z", log="none.log")
    return journal.Entry(job_id="5", allocation="a", nodes="node1", running=running)


def test_a_dead_jobs_point_gets_its_cause_when_slurm_can_tell(answers, capsys):
    journal.write("results/x", entry())
    (left := paths.root() / "results/x" / journal.WHERE / "5-step").mkdir(parents=True)
    answers["squeue"] = QueueError("slurm_load_jobs error: Invalid job id specified")
    answers["sacct"] = QueueError("Error connecting to slurmdbd")
    driver.settle("results/x")
    assert len(journal.entries("results/x")) == 1 and "slurmdbd" in capsys.readouterr().err
    answers["sacct"] = "NODE_FAIL|None\n"
    driver.settle("results/x")
    found = record.read(paths.root() / entry().running.record)
    assert found.cause is Cause.NODE_FAILURE and found.provenance.slurm["SLURM_JOB_ID"] == "5"
    assert not journal.entries("results/x") and not left.exists()


def test_an_allocation_of_which_a_job_lives_is_not_begun_again(answers):
    steps = object.__new__(srun.JobSteps)
    steps.plan, steps.job_id, steps.reserve_s = SimpleNamespace(results="results/x"), "9", 0.0
    steps.allocation = SimpleNamespace(name="a", expected=3.0)
    steps.facts = SimpleNamespace(ends_at=datetime.now(UTC) + timedelta(minutes=5))
    journal.write("results/x", entry())
    answers["squeue"] = "RUNNING|None\n"
    with pytest.raises(ValueError, match="allocation a: job 5 is running it"):
        steps.__enter__()
    assert journal.entries("results/x")
    answers["squeue"] = "NODE_FAIL|None\n"
    steps.__enter__()
    assert record.read(paths.root() / entry().running.record).cause is Cause.NODE_FAILURE


def test_an_entry_of_an_experiment_that_is_gone_is_dropped(answers, capsys):
    gone = entry()
    assert gone.running is not None
    journal.write(
        "results/x", gone.model_copy(update={"running": gone.running.model_copy(update={"experiment": "gone"})})
    )
    answers["squeue"] = "CANCELLED|None\n"
    driver.settle("results/x")
    assert "unknown experiment 'gone'" in capsys.readouterr().err and not journal.entries("results/x")


def test_filters_that_a_user_has_set_for_squeue_hide_no_job(monkeypatch):
    monkeypatch.setenv("SQUEUE_PARTITION", "another")
    monkeypatch.setenv("SQUEUE_ALL", "1")
    told = queue._said("env")
    assert "SQUEUE_PARTITION" not in told and "SQUEUE_ALL=1" in told


def test_the_accounting_is_asked_for_steps_once(answers):
    answers["sacct"] = [QueueError("Connection refused"), "0|COMPLETED|00:00:01|0:0||\n"]
    assert queue.step_reports("5") == {} and len(answers["sacct"]) == 1


def test_a_later_record_is_left_alone(answers, make_record):
    """A job that is seen to be dead late, after another one has run its point."""
    journal.write("results/x", entry())
    answers["squeue"] = "CANCELLED|None\n"
    path = paths.root() / entry().running.record
    record.write(make_record(attempt=2, point=entry().running.point), path)
    before = path.read_bytes()
    driver.settle("results/x")
    assert path.read_bytes() == before and not journal.entries("results/x")


def test_a_record_that_is_shown_late_is_kept(answers, make_record, monkeypatch):
    """By a file system of several hosts, after its job is over."""
    monkeypatch.setattr(journal, "LATE_FILES_S", 30)
    journal.write("results/x", entry())
    answers["squeue"] = "NODE_FAIL|None\n"
    path = paths.root() / entry().running.record
    monkeypatch.setattr(
        journal.time, "sleep", lambda seconds: record.write(make_record(point=entry().running.point), path)
    )
    driver.settle("results/x")
    assert record.read(path).status == "ok" and not journal.entries("results/x")


def test_what_is_finished_is_told_by_the_file_and_not_by_clocks(answers, make_record):
    running = entry().running
    path = paths.root() / running.record
    record.write(make_record(point=running.point), path)
    late = running.model_copy(update={"since": record.read(path).provenance.start + timedelta(hours=1)})
    assert journal.finished(late) == record.read(path)
    again = late.model_copy(update={"replaces": journal.file_of(running.record)})
    assert journal.finished(again) is None, "it was there before"
    record.write(make_record(point=running.point), path)
    assert journal.finished(again) == record.read(path)
    assert journal.finished(again.model_copy(update={"attempt": 2})) is None


@pytest.mark.parametrize(
    ("status", "cause", "hours_after_plan", "attempt"),
    [
        ("ok", None, 1, None),
        ("failed", "bad_input", 1, None),  # this driver's: it would fail again
        ("failed", "bad_input", -1, 2),  # an earlier driver's: as every failed point, it is tried again
        ("failed", "preempted", 1, 2),
    ],
)
def test_which_points_a_job_runs(project, make_record, monkeypatch, status, cause, hours_after_plan, attempt):
    (job,) = (job for job in plan.make("smoke").jobs if job.experiment == "flover_queue" and job.point.requests == 1)
    found = make_record()
    source = plan.provenance.source_hash("repro.experiments.flover_queue")
    changes = {
        "point": job.point.model_dump(),
        "provenance": found.provenance.model_copy(update={"source_hash": source}),
        "status": status,
        "cause": cause,
    }
    record.write(make_record(**changes | ({"metrics": {}, "evidence": None} if cause else {})), Path(job.record))
    planned = found.provenance.start - timedelta(hours=hours_after_plan)
    assert allocation._attempt(job, planned, here=True) == attempt


def test_ends_that_the_plugin_would_not_hear_of(monkeypatch):
    """It would wait for ever for a job that stays PREEMPTED or was cancelled by somebody, forget all jobs when Slurm
    cannot tell, and give up all nodes of a job of which one failed."""
    said = {"1": "PREEMPTED", "2": "RUNNING"}

    async def ask(*arguments):
        return (dict(said), 0.1) if said else (None, None)

    monkeypatch.setattr(plugin, "query_job_status", ask)
    rules = workflow_rules()
    clock = SimpleNamespace(now=0.0)
    rules["time"] = SimpleNamespace(monotonic=lambda: clock.now)
    rules["hear_of_ends"](False)

    def told():
        return asyncio.run(plugin.query_job_status("", None))[0]

    assert told() == said
    clock.now = rules["PREEMPTED_S"]
    assert told() == {"1": "CANCELLED", "2": "RUNNING"}
    said |= {"1": "PENDING", "2": "CANCELLED by 1000", "3": "NODE_FAIL"}
    assert told() == {"1": "PENDING", "2": "CANCELLED", "3": "FAILED"}
    said.clear()
    assert told() == {}  # nothing of any job: each is asked for again


def test_where_slurm_runs_jobs_again_it_is_left_to_do_so(monkeypatch):
    async def ask(*arguments):
        return {"1": "PREEMPTED", "2": "NODE_FAIL"}, 0.1

    monkeypatch.setattr(plugin, "query_job_status", ask)
    rules = workflow_rules()
    clock = SimpleNamespace(now=0.0)
    rules["time"] = SimpleNamespace(monotonic=lambda: clock.now)
    rules["hear_of_ends"](True)
    for _ in range(2):
        assert asyncio.run(plugin.query_job_status("", None))[0] == {"1": "PREEMPTED", "2": "REQUEUED"}
        clock.now += 10 * rules["PREEMPTED_S"]

"""Why a step or a job left no record, from what can be seen afterwards."""

import json

import pytest

from repro.jobs import causes
from repro.jobs.queue import JobState
from repro.records.record import Cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("slurmstepd: error: Step 3.0 exceeded memory limit (900 > 300), being killed", Cause.OOM),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.", Cause.OOM),
        ("[rank3]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)", Cause.COMM_HANG),
        ("srun: error: node1: tasks 0-3: Out Of Memory", Cause.OOM),
        ("*** STEP 7.0 ON node1 CANCELLED AT 2026 ***\nsrun: error: node1: tasks 0-7: Killed", Cause.NODE_FAILURE),
        (
            "*** STEP 7.0 ON node1 CANCELLED AT 2026 ***\nsrun: error: node1: tasks 0,2-7: Exited with exit code 1",
            Cause.UNEXPECTED,
        ),
        (
            "srun: error: Task launch for StepId=3.1 failed on node node2: Communication connection failure",
            Cause.NODE_FAILURE,
        ),
        ("slurmstepd: error: Detected 1 oom_kill event" + 9999 * "\nmore", Cause.OOM),
        ("srun: error: Node failure on node2\nsrun: error: node1: task 0: Killed", Cause.NODE_FAILURE),
        ("slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026 DUE TO TIME LIMIT ***", Cause.TIMEOUT),
        ("slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026 DUE TO PREEMPTION ***", Cause.PREEMPTED),
        ("slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-22T10:00:00 ***", Cause.CANCELLED),
        ("*** STEP 7.0 ON node1 CANCELLED AT 2026 ***\nsrun: error: node1: task 3: Killed", Cause.NODE_FAILURE),
        (
            "*** STEP 7.0 ON node1 CANCELLED AT 2026 ***\nsrun: error: node1: task 3: Exited with exit code 3",
            Cause.UNEXPECTED,
        ),
        ("Traceback (most recent call last): something else", Cause.UNEXPECTED),
        (None, Cause.UNEXPECTED),
    ],
)
def test_of_a_log(tmp_path, text, cause):
    log = tmp_path / "step.log"
    if text is not None:
        log.write_text(text)
    found, detail = causes.of_step(log, tmp_path, 8, exit_code=1)
    assert found is cause and "exit code 1" in detail and (text or "")[-5000:] in detail


@pytest.mark.parametrize(("blocked", "cause"), [([0, 1], Cause.COMM_HANG), ([0], Cause.TIMEOUT), ([], Cause.TIMEOUT)])
def test_of_late_ranks(tmp_path, blocked, cause):
    for rank in (0, 1):
        told = {"rank": rank, "after_s": 9.0, "stack": f"stack of {rank}", "blocked": rank in blocked}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(told))
    found, detail = causes.of_step(tmp_path / "none.log", tmp_path, 4, exit_code=124)
    assert found is cause and "2 of 4 ranks were not done after 9 s" in detail and "stack of 1" in detail


def test_a_step_that_was_ended_for_its_time(tmp_path):
    found, detail = causes.of_step(tmp_path / "none.log", tmp_path, 4, exit_code=None)
    assert found is Cause.TIMEOUT and "not done in its time" in detail


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("TIMEOUT", Cause.TIMEOUT),
        ("OUT_OF_MEMORY", Cause.OOM),
        ("NODE_FAIL", Cause.NODE_FAILURE),
        ("PREEMPTED", Cause.PREEMPTED),
        ("CANCELLED", Cause.CANCELLED),
        ("FAILED", Cause.UNEXPECTED),
        ("", Cause.UNEXPECTED),
    ],
)
def test_of_a_job(tmp_path, state, cause):
    found, detail = causes.of_job(JobState(state), tmp_path / "none.log", restarted=False)
    assert found is cause and (state or "not known to Slurm") in detail


def test_of_a_job_that_began_anew(tmp_path):
    assert causes.of_job(JobState("RUNNING"), tmp_path / "none.log", restarted=True)[0] is Cause.PREEMPTED


def test_a_late_rank_whose_words_got_lost(tmp_path):
    assert causes.of_step(tmp_path / "none.log", tmp_path, 4, exit_code=124)[0] is Cause.TIMEOUT


@pytest.mark.parametrize(("exit_code", "end"), [(3, "exit code 3"), (-9, "SIGKILL"), (-37, "signal 37")])
def test_of_a_process(tmp_path, exit_code, end):
    """Real-time signals between the first and the last have no names."""
    assert f"ended by {end} " in causes.of_process(exit_code, tmp_path / "none.log")[1]

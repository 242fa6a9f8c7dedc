"""An allocation of local processes: what happens to one point costs that point alone, and nothing finished is lost."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from conftest import wait_for

from repro.emulate import netns, owners
from repro.experiments.base import Experiment
from repro.jobs import allocation, forks, journal, runner
from repro.plan import config, packing
from repro.plan import jobs as plan
from repro.records import provenance, record
from repro.topology import Level, Topology

RESULTS = "results/forks"


def planned(experiment="flover_queue", **grid):
    """A plan with one allocation, and the records it should leave."""
    jobs = plan._jobs(experiment, config.Grid(grid=grid), RESULTS, {}, "test")
    allocations = packing.pack(jobs, config.Packing(pack_minutes=1000))
    found = plan.make("smoke").model_copy(update={"results": RESULTS, "jobs": jobs, "allocations": allocations})
    return found, [Path(job.record) for job in jobs]


def run(found):
    return allocation.run(found, found.allocations[0], config.load("smoke")[1])


def die_of(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


def deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # as native code that never returns to Python
    time.sleep(60)


FAULTS = {
    "node_failure": lambda: die_of(signal.SIGKILL),
    "unexpected": lambda: die_of(signal.SIGSEGV),
    "oom": lambda: bytearray(1 << 62),
    "timeout": deaf,
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_costs_its_point_alone(project, monkeypatch, cause):
    honest = Experiment.run
    monkeypatch.setattr(Experiment, "run", lambda self, p: FAULTS[cause]() if p.requests == 2 else honest(self, p))
    monkeypatch.setattr(Experiment, "timeout_s", 10.0)
    monkeypatch.setattr(runner, "_DEAF_S", 0.5)
    if cause == "timeout":
        monkeypatch.setattr(runner, "seconds_left", lambda limit: 1.0 if limit else limit)
    here, asked = os.getpid(), provenance.gpus  # a fork of a process that has asked its GPUs cannot use them
    monkeypatch.setattr(provenance, "gpus", lambda: pytest.fail("asked here") if os.getpid() == here else asked())
    found, paths = planned(requests=[1, 2, 3], seeds=2)
    assert run(found) == []
    runs = [record.read(path) for path in paths]
    assert [(r.status, r.cause) for r in runs] == [("ok", None), ("failed", cause), ("ok", None)], runs[1].detail
    assert not journal.entries(RESULTS)


def test_where_nodes_are_gone_the_next_job_gets_what_has_no_record(project, monkeypatch):
    found, paths = planned(requests=[1, 2, 3, 4], seeds=2)
    assert run(found) == []
    for path in (paths[1], paths[3]):
        path.unlink()
    monkeypatch.setattr(forks.Forks, "goes_on", lambda self, cause: False)
    assert run(found) == [str(paths[3])]


def test_what_a_killed_allocation_was_running_is_told_until_the_next_begins(project, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, os.getppid()):
        journal.write(RESULTS, journal.Entry(job_id=f"process-{pid}", allocation="a"))
    found, _ = planned(requests=[1], seeds=2)
    assert run(found) == []
    assert [entry.job_id for entry in journal.entries(RESULTS)] == [f"process-{os.getppid()}"]


def test_an_entry_that_cannot_be_read_now_stays(project, monkeypatch):
    journal.write(RESULTS, journal.Entry(job_id="5", allocation="a"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: (_ for _ in ()).throw(OSError("stale file handle")))
        assert journal.entries(RESULTS) == []
    assert [entry.job_id for entry in journal.entries(RESULTS)] == ["5"]
    for damaged in (b"{", b"\xff\x00"):
        (journal.folder(RESULTS) / "5.json").write_bytes(damaged)
        assert journal.entries(RESULTS) == [] and not (journal.folder(RESULTS) / "5.json").exists()


IN_A_FORK = """
import os, signal, time
from repro.jobs import forks

os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))
if {told}:
    forks._tell_forks()
signal.signal(signal.SIGINT, forks._interrupted_once)
try:
    if os.fork() == 0:
        os._exit(0)
    time.sleep(2)
    print("went on")
except KeyboardInterrupt:
    print("heard")
"""


@pytest.mark.parametrize(("told", "found"), [(True, "heard"), (False, "went on")])
def test_an_interrupt_that_lands_in_a_fork_of_the_point_itself_is_heard(told, found):
    """Else its networks stay, as it is ended without cleaning up a while later."""
    said = subprocess.run(
        [sys.executable, "-c", IN_A_FORK.format(told=told)], capture_output=True, text=True, timeout=60
    )
    assert said.stdout.strip() == found, said.stderr


@pytest.mark.xdist_group("network")
@pytest.mark.skipif(bool(netns.unavailable()), reason="links cannot be shaped here")
def test_a_network_whose_removal_was_interrupted_goes_with_its_point(project, monkeypatch):
    topology = Topology((Level("package", 2, 1e8), Level("node", 1, 1e7), Level("cluster", 1, 1e6)))
    remove = netns.remove

    def interrupted(namespaces):
        monkeypatch.setattr(netns, "remove", remove)
        os.kill(os.getpid(), signal.SIGINT)

    def shaped(self, point):
        with netns.Fabric(topology) as fabric:
            Path("names").write_text(" ".join(fabric.namespaces()))
            monkeypatch.setattr(netns, "remove", interrupted)

    monkeypatch.setattr(Experiment, "run", shaped)
    found, _ = planned(requests=[1], seeds=1)
    run(found)
    names = Path("names").read_text().split()
    assert len(names) == 3 and not any(map(netns.present, names))
    assert not any(name in path.read_text() for path in owners.RECORDS.iterdir() for name in names)


def test_a_point_without_memory_for_a_thread_ends(project, monkeypatch):
    """The thread ends before it says that it began: Python then waits for that word without a limit."""
    monkeypatch.setattr(forks.threading.Thread, "_bootstrap", lambda thread: None)
    monkeypatch.setattr(forks, "_START_S", 1)
    found, (path,) = planned(requests=[1], seeds=2)
    assert run(found) == []
    assert record.read(path).cause == "unexpected" and "SIGALRM" in record.read(path).detail


def test_points_do_not_share_state(project, monkeypatch):
    """A point that changes its process leaves the next one as it was."""
    honest, here = Experiment.run, os.getpid()

    def changing(self, point):
        assert os.environ.get("SPOILT") is None and os.getppid() == here
        os.environ["SPOILT"] = "yes"
        return honest(self, point)

    monkeypatch.setattr(Experiment, "run", changing)
    found, paths = planned(requests=[1, 2], seeds=2)
    run(found)
    assert [record.read(path).status for path in paths] == ["ok", "ok"]


def test_two_drivers_run_each_point_once(project, monkeypatch):
    honest = Experiment.run

    def noted(self, point):
        with Path("runs.txt").open("a") as file:
            file.write(f"{point.requests}\n")
        time.sleep(0.3)
        return honest(self, point)

    monkeypatch.setattr(Experiment, "run", noted)
    found, paths = planned(requests=[1, 2, 3, 4], seeds=2)
    drivers = [multiprocessing.get_context("fork").Process(target=run, args=(found,)) for _ in range(2)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join(60)
    assert [driver.exitcode for driver in drivers] == [0, 0]
    assert Counter(Path("runs.txt").read_text().split()) == Counter("1234")
    assert all(plan.state(path)[0] == "done" for path in paths)


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interrupt_that_lands_in_a_fork_is_heeded_at_once(project, monkeypatch, number, ends):
    """Python drops what a handler raises there, and the point that has just been forked hears of no signal."""
    start = multiprocessing.context.ForkProcess.start

    def interrupted(process):
        start(process)
        with contextlib.suppress(ends):
            signal.raise_signal(number)

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", interrupted)
    monkeypatch.setattr(Experiment, "run", lambda self, point: time.sleep(60))
    found, (path,) = planned(requests=[1], seeds=2)
    with pytest.raises(ends):
        run(found)
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(number, marks=pytest.mark.exhaustive) for number in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_an_ended_worker_leaves_what_is_finished_and_no_process(project, number):
    found, paths = planned("exflow_placement", method="exflow", gpus=8, time_limit_s=[0.1, 60])
    Path("plan.json").write_text(found.model_dump_json())
    command = [sys.executable, "-m", "repro", "allocation", "plan.json", found.allocations[0].name]
    worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_for(lambda: paths[0].exists() and psutil.Process(worker.pid).children(recursive=True), worker)
    before = paths[0].read_bytes()
    time.sleep(1)  # the second point is at work
    running = psutil.Process(worker.pid).children(recursive=True)
    worker.send_signal(number)
    worker.wait(30)
    _gone, alive = psutil.wait_procs(running, timeout=15)
    assert running and not alive
    assert paths[0].read_bytes() == before and not paths[1].exists()
    assert bool(journal.entries(RESULTS)) == (number == signal.SIGKILL)

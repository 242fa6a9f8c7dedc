"""Whatever a point does, its record says so."""

import fcntl
import os
import signal
import time

import pytest

from repro import experiments, launch, record, runner
from repro.experiments.base import Experiment, MissingHardware, Outcome, Point


def _kill_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def _assert_in_rank(rank: int, world_size: int) -> None:
    assert rank != 1, "rank 1 is wrong"


def _raise(error: BaseException):
    raise error


FAILURES = {
    "oom": lambda: _raise(MemoryError("16 GiB")),
    "assertion": lambda: _raise(AssertionError("not equal")),
    "bad_input": lambda: _raise(ValueError("gpus=5")),
    "unexpected": lambda: _raise(RuntimeError("what now")),
    "node_failure": lambda: launch.launch(_kill_one, 2),
    "timeout": lambda: time.sleep(20),
}


@pytest.fixture
def experiment(monkeypatch):
    def install(run, timeout_s=600.0):
        known = frozenset({"m", "fabric"})
        made = Experiment("", Point, run, label=lambda point: "probe", reports=known, timeout_s=timeout_s)
        monkeypatch.setattr(experiments, "get", lambda name: made)

    return install


@pytest.mark.parametrize("cause", FAILURES)
def test_failures_have_a_typed_cause(tmp_path, experiment, cause):
    experiment(lambda point: FAILURES[cause](), timeout_s=1.0 if cause == "timeout" else 60)
    found = runner.run("flover_queue", Point(), out=tmp_path / "r.json")
    assert found.status == "failed" and found.cause == cause and found.detail
    assert record.read(tmp_path / "r.json") == found


def test_the_cause_inside_a_rank_is_found(experiment):
    experiment(lambda point: launch.launch(_assert_in_rank, 2))
    found = runner.run("flover_queue", Point())
    assert found.cause == "assertion" and "rank 1 is wrong" in found.detail


def test_missing_hardware_is_skipped_not_failed(experiment):
    experiment(lambda point: _raise(MissingHardware("needs a GPU")))
    found = runner.run("flover_queue", Point())
    assert (found.status, found.cause, found.detail) == ("skipped", "missing_hardware", "needs a GPU")


def test_interrupt_leaves_nothing(tmp_path, experiment):
    experiment(lambda point: _raise(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        runner.run("flover_queue", Point(), out=tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


def test_success_carries_provenance(tmp_path, experiment):
    experiment(lambda point: Outcome(metrics={"m": record.Metric(value=2, unit="1")}, conditions={"fabric": "shaped"}))
    found = runner.run("flover_queue", Point(seed=3), repeat=1, attempt=2, out=tmp_path / "r.json")
    assert (found.status, found.seed, found.repeat, found.attempt, found.evidence) == ("ok", 3, 1, 2, "measured")
    facts = found.provenance
    assert (
        facts.packages["torch"]
        and facts.cores
        and facts.cpu
        and facts.source_hash
        and facts.lock_hash
        and facts.config_hash
    )
    assert facts.end >= facts.start


def test_timed_runs_are_alone_and_others_share(tmp_path, monkeypatch):
    monkeypatch.setattr(runner.tempfile, "gettempdir", lambda: str(tmp_path))

    def free(kind) -> bool:
        """Whether another holder would get the lock at once (each open file is a holder of its own)."""
        with next(tmp_path.iterdir()).open("w") as file:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    with runner.machine(timed=False):
        assert free(fcntl.LOCK_SH) and not free(fcntl.LOCK_EX)
    with runner.machine(timed=True):
        assert not free(fcntl.LOCK_SH) and not free(fcntl.LOCK_EX)
    assert free(fcntl.LOCK_EX)

"""Whatever a point does, its record says so."""

import fcntl
import os
import signal
import time

import pytest
import torch

from repro import experiments, launch
from repro.experiments.base import Experiment, Metrics, MissingHardware, Number, Outcome, Point
from repro.experiments.common.ranks import Ranked
from repro.jobs import runner
from repro.records import provenance, record


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


class OneNumber(Metrics):
    m: Number


@pytest.fixture
def experiment(monkeypatch):
    def install(run, timeout_s=600.0, timed=True):
        made = Experiment(Point, OneNumber, conditions=("fabric",), timeout_s=timeout_s, timed=timed)
        monkeypatch.setattr(Experiment, "run", lambda self, point: run(point))
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


def test_a_job_with_gpus_whose_torch_sees_none_fails_and_says_so(experiment, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(runner.NEEDS_GPU, "1")
    experiment(lambda point: pytest.fail("ran on a CPU"))
    found = runner.run("flover_queue", Point())
    assert found.status == "failed" and "this job has GPUs, and torch" in found.detail


@pytest.mark.parametrize("seen, own", [(4, 3), (1, 0)])
def test_a_rank_has_its_gpu_before_its_point_begins(experiment, monkeypatch, seen, own):
    taken, before = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(provenance, "gpus", lambda: ([], ""))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    experiment(lambda point: before.extend(taken) or Outcome(OneNumber(m=2), conditions={"fabric": "shaped"}))
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert runner.run("flover_queue", Point()).status == "ok" and before == []  # no rank: it may fork some
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("REPRO_ALONE", "1")
    assert runner.run("flover_queue", Point()).status == "ok" and before == [own]


def test_interrupt_leaves_nothing(tmp_path, experiment):
    experiment(lambda point: _raise(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        runner.run("flover_queue", Point(), out=tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_that_an_extension_module_made_an_import_error_of_leaves_no_record(experiment, tmp_path):
    def importing(point):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise ImportError("initialization failed") from interrupt

    experiment(importing)
    with pytest.raises(KeyboardInterrupt):
        runner.run("flover_queue", Point(), out=tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_success_carries_provenance(tmp_path, experiment):
    experiment(lambda point: Outcome(OneNumber(m=2), conditions={"fabric": "shaped"}))
    found = runner.run("flover_queue", Point(seed=3), repeat=1, attempt=2, out=tmp_path / "r.json")
    assert (found.status, found.seed, found.repeat, found.attempt, found.evidence) == ("ok", 3, 1, 2, "measured")
    assert found.metrics == {"m": record.Metric(value=2, unit="1")}
    facts = found.provenance
    assert (
        facts.packages["torch"]
        and facts.cores
        and facts.cpu
        and facts.cpu_kind == provenance.cpu_kind()
        and facts.source_hash
        and facts.lock_hash
        and facts.config_hash
    )
    assert facts.end >= facts.start and (facts.gpu, facts.gpu_hash) == ([], "")


def test_where_there_is_a_gpu_the_code_for_it_is_told(tmp_path, experiment, monkeypatch):
    monkeypatch.setattr(provenance, "gpus", lambda: (["a GPU"], "CUDA 13.0"))
    experiment(lambda point: Outcome(OneNumber(m=2), conditions={"fabric": "shaped"}))
    facts = runner.run("flover_serving", Point(), out=tmp_path / "r.json").provenance
    assert facts.gpu_hash == provenance.gpu_hash("repro.experiments.flover_serving") != ""


def test_a_record_has_the_hash_of_the_code_that_ran(tmp_path, experiment, monkeypatch):
    """Not of what was made of it while it ran: a hash is kept once it is asked for."""
    asked = []
    monkeypatch.setattr(runner.provenance, "source_hash", lambda module: asked.append("hash") or "h")
    experiment(lambda point: asked.append("run") or Outcome(OneNumber(m=2), conditions={"fabric": "shaped"}))
    runner.run("flover_queue", Point())
    assert asked.index("hash") < asked.index("run")


@pytest.mark.parametrize("timed", [True, False])
def test_a_timed_point_is_alone_and_others_share(tmp_path, experiment, monkeypatch, timed):
    monkeypatch.setattr(runner.tempfile, "gettempdir", lambda: str(tmp_path))

    def free(kind) -> bool:
        """Whether another holder would get the lock at once (each open file is a holder of its own)."""
        with (tmp_path / "repro-measure.lock").open("w") as file:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    found = []
    experiment(lambda point: found.append((free(fcntl.LOCK_SH), free(fcntl.LOCK_EX))), timed=timed)
    runner.run("flover_queue", Point())
    assert found == [(not timed, False)] and free(fcntl.LOCK_EX)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (GLOO + "Connection closed by peer [10.99.0.2]:40000", "node_failure"),
        (GLOO + "Timed out waiting 1000ms for recv operation to complete", "comm_hang"),
        ("NCCL error: remote process exited or there was a network error", "node_failure"),
        ("CUDA error: out of memory", "oom"),
        ("Triton Error [CUDA]: out of memory", "oom"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "oom"),
        ("shapes do not match", "unexpected"),
    ],
)
def test_what_torch_says_of_neighbours_and_memory(said, cause):
    assert runner.classify(RuntimeError(said)) == cause
    assert runner.classify(launch.RankError(1, "RuntimeError", said, exception=RuntimeError(said))) == cause


@pytest.mark.parametrize(
    ("name", "message", "traceback", "cause"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20 MiB", "", "oom"),
        ("MemoryError", "", "", "oom"),
        ("AcceleratorError", "CUDA error: out of memory", "", "oom"),
        ("KeyError", "'x'", "# of a run that was out of memory", "unexpected"),
    ],
)
def test_a_rank_whose_exception_cannot_be_pickled_is_judged_by_its_words(name, message, traceback, cause):
    assert runner.classify(launch.RankError(1, name, message, traceback)) == cause


PAIR = Ranked(nodes=1, packages=1, gcds=2)


def in_step(monkeypatch, rank):
    """As one of two ranks of a step."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("order", ["cause first", "cause last"])
def test_of_a_jobs_ranks_the_one_that_failed_is_heard(tmp_path, monkeypatch, experiment, order):
    """Its neighbour only lost the connection; whoever writes first."""
    monkeypatch.setattr(runner, "_NEIGHBOUR_S", 0.01)
    errors = [MemoryError("rank 1 is full"), RuntimeError(GLOO + "Connection closed by peer")]
    for error in errors if order == "cause first" else reversed(errors):
        in_step(monkeypatch, rank=int(isinstance(error, MemoryError)))
        experiment(lambda point, error=error: _raise(error))
        runner.run("flover_queue", PAIR, out=tmp_path / "r.json")
    found = record.read(tmp_path / "r.json")
    assert found.cause == "oom" and "rank 1 is full" in found.detail


@pytest.mark.parametrize(("step", "attempt"), [("4", 1), ("3", 2)], ids=["another step", "another attempt"])
def test_a_failure_of_an_earlier_step_or_attempt_is_replaced(tmp_path, monkeypatch, experiment, step, attempt):
    """A job that Slurm requeued may count its steps from 0 again."""
    in_step(monkeypatch, rank=0)
    for now, times, error in (("3", 1, MemoryError("old")), (step, attempt, RuntimeError("new"))):
        monkeypatch.setenv("SLURM_STEP_ID", now)
        experiment(lambda point, error=error: _raise(error))
        runner.run("flover_queue", PAIR, attempt=times, out=tmp_path / "r.json")
    assert "new" in record.read(tmp_path / "r.json").detail


def test_in_a_shell_that_srun_started_every_failure_is_told(tmp_path, monkeypatch, experiment):
    """All that runs there has the same step, and no neighbours."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    for error in (MemoryError("old"), RuntimeError("new")):
        experiment(lambda point, error=error: _raise(error))
        runner.run("flover_queue", Point(), out=tmp_path / "r.json")
    assert "new" in record.read(tmp_path / "r.json").detail


def test_other_ranks_of_a_job_end_without_a_record(tmp_path, monkeypatch, experiment):
    in_step(monkeypatch, rank=1)
    experiment(lambda point: _raise(launch.Done()))
    with pytest.raises(SystemExit) as ended:
        runner.run("flover_queue", PAIR, out=tmp_path / "r.json")
    assert ended.value.code == 0 and not (tmp_path / "r.json").exists()


def test_the_jobs_deadline_comes_before_the_experiments(monkeypatch, experiment):
    monkeypatch.setenv("REPRO_DEADLINE", str(time.time() + 0.2))
    experiment(lambda point: time.sleep(20))
    assert runner.run("flover_queue", Point()).cause == "timeout"

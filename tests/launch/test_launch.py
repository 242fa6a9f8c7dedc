"""`repro.launch` with real processes: results, the true cause of a failure, hangs, and what a killed parent leaves
behind."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from repro.launch import CollectiveHang, Done, LaunchTimeout, RankError, launch, slurm_env, watchdog, where
from repro.launch import rank as rank_module
from repro.topology import frontier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked from the tests' own closures")


class Picky(Exception):
    """Can be pickled, but not unpickled: its __init__ wants more than `args` holds."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


class Mute(Exception):
    """Has no text: `str` of it raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """Whatever a launch did: no child process and no temporary folder may remain."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = set(psutil.Process().children())
    yield
    assert list(folder.glob("repro-*")) == []  # torchrun leaves a folder of its own
    assert not [p for p in set(psutil.Process().children()) - before if "resource_tracker" not in " ".join(p.cmdline())]


def exists(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def eventually(condition, patience_s: float = 15.0) -> bool:
    limit = time.monotonic() + patience_s
    while not (held := condition()) and time.monotonic() < limit:
        time.sleep(0.02)
    return held


def summed(rank: int, world_size: int, offset: float) -> tuple[int, float, int, dict[str, str]]:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return rank, value.item(), torch.get_num_threads(), {name: os.environ[name] for name in names}


def forever_unless(first: int):
    """A function in which rank `first` does its turn and the others wait for it in a collective for ever."""

    def outer(act):
        def run(rank: int, world_size: int) -> None:
            dist.barrier()
            if rank == first:
                act()
            else:
                dist.all_reduce(torch.ones(1 << 16))

        return run

    return outer


def test_results_come_in_rank_order_and_collectives_work():
    results = launch(summed, 4, 0.5)
    assert [rank for rank, *_ in results] == [0, 1, 2, 3]
    assert {value for _, value, *_ in results} == {8.0}
    assert {threads for _, _, threads, _ in results} == {1}
    assert results[2][3] == {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}


def test_results_may_be_larger_than_a_pipe_holds():
    results = launch(lambda rank, world_size: torch.full((3_000_000,), float(rank)), 2)
    assert [r.numel() for r in results] == [3_000_000] * 2 and results[1].unique().tolist() == [1.0]


def test_one_rank_is_a_world():
    assert launch(lambda rank, world_size: (rank, world_size, dist.get_world_size()), 1) == [(0, 1, 1)]


def test_a_rank_may_launch_ranks_of_its_own(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # with the RANK that a rank sees, this would look like torchrun

    def nested(rank: int, world_size: int) -> list[float]:
        dist.barrier()  # nobody leaves before all are connected
        dist.destroy_process_group()
        return [value for _, value, *_ in launch(summed, 2, float(rank))]

    assert launch(nested, 2) == [[1.0, 1.0], [3.0, 3.0]]


def test_several_threads_work_after_the_parent_used_openmp():
    """GNU OpenMP hangs in a fork of a process that has run a parallel region; so these ranks are spawned."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.relu(torch.ones(2000, 2000)) @ torch.ones(2000, 2000)
    finally:
        torch.set_num_threads(before)
    (line,) = launch(torch.linspace, 1, 1_000_000, threads=2, timeout_s=60)
    assert torch.equal(line, torch.linspace(0, 1, 1_000_000))


@pytest.mark.parametrize(
    "error", [ValueError("13 heads"), AssertionError("loss"), MemoryError("40 GiB"), TimeoutError("x")]
)
def test_an_exception_in_a_rank_comes_back_as_it_was(error):
    def fails(rank: int, world_size: int) -> None:
        if rank == 2:
            raise error
        dist.barrier()

    with pytest.raises(RankError) as caught:
        launch(fails, 4)
    found = caught.value
    assert (found.rank, found.type_name, found.message) == (2, type(error).__name__, str(error))
    assert type(found.exception) is type(error) and found.exception.args == error.args
    assert (found.exit_code, found.signal) == (1, None)
    assert "in fails" in found.traceback and "raise error" in found.traceback and "raise error" in str(found)
    assert vars(pickle.loads(pickle.dumps(found))).keys() == vars(found).keys()


def test_an_exception_that_cannot_be_pickled_keeps_its_name_and_text():
    def fails(rank: int, world_size: int) -> None:
        raise Picky("a slot", "row 3")

    with pytest.raises(RankError, match="a slot at row 3") as caught:
        launch(fails, 2)
    assert (caught.value.type_name, caught.value.exception) == ("Picky", None)


def test_an_exception_without_a_text_keeps_its_name_and_place():
    def fails(rank: int, world_size: int) -> None:
        raise Mute

    with pytest.raises(RankError, match="in fails") as caught:
        launch(fails, 1)
    assert (caught.value.type_name, type(caught.value.exception)) == ("Mute", Mute)


def test_a_result_that_cannot_be_unpickled_is_an_error_of_its_rank():
    with pytest.raises(RankError, match="rank 1: TypeError: its result was pickled, but cannot be unpickled"):
        launch(lambda rank, world_size: Picky("a slot", "row 3") if rank else None, 2)


def _full(monkeypatch, name: str) -> None:
    """The disk is full when the file of this name is written."""
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.name == name:
            write(path, content[:1])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)


def test_a_result_that_finds_no_room_is_an_error_that_names_the_file(monkeypatch):
    _full(monkeypatch, "result-1")
    with pytest.raises(RankError, match=r"rank 1: OSError: .*No space left on device: '.*/result-1'"):
        launch(lambda rank, world_size: rank, 2)


def test_a_rank_whose_answer_finds_no_room_takes_nothing_with_it(monkeypatch):
    _full(monkeypatch, "where-0")
    with pytest.raises(LaunchTimeout, match="rank 0:\n  no answer") as caught:
        launch(lambda rank, world_size: time.sleep(60), 2, timeout_s=3)
    assert "time.sleep" in caught.value.stacks[1]


def test_ranks_of_a_parent_without_standard_output_end_in_silence(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdout", None)
    launch(lambda rank, world_size: rank, 2)
    assert "Traceback" not in capfd.readouterr().err


def test_folders_on_a_file_system_without_locks(monkeypatch):
    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))  # as NFS says of a folder

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert launch(lambda rank, world_size: rank, 2) == [0, 1]


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank():
    with pytest.raises(RankError, match="pickle") as caught:
        launch(lambda rank, world_size: (lambda: None) if rank else None, 2)
    assert caught.value.rank == 1


def test_the_cause_is_reported_rather_than_the_neighbours_broken_connection():
    """Rank 1 breaks every connection, which its neighbours report at once, and says why only half a second later."""

    def breaks(rank: int, world_size: int) -> None:
        dist.barrier()
        if rank != 1:
            dist.all_reduce(torch.ones(1 << 16))
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as own:
                own.getpeername()  # only connections: gloo aborts when its listener fails
                own.shutdown(socket.SHUT_RDWR)
        time.sleep(0.5)
        raise ValueError("the real cause")

    with pytest.raises(RankError, match="the real cause") as caught:
        launch(breaks, 4)
    assert caught.value.rank == 1


def test_a_broken_connection_without_a_cause_is_reported_as_such():
    def loses(rank: int, world_size: int) -> None:
        if rank == 0:
            raise RuntimeError(
                "[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer."
            )
        time.sleep(60)

    with pytest.raises(RankError, match="Connection reset") as caught:
        launch(loses, 2)
    assert caught.value.rank == 0


def test_a_rank_killed_in_mid_collective():
    with pytest.raises(RankError, match="rank 1 was killed by signal 9") as caught:
        launch(forever_unless(1)(lambda: os.kill(os.getpid(), signal.SIGKILL)), 4)
    assert (caught.value.signal, caught.value.exit_code, caught.value.exception) == (9, -9, None)


@pytest.mark.parametrize(("look_s", "timeout_s"), [(0.2, 60), (30, 3)], ids=["in time", "at the deadline"])
def test_a_rank_whose_own_processes_outlive_it(monkeypatch, tmp_path, look_s, timeout_s):
    """They hold all its pipes and connections open."""
    monkeypatch.setattr("repro.launch.watch._LOOK_S", look_s)

    def dies(rank: int, world_size: int) -> None:
        if rank == 1:
            if os.fork() == 0:
                eventually((tmp_path / "over").exists, 30)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)

    try:
        with pytest.raises(RankError, match="rank 1 was killed by signal 9"):
            launch(dies, 2, timeout_s=timeout_s)
    finally:
        (tmp_path / "over").touch()


def test_a_rank_that_ends_where_the_system_keeps_no_exit_codes():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(RankError, match="rank 0 ended with exit code None and no result"):
            launch(forever_unless(0)(lambda: os._exit(7)), 2)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_rank_that_leaves_without_a_word(world_size):
    with pytest.raises(RankError, match="exit code 7") as caught:
        launch(forever_unless(0)(lambda: os._exit(7)), world_size)
    assert (caught.value.rank, caught.value.exit_code, caught.value.signal) == (0, 7, None)


def test_slow_work_is_a_timeout_and_no_hang():
    with pytest.raises(LaunchTimeout, match=r"3 of 3 ranks were not done after 3 s; blocked.*ranks 1, 2") as caught:
        launch(forever_unless(0)(lambda: time.sleep(60)), 3, timeout_s=3)  # on busy cores ranks come late
    assert type(caught.value) is LaunchTimeout and isinstance(caught.value, TimeoutError)
    assert "time.sleep" in caught.value.stacks[0] and "all_reduce" in caught.value.stacks[1]


def test_waiting_for_a_finished_rank_is_a_collective_hang():
    with pytest.raises(CollectiveHang, match=r"2 of 3 ranks .* ranks 1, 2") as caught:
        launch(forever_unless(0)(lambda: None), 3, timeout_s=3)
    assert set(caught.value.stacks) == {1, 2}


def test_ranks_that_all_wait_for_each_other_are_a_collective_hang():
    """Through a handle, whose wait() is native code: the stack must show it all the same."""

    def deadlock(rank: int, world_size: int) -> None:
        dist.irecv(torch.ones(1), (rank + 1) % world_size).wait()

    with pytest.raises(CollectiveHang, match="ranks 0, 1") as caught:
        launch(deadlock, 2, timeout_s=3)
    assert "deadlock" in caught.value.stacks[0]


def test_a_process_groups_own_timeout_is_a_collective_hang():
    def impatient(rank: int, world_size: int) -> None:
        group = dist.new_group(timeout=timedelta(seconds=1))
        dist.barrier(group) if rank else time.sleep(60)

    with pytest.raises(CollectiveHang, match="Timed out waiting"):
        launch(impatient, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size 0"),
        *(({"timeout_s": time_s}, f"timeout_s {time_s}") for time_s in (0, float("inf"), float("nan"))),
        ({"threads": 0}, "threads 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        launch(**({"fn": divmod, "world_size": 2} | arguments))


# --- the parent goes away ------------------------------------------------------------------------------------------

PARENT = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite started in the background has it ignored
from repro.launch import launch

def stay(rank, world_size):
    import torch, torch.distributed as dist
    dist.barrier()
    (pathlib.Path(sys.argv[1]) / f"pid{rank}").write_text(str(os.getpid()))
    dist.all_reduce(torch.ones(1)) if rank else time.sleep(120)  # one asleep, the others in a collective

launch(stay, 3)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_ranks_and_files_end_with_the_parent(how, tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    files = [tmp_path / f"pid{rank}" for rank in range(3)]
    assert eventually(lambda: all(file.exists() and file.read_text() for file in files), 60)
    pids = [int(file.read_text()) for file in files]
    assert all(map(exists, pids))
    parent.send_signal(how)
    said = parent.communicate(timeout=30)[1]
    assert parent.returncode == -how
    assert eventually(lambda: not any(map(exists, pids))), f"{how!r} of the parent left ranks behind"
    assert eventually(lambda: not list((tmp_path / "tmp").iterdir()))
    assert ("KeyboardInterrupt" in said) == (how == signal.SIGINT)


STOPPED_HALFWAY = """
from repro.launch import launch, watch

class Interrupted(watch.Ranks):
    calls = 0

    def stop(self):
        self.calls += 1
        if self.calls == 1:
            raise TimeoutError("a signal, just then")
        super().stop()

launch.__globals__["Ranks"] = Interrupted
launch(lambda rank, world_size: rank, 2)
"""


def test_a_parent_whose_end_of_a_launch_is_interrupted_ends(tmp_path):
    """Its ranks wait for its word, and multiprocessing waits for them when a process exits."""
    parent = subprocess.Popen([sys.executable, "-c", STOPPED_HALFWAY], stderr=subprocess.PIPE, text=True)
    try:
        assert "a signal, just then" in parent.communicate(timeout=60)[1] and parent.returncode == 1
    finally:
        for process in [*psutil.Process(parent.pid).children(), parent] if parent.poll() is None else []:
            process.kill()


# --- when this process already is a rank ---------------------------------------------------------------------------

JOINED = """
import json, os, pathlib, sys
from repro.launch import launch

def job(rank, world_size, offset):
    import torch, torch.distributed as dist
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return rank, value.item(), os.getpid()

results = [launch(job, 2, 1), launch(job, 2, 5)]  # a job may launch more than once
try:
    launch(job, 3, 0)
except ValueError as error:
    refused = str(error)
out = {"results": results, "refused": refused, "pid": os.getpid()}
(pathlib.Path(sys.argv[1]) / f"out{os.environ['RANK']}").write_text(json.dumps(out))
"""


def test_an_interrupt_before_the_first_rank_is_told_as_such(monkeypatch):
    def interrupted(threads: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("repro.launch.watch._context", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(summed, 2, 0.5)


def test_under_torchrun(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOINED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*torchrun, script, tmp_path], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outs = [json.loads((tmp_path / f"out{rank}").read_text()) for rank in range(2)]
    pids = [out["pid"] for out in outs]
    for out in outs:
        assert out["results"] == [[[0, 3, pids[0]], [1, 3, pids[1]]], [[0, 11, pids[0]], [1, 11, pids[1]]]]
        assert "world_size is 3" in out["refused"] and "2 ranks" in out["refused"]


def test_under_srun_whose_variables_are_set_by_hand():
    """Two forked processes play the tasks of a step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def task(rank: int, world_size: int) -> list:
        dist.barrier()  # nobody leaves before all are connected
        dist.destroy_process_group()
        rank_module._in_rank = False
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
        step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_PROCID": str(rank)}
        os.environ.update(step | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        return [launch(summed, 2, 1.0), launch(summed, 2, 5.0)]

    for results in launch(task, 2):
        assert [[value for _, value, *_ in once] for once in results] == [[3.0, 3.0], [11.0, 11.0]]
        assert results[0][1][3] == {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(("gpus", "expected"), [(0, ["gloo"]), (4, ["cuda 1", "cpu:gloo,cuda:nccl"])])
def test_a_job_on_gpus_can_send_gpu_tensors(monkeypatch, gpus, expected):
    """The rank takes its GPU before it joins the group. GPUs and group are played: this holds on machines without."""
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "5", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: done.append(f"cuda {index}"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, *_: done.append(backend))
    monkeypatch.setattr(dist, "all_gather_object", lambda results, own: results.__setitem__(0, own))
    assert launch(divmod, 1, threads=torch.get_num_threads()) == [(0, 0)]
    assert done == expected


@pytest.mark.parametrize("lacking", ["MASTER_ADDR", "MASTER_PORT"])
def test_srun_without_a_rendezvous_is_an_error_that_says_so(monkeypatch, lacking):
    """Slurm's own variables tell it, as the tests in tests/slurm show; here they are missing too."""
    for name, value in {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in (lacking, "SLURM_STEP_NODELIST", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=f"{lacking} is not set, and no step of a Slurm job tells it"):
        launch(divmod, 2)


def test_steps_of_neighbouring_jobs_meet_at_ports_of_their_own(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "a")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    ports = set()
    for job, step in itertools.product(range(4_000_000, 4_000_012), range(0, 1000, 3)):
        for name, value in (("SLURM_JOB_ID", job), ("SLURM_STEP_ID", step)):
            monkeypatch.setitem(os.environ, name, str(value))
        ports.add(int(slurm_env.rendezvous()["MASTER_PORT"]))
    assert len(ports) == 12 * 334 and min(ports) >= 10000 and max(ports) < 30000


def test_an_scontrol_that_cannot_be_run_is_named(monkeypatch, tmp_path):
    (tmp_path / "scontrol").touch(mode=0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    with pytest.raises(ValueError, match=r"'node\[1-2\]': `scontrol` cannot be run: Permission denied"):
        slurm_env.hosts()


def in_job(monkeypatch, **variables):
    """As the only rank of a job, whose group is played."""
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | variables
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda *_: None)
    monkeypatch.setattr(dist, "all_gather_object", lambda results, own: results.__setitem__(0, own))


def test_other_ranks_of_a_job_are_told_that_they_are_done(monkeypatch):
    in_job(monkeypatch, RANK="1", WORLD_SIZE="2")
    monkeypatch.setattr(dist, "all_gather_object", lambda results, own: None)
    with pytest.raises(Done):
        launch(divmod, 2, threads=torch.get_num_threads(), first_only=True)


def test_a_wrong_topology_is_an_error():
    with pytest.raises(ValueError, match="world_size is 2, but the topology has 4 ranks"):
        launch(divmod, 2, topology=frontier(1, 2, 2))


LATE = """
import sys, time
import torch.distributed as dist
from repro.launch import launch

dist.init_process_group = lambda *_: None
dist.all_gather_object = lambda results, own: None

def wait_for_ever(rank, world_size):
    time.sleep(60)

launch(wait_for_ever, 1, timeout_s=float(sys.argv[1]))
"""


@pytest.mark.parametrize("by", ["its own limit", "the job's deadline"])
def test_a_late_rank_of_a_job_says_where_it_is_and_ends(tmp_path, by):
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "REPRO_WHERE": str(tmp_path)}
    limit = "1" if by == "its own limit" else "60"
    if by == "the job's deadline":
        job["REPRO_DEADLINE"] = str(time.time() + 5)
    command = [sys.executable, "-c", LATE, limit]
    done = subprocess.run(command, env=os.environ | job, capture_output=True, text=True, timeout=50)
    assert done.returncode == watchdog.EXIT_CODE, done.stderr
    late = watchdog.cause(tmp_path, 1)
    assert type(late) is LaunchTimeout and "1 of 1 ranks were not done" in str(late) and "wait_for_ever" in str(late)
    assert "wait_for_ever" in done.stderr


def watched(monkeypatch, silent_s: float, work_s: float) -> int:
    """Exit code of a process that does so long what should take a hundredth of a second."""
    monkeypatch.setattr(watchdog, "SILENT_S", silent_s)
    monkeypatch.setattr(watchdog, "_TOGETHER_S", 0.0)
    child = os.fork()
    if child == 0:
        with watchdog.until(0.01, 0, watched.__code__):
            time.sleep(work_s)
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_late_rank_ends_also_where_it_can_leave_no_file(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv(watchdog.FOLDER, str(tmp_path / "gone"))
    assert watched(monkeypatch, 0.0, 10.0) == watchdog.EXIT_CODE
    assert "rank 0 was not done" in capfd.readouterr().err


def test_a_rank_that_gets_done_just_after_its_time_lives_on(monkeypatch):
    assert watched(monkeypatch, 30.0, 0.1) == 0


def test_asking_for_silence_leaves_no_file_open(tmp_path):
    with (tmp_path / "open").open("w"):
        before = len(os.listdir("/proc/self/fd"))
        where._silent_s()
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fate", ["killed", "raised", "finished"])
def test_what_happens_just_after_the_deadline_is_told(fate, monkeypatch):
    monkeypatch.setattr("repro.launch.watch.SILENT_S", 3.0)  # however late a busy machine wakes a rank
    begin = time.monotonic()

    def rank(number, world):
        end = begin + (1.6 if number == 1 else 1.7 if fate == "finished" else 30)
        time.sleep(max(0.0, end - time.monotonic()))  # however long it took to start
        if number == 1 and fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 1 and fate == "raised":
            raise KeyError("late")
        return number

    if fate == "finished":
        assert launch(rank, 2, timeout_s=1) == [0, 1]
        return
    with pytest.raises(RankError) as caught:
        launch(rank, 2, timeout_s=1)
    assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL if fate == "killed" else None)
